"""Dynamically quantized int8 linear layers with the nodes after them, and sessions that claim them on every CPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

import ortolan

from ..passes.int8_layers import Int8Layer
from .sessions import provider_session

FLOAT = TensorProto.FLOAT
node = helper.make_node


def all_claims(model: onnx.ModelProto, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a session that claims all layers, even if ONNX Runtime is faster on this CPU."""
    return provider_session(model, threads)


def dense_integers(k: int, n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(-127, 128, (k, n)).astype(np.int8)


def in_blocks(model: onnx.ModelProto) -> dict[str, bool]:
    """Map each claimed int8 linear layer to True if it runs on the block-sparse kernel."""
    taken = [one for one in ortolan.inspect_provider(model, claims="all").nodes if "int8" in one.what]
    return {one.node: "int8 in blocks of 4 x 1" in one.what for one in taken}


def with_zero_blocks(model: onnx.ModelProto, share: float = 0.75, only: Sequence[int] | None = None) -> onnx.ModelProto:
    """Set a fraction `share` of the 4x1 blocks (4 outputs x 1 input) of each int8 weight to its zero point.

    only: indices of the MatMulInteger nodes to change; None: all.
    """
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    layers = [one for one in model.graph.node if one.op_type == "MatMulInteger"]
    for index in range(len(layers)) if only is None else only:
        _, weight, _, zero = layers[index].input
        codes, zeros = numpy_helper.to_array(tensors[weight]), numpy_helper.to_array(tensors[zero])
        k, n = codes.shape
        kept = np.repeat(np.random.default_rng(index).random((k, -(-n // 4))) >= share, 4, axis=1)[:, :n]
        least = -128 if codes.dtype == np.int8 else 0
        near = codes.clip(np.maximum(zeros.astype(np.int16) - 128, least), zeros.astype(np.int16) + 127)
        tensors[weight].CopyFrom(numpy_helper.from_array(np.where(kept, near, zeros).astype(codes.dtype), weight))
    return model


ACTIVATIONS: dict[str, list[onnx.NodeProto]] = {
    "relu": [node("Relu", ["r"], ["a"])],
    "gelu": [
        node("Div", ["r", "root2"], ["g1"]),
        node("Erf", ["g1"], ["g2"]),
        node("Add", ["g2", "one"], ["g3"]),
        node("Mul", ["r", "g3"], ["g4"]),
        node("Mul", ["g4", "half"], ["a"]),
    ],
    "gelu, half first": [
        node("Mul", ["r", "half"], ["g0"]),
        node("Div", ["r", "root2"], ["g1"]),
        node("Erf", ["g1"], ["g2"]),
        node("Add", ["one", "g2"], ["g3"]),
        node("Mul", ["g0", "g3"], ["a"]),
    ],
    "gelu by tanh": [
        node("Pow", ["r", "three"], ["g1"]),
        node("Mul", ["g1", "cube"], ["g2"]),
        node("Add", ["r", "g2"], ["g3"]),
        node("Mul", ["g3", "slope"], ["g4"]),
        node("Tanh", ["g4"], ["g5"]),
        node("Add", ["g5", "one"], ["g6"]),
        node("Mul", ["half", "r"], ["g7"]),
        node("Mul", ["g7", "g6"], ["a"]),
    ],
    "silu": [node("Sigmoid", ["r"], ["g1"]), node("Mul", ["r", "g1"], ["a"])],
    "Gelu": [node("Gelu", ["r"], ["a"], domain="com.microsoft")],
    "FastGelu": [node("FastGelu", ["r"], ["a"], domain="com.microsoft")],
    "QuickGelu of 1": [node("QuickGelu", ["r"], ["a"], domain="com.microsoft", alpha=1.0)],
}
NUMBERS = {
    "root2": np.sqrt(np.float32(2)), "one": np.float32(1), "half": np.float32(0.5), "three": np.float32(3),
    "cube": np.float32(0.044715), "slope": np.float32(np.sqrt(2 / np.pi)),
}  # fmt: skip


def with_nodes(
    layer: Int8Layer, more: list[onnx.NodeProto], inputs: tuple[str, ...] = (), **constants: np.ndarray
) -> onnx.ModelProto:
    """Return a model in which the linear layer computes r from x, and the nodes `more` compute y from r."""
    nodes = [*layer.nodes("r"), *more]
    used = {name for one in nodes for name in one.input}
    tensors = layer.tensors | {name: np.asarray(number) for name, number in NUMBERS.items()} | constants
    value = helper.make_tensor_value_info
    graph = helper.make_graph(
        nodes,
        "a layer and more",
        [value("x", FLOAT, ["batch", layer.k]), *(value(name, FLOAT, None) for name in inputs)],
        [value("y", FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items() if name in used],
    )
    # With later opsets, ONNX Runtime fuses the nodes of GELU into one operator before the provider sees the graph.
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)
