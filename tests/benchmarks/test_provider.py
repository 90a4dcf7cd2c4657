"""The benchmark of the execution provider, on a small encoder."""

from __future__ import annotations

import sys
from pathlib import Path

import onnx_ir as ir
import pytest
from onnxruntime.quantization import quantize_dynamic

from ortolan.benchmarks import provider
from ortolan.models import tiny

from ..provider.sessions import needs_provider


@needs_provider
def test_a_model_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    ir.save(tiny.tiny_bert(vocab_size=30_001), tmp_path / "float.onnx")
    quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx")
    arguments = ["--model", str(tmp_path / "int8.onnx"), "--shape", "1x4", "--seconds", "0"]
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["provider", *arguments])
    provider.main()
    shown = capsys.readouterr().out
    assert "1x4" in shown and "peak memory" in shown
