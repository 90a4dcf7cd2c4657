"""The benchmark of the engine and its sampler."""

from __future__ import annotations

import json

import pytest

from ortolan.benchmarks import engine_overhead


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_overhead, "_SEQUENCES", (1, 3))
    monkeypatch.setattr(engine_overhead, "_VOCABULARIES", (100, 200))


def test_it_prints_both_tables(capsys: pytest.CaptureFixture[str]) -> None:
    engine_overhead.main(["--tokens", "4", "--rounds", "1", "--text"])
    steps, draws = capsys.readouterr().out.split("\n\n")
    assert [line.split()[0] for line in steps.splitlines()[2:]] == ["1", "3"]
    assert [line.split("  ")[0] for line in draws.splitlines()[1:]] == list(engine_overhead._SAMPLED)


def test_its_result_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    engine_overhead.main(["--tokens", "4", "--rounds", "1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["milliseconds_per_step"].keys() == {"1", "3"}
    assert {name: set(one) for name, one in found["microseconds_per_token"].items()} == {
        name: {"100", "200"} for name in engine_overhead._SAMPLED
    }
