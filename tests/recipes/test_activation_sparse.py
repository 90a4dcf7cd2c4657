"""The recipes activation-sparse and activation-sparse-int8 on whole models."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest

import ortolan
from ortolan import CalibrationError
from ortolan.generate import Decoder
from ortolan.models import tiny

from .forms import NAMED

RECIPES = ["activation-sparse", "activation-sparse-int8"]
FAST = {"verify.seconds": 0.0, "may_grow": True}


def llama_feeds(sequences: int = 4, tokens: int = 40) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(0)
    past = np.zeros((1, 2, 0, 12), np.float32)
    return [
        {
            "input_ids": rng.integers(0, 97, (1, tokens)),
            "attention_mask": np.ones((1, tokens), np.int64),
            "position_ids": np.arange(tokens)[None],
            **{f"past_key_values.{layer}.{part}": past for layer in range(2) for part in ("key", "value")},
        }
        for _ in range(sequences)
    ]


def bert_feeds() -> dict[str, np.ndarray]:
    ids = np.random.default_rng(0).integers(0, 101, (4, 30))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_decoder(recipe, tmp_path):
    path, feeds = tmp_path / "fast.onnx", llama_feeds()
    report = ortolan.optimize_onnx(
        ir.to_proto(tiny.tiny_llama()), path, recipe=NAMED[recipe], calibration=feeds, options=FAST | {"sparsity": 0.25}
    )
    layers = {layer.name.split("/")[-2]: layer for layer in report.replaced if "layers.1" in layer.name}
    assert set(layers) == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    for layer in report.replaced:
        assert layer.new_op == "MaskedMatMul"
        assert layer.density == pytest.approx(0.75, abs=0.02)
        assert layer.weight_bits == (8 if recipe.endswith("int8") else None)
    assert layers["q_proj"].threshold == layers["k_proj"].threshold == layers["v_proj"].threshold
    assert layers["gate_proj"].threshold == layers["up_proj"].threshold
    assert not any("lm_head" in layer.name for layer in report.replaced)
    assert report.file_size_after < report.file_size_before

    # Compare single tokens with one call for all tokens, with the library and without it.
    session = ortolan.create_session(path)
    ids = feeds[0]["input_ids"][0]
    at_once = session.run(None, feeds[0])[0][0]
    decoder = Decoder(session)
    one_by_one = np.concatenate([decoder.step([token]) for token in ids])
    portable = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"]).run(None, feeds[0])[0][0]
    for found in (one_by_one, portable):
        assert np.linalg.norm(found - at_once) < 0.05 * np.linalg.norm(at_once)


@pytest.mark.parametrize("recipe", RECIPES)
def test_an_encoder(recipe):
    feeds = bert_feeds()
    report = ortolan.optimize_onnx(ir.to_proto(tiny.tiny_bert()), recipe=NAMED[recipe], calibration=feeds, options=FAST)
    assert len(report.replaced) == 12
    assert all(layer.density == pytest.approx(0.6, abs=0.02) for layer in report.replaced)
    assert "density" in str(report)


@pytest.mark.parametrize("recipe", RECIPES)
def test_refused_without_calibration(recipe):
    with pytest.raises(CalibrationError, match="'activations' needs calibration inputs"):
        ortolan.optimize_onnx(ir.to_proto(tiny.tiny_llama()), recipe=NAMED[recipe], options=FAST)


def test_int8_is_the_other_and_quantize():
    bf16, int8 = map(NAMED.__getitem__, RECIPES)
    names = [step.name for step in int8.passes]
    assert names == ["normalize", "calibrate", "quantize", "embeddings", "activations", "replace", "verify"]
    assert [step.name for step in bf16.passes] == [name for name in names if name not in ("quantize", "embeddings")]
    steps = [step for step in (*bf16.passes, *int8.passes) if step.name in ("quantize", "activations")]
    assert len(steps) == 3
    assert len({step.options.exclude for step in steps}) == 1  # type: ignore[attr-defined]
