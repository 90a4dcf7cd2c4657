"""Models of one PackTokens or UnpackTokens node, and both operators in NumPy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper

from ortolan.graph_passes.operators.packed_tokens import UNPACK, packed_tokens_function

Kept = NDArray[np.int64]


def node_model(
    op_type: str, rank: int = 3, x_type: type = np.float32, opset: int = 17, kept_rank: int = 2
) -> onnx.ModelProto:
    """Return a model of one node "tokens" with its function: inputs `kept` and X, output Y."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(x_type))
    shapes = {"kept": [f"k{i}" for i in range(kept_rank)], "X": [f"x{i}" for i in range(rank)]}
    graph = helper.make_graph(
        [helper.make_node(op_type, ["kept", "X"], ["Y"], "tokens", domain="ai.ortolan")],
        "single",
        [
            helper.make_tensor_value_info("kept", TensorProto.INT64, shapes["kept"]),
            helper.make_tensor_value_info("X", kind, shapes["X"]),
        ],
        [helper.make_tensor_value_info("Y", kind, [f"y{i}" for i in range(rank)])],
    )
    return helper.make_model(
        graph,
        functions=[ir.to_proto(packed_tokens_function(op_type, opset))],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def packed(kept: Kept, x: np.ndarray) -> np.ndarray:
    return np.broadcast_to(x, (*kept.shape, *x.shape[2:]))[kept != 0][None]


def unpacked(kept: Kept, x: np.ndarray) -> np.ndarray:
    y = np.zeros((*kept.shape, *x.shape[2:]), x.dtype)
    y[kept != 0] = x[0]
    return y


def expected(op_type: str, kept: Kept, x: np.ndarray) -> np.ndarray:
    return unpacked(kept, x) if op_type == UNPACK else packed(kept, x)


def random_kept(rng: np.random.Generator, batch: int, tokens: int, density: float = 0.6) -> Kept:
    """Return a token mask with gaps, whose nonzero values are arbitrary."""
    numbers = rng.choice(np.array([1, 1, 2, -1, 2**40, -(2**63)], np.int64), (batch, tokens))
    return np.where(rng.random((batch, tokens)) < density, numbers, 0)


def random_x(rng: np.random.Generator, shape: Sequence[int], x_type: type) -> np.ndarray:
    """Return values with random bits; valid booleans for bool."""
    if x_type is np.bool_:
        return rng.random(shape) < 0.5
    count = int(np.prod(shape)) * np.dtype(x_type).itemsize
    return rng.integers(0, 256, count).astype(np.uint8).view(x_type).reshape(shape)
