"""The benchmark of speculative decoding: its requests, counts and exit status."""

from __future__ import annotations

import pytest

from ortolan.benchmarks import speculation
from ortolan.benchmarks.speculation import Row, compare, main, make_requests
from ortolan.engine import Engine

from ..engine.chain_drafter import ChainDrafter
from ..engine.small_model import VOCABULARY, SmallModel, SmallSampler


def encode(text: str) -> list[int]:
    return [ord(letter) % VOCABULARY for letter in text]


@pytest.mark.parametrize("text", ["copy", "edit", "story"])
def test_its_requests_differ(text: str) -> None:
    requests = make_requests(text, 16, 32, encode)
    assert len({request.prompt for request in requests}) == 16


@pytest.mark.parametrize("repeats", [True, False])
def test_it_compares_tokens_and_counts_drafts(repeats: bool) -> None:
    requests = make_requests("edit", 2, 40, encode)
    plain = Engine(SmallModel(200, 2000, repeats=repeats), sampler=SmallSampler(), speculation=None)
    other = Engine(SmallModel(200, 2000, repeats=True), sampler=SmallSampler(), speculation=ChainDrafter())
    with plain, other:
        row = compare(plain, other, "edit", requests, rounds=2)
    assert (row.text, row.requests, row.equal) == ("edit", 2, repeats)
    assert row.plain > 0 and row.ratio == pytest.approx(row.speculative / row.plain)
    assert row.drafted > 0 and 0 < row.accepted < 1


def test_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("copy", 1, 10.0, 25.0, 2.5, 0.9, 0.8, True), Row("story", 4, 10.0, 9.9, 0.99, 0.1, 0.2, False)]
    monkeypatch.setattr(speculation, "measure", lambda *_: rows)
    assert main(["folder"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out
    rows.pop()
    assert main(["folder"]) == 0
    assert "2.50" in capsys.readouterr().out


def test_a_missing_model_is_an_error_without_a_traceback(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "missing")])
    assert "does not exist" in capsys.readouterr().err
