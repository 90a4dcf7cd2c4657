"""Requests that arrive at random, are preempted and cancelled have the answers of the requests alone, bit by bit."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest

import ortolan
from ortolan.benchmarks.same_answers import check, main

from ..passes.cached_llama import llama


@pytest.mark.parametrize(("form", "weights"), [("gqa", "int4"), ("standard", "int8")])
def test_answers_depend_on_their_request_alone(tmp_path: Path, form: str, weights: str) -> None:
    onnx.save(llama(form), tmp_path / "model.onnx")
    ortolan.optimize_onnx(
        tmp_path / "model.onnx", tmp_path / "serving.onnx", weights=weights, serve=True, allow_different=True
    )
    result = check(tmp_path / "serving.onnx", count=150, threads=2, seed=1)
    assert result.different == []
    assert result.compared == 150 and result.cancelled > 5
    assert result.preemptions > 5 and result.shared_tokens > 500


def test_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx.save(llama("gqa"), tmp_path / "model.onnx")
    ortolan.optimize_onnx(tmp_path / "model.onnx", tmp_path / "serving.onnx", weights="int8", serve=True)
    assert main([str(tmp_path / "serving.onnx"), "--requests", "8", "--threads", "1"]) == 0
    assert "every answer equals that of the request alone" in capsys.readouterr().out
