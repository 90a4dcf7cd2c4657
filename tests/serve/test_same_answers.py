"""Requests that arrive at random, are preempted and cancelled have the answers of the requests alone, bit by bit."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import ortolan
from ortolan.benchmarks import same_answers
from ortolan.benchmarks.same_answers import Result, check, main, make_requests, together
from ortolan.engine import Engine
from ortolan.engine.model import CacheType

from ..engine.small_model import VOCABULARY, SmallModel, SmallSampler
from ..passes.cached_llama import llama


@pytest.mark.parametrize(
    ("form", "weights", "cache_type"),
    [("gqa", "int4", "bfloat16"), ("standard", "int8", "bfloat16"), ("gqa", "int8", "int8")],
)
def test_answers_depend_on_their_request_alone(tmp_path: Path, form: str, weights: str, cache_type: CacheType) -> None:
    onnx.save(llama(form), tmp_path / "model.onnx")
    ortolan.optimize_onnx(
        tmp_path / "model.onnx", tmp_path / "serving.onnx", weights=weights, serve=True, allow_different=True
    )
    result = check(tmp_path / "serving.onnx", count=150, threads=2, seed=1, cache_type=cache_type)
    assert result.different == []
    assert result.compared == 150 and result.cancelled > 5
    assert result.preemptions > 5 and result.shared_tokens > 500 and result.accepted_tokens > 0


def test_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)
    assert main([str(tmp_path / "serving.onnx"), "--requests", "8", "--threads", "1", "--cache-type", "int8"]) == 0
    assert "every answer equals that of the request alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("result", "status", "message"),
    [
        (Result(2000, 200, [], 5, 700, 9), 0, "every answer equals"),
        (Result(2000, 200, [3], 5, 700, 9), 1, "1 answers differ"),
        (Result(2000, 200, [], 0, 700, 9), 1, "too little was checked"),
        (Result(2000, 200, [], 5, 0, 9), 1, "too little was checked"),
        (Result(2000, 200, [], 5, 700, 0), 1, "too little was checked"),
        (Result(8, 0, [], 0, 0, 0), 0, "every answer equals"),
    ],
)
def test_its_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], result: Result, status: int, message: str
) -> None:
    monkeypatch.setattr(same_answers, "check", lambda *_: result)
    assert main(["folder"]) == status
    assert message in capsys.readouterr().out


def test_an_error_of_a_client_is_raised() -> None:
    model = SmallModel(blocks=64, context=400)

    def fail(_: object) -> None:
        raise ValueError("no memory")

    model.check = fail
    with (
        Engine(model, sampler=SmallSampler()) as engine,
        pytest.raises(RuntimeError, match="request failed: the model failed: no memory"),
    ):
        together(engine, make_requests(20, VOCABULARY, seed=0), seed=0)
