"""Mixtures of experts, as Optimum exports them with separate layers for each expert, become one operator each.

Optimum only knows Qwen3-MoE; Mixtral and OLMoE are exported by the same code. Skipped without ortolan[optimum].
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest

pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx[onnxruntime]")

import importlib

from optimum.exporters.onnx.model_patcher import qwen3_moe_forward_patched
from optimum.exporters.tasks import TasksManager

import ortolan
from ortolan.models.zoo import SMALL, export, find_architecture

BLOCKS = {"mixtral": "MixtralSparseMoeBlock", "olmoe": "OlmoeSparseMoeBlock"}
LIMITS = {"int8": 0.05, "int4": 0.3}


def exported(name: str, divided: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    architecture = find_architecture(name)
    if name in BLOCKS:
        module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
        block = getattr(module, BLOCKS[name])
        monkeypatch.setattr(block, "forward", qwen3_moe_forward_patched)
        monkeypatch.setattr(block, "norm_topk_prob", divided, raising=False)
        known = TasksManager._SUPPORTED_MODEL_TYPE
        monkeypatch.setitem(known, name, known["mistral"])
    if name != "mixtral":
        architecture = replace(architecture, options={"norm_topk_prob": divided})
    return export(architecture, SMALL, folder) / "model.onnx"


@pytest.mark.parametrize(
    ("name", "divided"), [("qwen3_moe", False), ("qwen3_moe", True), ("mixtral", True), ("olmoe", False)]
)
def test_experts_become_one_operator(name: str, divided: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = exported(name, divided, tmp_path, monkeypatch)
    for weights, most in LIMITS.items():
        output = tmp_path / f"{weights}.onnx"
        report = ortolan.optimize_onnx(source, output, weights=weights, options={"verify.seconds": 0.0})
        kinds = [node.op_type for node in ir.load(output).graph]
        assert kinds.count("MoE") == SMALL.layers
        assert not {"NonZero", "ScatterElements", "OneHot"} & set(kinds)
        assert report.output_error[0].relative_l2 < most
