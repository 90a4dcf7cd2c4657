"""Weight formats and epilogues of SparseAMXMatMul and related operators, for parametrized tests."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses

from .quantized import Layer
from .single_node import Packed

GROUPS = {"int8": None, "int4 g32": 32, "int4 g64": 64, "int4 g128": 128}

BITS = {"bf16": 16, "int8": 8, "int4 g32": 4, "int4 g64": 4, "int4 g128": 4}


def uses(kind: str, dense: bool, activation: Activation = Activation.NONE, residual: bool = False) -> Uses:
    return Uses(frozenset({BITS[kind]}), dense, activations=frozenset({activation}), residual=residual)


def attributes(kind: str, activation: Activation = Activation.NONE) -> dict[str, Any]:
    group_size = GROUPS.get(kind) or 0
    return {"weight_bits": BITS[kind], "group_size": group_size, "activation": int(activation), "gated_columns": 0} | {
        "norm_epsilon": -1.0,
        "x_zero_points": 0,
    }


def packed(layer: Layer, dense: bool) -> Packed:
    pack = _native.pack_bitmap_int8 if layer.group is None else _native.pack_bitmap_int4
    return pack(layer.weights, dense=dense)


def scales(layer: Layer) -> np.ndarray:
    return _native.pack_scales(layer.scales, bf16=layer.group is not None)


def apply(activation: Activation, y: np.ndarray) -> np.ndarray:
    y = y.astype(np.float64)
    if activation == Activation.RELU:
        return np.maximum(y, 0)
    if activation == Activation.GELU:
        return y * 0.5 * np.vectorize(math.erfc, otypes=[float])(-y / math.sqrt(2))
    if activation == Activation.GELU_TANH:
        return 0.5 * y * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return y / (1 + np.exp(-y)) if activation == Activation.SILU else y


RESIDUALS: dict[str, Callable[[int, int], tuple[int, ...]]] = {
    "same": lambda m, n: (2, m, n),
    "row": lambda m, n: (n,),
    "scalar": lambda m, n: (),
    "column": lambda m, n: (m, 1),
    "rows of one batch": lambda m, n: (m, n),
    "a batch more": lambda m, n: (3, 1, m, n),
    "one each": lambda m, n: (2, 1, 1),
}
