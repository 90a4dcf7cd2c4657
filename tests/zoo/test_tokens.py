"""Decoders and encoder-decoders of many architectures, as Optimum exports them, generate the original's tokens.

Attention with float caches must be replaced by one operator. Skipped without ortolan[optimum].
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx[onnxruntime]")
torch = pytest.importorskip("torch")

from optimum.onnxruntime import ORTModelForCausalLM, ORTModelForSeq2SeqLM, ORTModelForSpeechSeq2Seq  # noqa: E402

import ortolan  # noqa: E402
from ortolan.graph_passes.operators.nomad_attention_function import ATTENTIONS  # noqa: E402
from ortolan.models import zoo  # noqa: E402
from ortolan.optimum import OrtolanOptimizer  # noqa: E402

OPTIONS = {"verify.seconds": 0.0}
DECODERS = ["gpt2", "gptj", "gpt_neo", "gpt_neox", "opt", "bloom", "mpt", "falcon", "phi", "phi3", "gemma", "gemma2"]
DECODERS += ["gemma3_text", "mistral", "qwen3_moe", "granite", "smollm3", "olmo2"]
PAIRS = ["t5", "mt5", "bart", "mbart", "marian", "pegasus", "m2m_100", "blenderbot"]
# Optimum exports these models with one key and value head per query head.
UNGROUPED = {"num_key_value_heads": zoo.SMALL.heads}
WITHOUT_GROUPS = ("gemma2", "phi3", "olmo2")
FORCED: dict[str, Any] = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def operators(path: Path) -> list[str]:
    found: list[str] = []

    def visit(graph: onnx.GraphProto) -> None:
        for node in graph.node:
            found.append(node.op_type)
            for attribute in node.attribute:
                if attribute.type == onnx.AttributeProto.GRAPH:
                    visit(attribute.g)

    visit(onnx.load(path, load_external_data=False).graph)
    return found


def optimized(name: str, folder: Path) -> tuple[Path, Path]:
    architecture = zoo.find_architecture(name)
    if name in WITHOUT_GROUPS:
        architecture = replace(architecture, options={**architecture.options, **UNGROUPED})
    source = zoo.export(architecture, zoo.SMALL, folder / "source")
    report = OrtolanOptimizer.from_pretrained(source).optimize(folder / "fast", cache="float32", options=OPTIONS)
    assert report.portable
    return source, folder / "fast"


def text() -> dict[str, Any]:
    """Return three sequences, two of them with left padding."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 200, (3, 10), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :4], mask[1, :1] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("name", DECODERS)
def test_decoders(name: str, tmp_path: Path) -> None:
    source, fast = optimized(name, tmp_path)
    layers = zoo.SMALL.layers
    kinds = operators(fast / "model.onnx")
    assert kinds.count("NoMADAttention") == layers
    assert kinds.count("Softmax") == operators(source / "model.onnx").count("Softmax") - layers
    found = ORTModelForCausalLM.from_pretrained(fast, session_options=ortolan.register())
    expected = ORTModelForCausalLM.from_pretrained(source)
    inputs = text()
    assert torch.equal(found.generate(**inputs, **FORCED), expected.generate(**inputs, **FORCED))
    torch.testing.assert_close(found(**inputs).logits[2], expected(**inputs).logits[2], rtol=1e-4, atol=1e-5)


def generated(model_class: Any, folder: Path, inputs: dict[str, Any], **options: Any) -> Any:
    model = model_class.from_pretrained(folder, **options)
    return [model.generate(**inputs, **FORCED, num_beams=beams) for beams in (1, 3)]


def check_pair(name: str, folder: Path, model_class: Any, inputs: dict[str, Any]) -> None:
    source, fast = optimized(name, folder)
    for file, count in (("encoder_model", 1), ("decoder_model", 2), ("decoder_model_merged", 4)):
        kinds = operators(fast / f"{file}.onnx")
        attentions = sum(kinds.count(op_type) for op_type in ATTENTIONS)
        assert attentions == count * zoo.SMALL.layers and "Softmax" not in kinds, file
    for merged in (True, False):
        expected = generated(model_class, source, inputs, use_merged=merged)
        found = generated(model_class, fast, inputs, use_merged=merged, session_options=ortolan.register())
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True)), merged


@pytest.mark.parametrize("name", PAIRS)
def test_encoders_with_decoders(name: str, tmp_path: Path) -> None:
    check_pair(name, tmp_path, ORTModelForSeq2SeqLM, text())


@pytest.mark.parametrize(
    ("name", "sound", "shape"),
    [("whisper", "input_features", (2, 80, 3000)), ("moonshine", "input_values", (2, 16000))],
)
def test_speech(name: str, sound: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    check_pair(name, tmp_path, ORTModelForSpeechSeq2Seq, {sound: values})
