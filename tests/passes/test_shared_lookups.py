"""A low-bit head whose weight is also the word embedding, as ONNX Runtime GenAI's builder ties them."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import ortolan

from .small_models import make_model, op_types, run

WORDS, WIDTH, BLOCK = 200, 96, 32  # no multiple of the panel width, nor of the tile of 64 inputs
FLOAT = TensorProto.FLOAT


def packed(codes: np.ndarray, bits: int) -> np.ndarray:
    return codes if bits == 8 else codes[..., ::2] | codes[..., 1::2] << 4


def tied(
    bits: int, zero_points: bool, ids: int = TensorProto.INT64, dtype: type = np.float32, other_scales: bool = False
) -> onnx.ModelProto:
    rng = np.random.default_rng(bits)
    blocks = -(-WIDTH // BLOCK)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    codes = rng.integers(0, 2**bits, (WORDS, blocks, BLOCK)).astype(np.uint8)
    if bits == 8:
        codes = np.clip(codes, 0, 240)  # codes minus the zero point must fit into int8
    zeros = rng.integers(0, 2**bits, (WORDS, blocks + blocks % 2)).astype(np.uint8)
    zeros = packed(zeros, 4) if bits == 4 else np.full((WORDS, blocks), 120, np.uint8)
    weights = {
        "head": packed(codes, bits),
        "scales": (rng.random((WORDS, blocks)) / 50 + 0.01).astype(dtype),
        "flat": np.array([WORDS, -1]),
        "norm": np.ones(WIDTH, dtype),
    } | ({"zeros": zeros} if zero_points else {})
    if other_scales:
        weights["other"] = weights["scales"] * 2
    more = ["zeros"] if zero_points else []
    block = {"bits": bits, "block_size": BLOCK, "domain": "com.microsoft"}
    nodes = [
        helper.make_node("Reshape", ["head", "flat"], ["table"]),
        helper.make_node(
            "GatherBlockQuantized",
            ["table", "ids", "other" if other_scales else "scales", *more],
            ["x"],
            name="embed",
            gather_axis=0,
            quantize_axis=1,
            **block,
        ),
        helper.make_node("Mul", ["x", "norm"], ["y"]),
        helper.make_node(
            "MatMulNBits", ["y", "head", "scales", *more], ["logits"], "lm_head", K=WIDTH, N=WORDS, **block
        ),
    ]
    inputs, outputs = {"ids": (ids, ["batch", "tokens"])}, {"logits": (kind, ["batch", "tokens", WORDS])}
    outputs["x"] = (kind, ["batch", "tokens", WIDTH])
    return make_model(nodes, inputs, outputs, weights, domains={"com.microsoft": 1})


@pytest.mark.parametrize("ids", [TensorProto.INT64, TensorProto.INT32])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("zero_points", [False, True])
@pytest.mark.parametrize("bits", [4, 8])
def test_the_weight_is_stored_once(bits: int, zero_points: bool, dtype: type, ids: int) -> None:
    model = tied(bits, zero_points, ids, dtype)
    words = np.array([[0, 17, WORDS - 1], [15, 16, -1]]).astype(helper.tensor_dtype_to_np_dtype(ids))
    report = ortolan.optimize_onnx(model, calibration={"ids": words}, options={"verify.seconds": 0.0})
    kinds = op_types(report.model)
    assert f"W{bits}A8MatMul" in kinds and "GatherBlockQuantized" not in kinds
    large = [tensor.name for tensor in report.model.graph.initializer if np.prod(tensor.dims) >= WORDS * WIDTH // 2]
    assert large == ["head.weights"]
    assert any("is read from the weight of 'lm_head', its tied head" in note for note in report.notes)
    assert not any("stored twice" in note for note in report.notes)
    for feeds in (words, words[:1, :1], words[:0]):
        expected, found = run(model, {"ids": feeds})[1], run(report.model, {"ids": feeds}, library=True)[1]
        np.testing.assert_allclose(found, expected, rtol=1e-6 if dtype == np.float32 else 1e-3)


def test_a_table_with_scales_of_its_own_stays() -> None:
    words = np.array([[0, 17]])
    report = ortolan.optimize_onnx(
        tied(4, True, other_scales=True), calibration={"ids": words}, options={"verify.seconds": 0.0}
    )
    assert "GatherBlockQuantized" in op_types(report.model)
    assert any("stored twice" in note for note in report.notes)
