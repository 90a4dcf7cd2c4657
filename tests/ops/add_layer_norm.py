"""Models of one AddLayerNorm node, and its expected output from the kernel that linear layers use too."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ortolan import _testing
from ortolan.graph_passes.operators.add_layer_norm import INPUTS, add_layer_norm_function

from .layer_norm import random_vectors
from .single_node import session

Floats = NDArray[np.float32]

NONE = np.zeros(1, np.float32)


def node_model(
    ranks: Sequence[int],
    weight: np.ndarray,
    bias: np.ndarray,
    epsilon: float | None = 1e-12,
    opset: int = 17,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one AddLayerNorm node "norm" with its function.

    ranks: rank of each operand. Inputs are named as in INPUTS, the output is Y.
    """
    tensors = {"norm_weight": weight, "norm_bias": bias, **dict.fromkeys(INPUTS[len(ranks) : 3], NONE)}
    given = {"epsilon": epsilon, "format_version": 1, **attributes}
    node = helper.make_node(
        "AddLayerNorm",
        list(INPUTS),
        ["Y"],
        "norm",
        domain="ai.ortolan",
        **{name: value for name, value in given.items() if value is not None},
    )
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}{axis}" for axis in range(rank)])
        for name, rank in zip(INPUTS, ranks, strict=False)
    ]
    output = helper.make_tensor_value_info("Y", TensorProto.FLOAT, [f"Y{axis}" for axis in range(max(ranks))])
    initializers = [numpy_helper.from_array(array, name) for name, array in tensors.items()]
    graph = helper.make_graph([node], "single", inputs, [output], initializers)
    return helper.make_model(
        graph,
        functions=[ir.to_proto(add_layer_norm_function(opset))],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def added(operands: Sequence[Floats]) -> Floats:
    """Add the operands from left to right, rounding each sum."""
    total = operands[0]
    for operand in operands[1:]:
        total = total + operand
    return total


def kernel_answer(operands: Sequence[Floats], weight: Floats, bias: Floats, epsilon: float) -> Floats:
    """Return LayerNormalization of the operands' sum by the shared kernel, whose bits do not depend on the target."""
    total = added(operands)
    rows = np.ascontiguousarray(total.reshape(-1, total.shape[-1]))
    return _testing.layer_norm(rows, weight, bias, epsilon).reshape(total.shape)


def random_operands(rng: np.random.Generator, shapes: Sequence[tuple[int, ...]]) -> list[Floats]:
    return [rng.standard_normal(shape, dtype=np.float32) * 3 + 1 for shape in shapes]


def answer(operands: Sequence[Floats], weight: Floats, bias: Floats, epsilon: float = 1e-12, **how: Any) -> Floats:
    model = node_model([operand.ndim for operand in operands], weight, bias, epsilon)
    return session(model, **how).run(None, dict(zip(INPUTS, operands, strict=False)))[0]


def digest() -> str:
    """Return a digest of AddLayerNorm's results on the instruction set of this process."""
    rng, found = np.random.default_rng(9), hashlib.sha256()
    for n in (1, 17, 200, 384):
        operands = random_operands(rng, [(3, 7, n), (1, 7, n), (n,)])
        for count in (1, 2, 3):
            found.update(answer(operands[:count], *random_vectors(rng, n)).tobytes())
    return found.hexdigest()
