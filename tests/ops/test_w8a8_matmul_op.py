"""Test packing for W8A8MatMul, and which operators accept 8-bit weights in groups. ORT: test_group_matmul_op.py."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators.replacement import LayerWeight, Stored
from ortolan.graph_passes.operators.w4a8_matmul import W4A8MatMul
from ortolan.graph_passes.operators.w8a8_matmul import W8A8MatMul
from ortolan.graph_passes.passes.plan.replace import REPLACEMENTS
from ortolan.graph_passes.weights.quantizers.grid import Quantization

from .groups import GroupLayer


@pytest.mark.parametrize("half", [True, False])
def test_packing(half: bool) -> None:
    """Scales are packed as float16 if that is exact; the result is x W within the bound."""
    rng = np.random.default_rng(9)
    layer = GroupLayer.random(rng, 100, 20, 32, half=half, bits=8)
    weight = QuantizedWeight(8, 32, ir.tensor(layer.q), ir.tensor(layer.scales.astype(np.float32)))
    whole = LayerWeight(weight.matrix(), weight)
    packed = W8A8MatMul().pack(whole)
    assert packed["weights"].array.shape == (2, 32, 16, 4)
    assert packed["scales"].array.dtype == (np.float16 if half else np.float32)
    if half:
        total = sum(tensor.array.nbytes for tensor in packed.values())
        assert W8A8MatMul().packed_bytes(100, 20, Stored(0), weight) == total
    x = rng.standard_normal((5, 100), dtype=np.float32)
    tensors = {name: ir.Tensor(one.array, dtype=one.dtype, name=name) for name, one in packed.items()}
    y = W8A8MatMul().run(x, tensors, whole)
    layer.check(y, x)
    assert (np.abs(y - x @ whole.matrix) <= W8A8MatMul().rounding_bound(x, whole)).all()


def test_who_takes_which_numbers() -> None:
    """W8A8MatMul accepts 8-bit weights in groups, and no other weights; no other operator accepts them."""
    groups = Quantization(8, 32)
    for name, operator in REPLACEMENTS.items():
        reason = operator().why_not(64, groups)
        assert (reason is None) == (name == "W8A8MatMul"), reason
        if name not in ("W8A8MatMul", "W4A8MatMul"):
            assert reason is not None and "in groups of 32" in reason and "W8A8MatMul does" in reason
    assert W4A8MatMul().why_not(64, groups) is not None
    for other, words in (
        (None, "not quantized to 8 bits"),
        (Quantization(4, 32), "not quantized to 8 bits"),
        (Quantization(8, None), "one group per column"),
        (Quantization(8, 48), "groups of 48"),
        (Quantization(8, 32, symmetric=False), "zero points or minimums"),
    ):
        assert words in str(W8A8MatMul().why_not(64, other))
