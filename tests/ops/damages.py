"""Random damage to packed tensors and attributes of one-node models."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

TYPES = [TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.INT64, TensorProto.BFLOAT16]

ITEM_BYTES = {
    TensorProto.FLOAT: 4,
    TensorProto.UINT8: 1,
    TensorProto.INT8: 1,
    TensorProto.INT64: 8,
    TensorProto.BFLOAT16: 2,
    TensorProto.UINT16: 2,
    TensorProto.FLOAT16: 2,
}


def set_length(tensor: onnx.TensorProto, length: int) -> None:
    """Change the tensor to a vector of this length: cut it, or append zeros."""
    size = length * ITEM_BYTES[tensor.data_type]
    tensor.raw_data = (tensor.raw_data + bytes(max(0, size - len(tensor.raw_data))))[:size]
    tensor.dims[:] = [length]


def damage_bytes(rng: np.random.Generator, tensor: onnx.TensorProto) -> None:
    content = bytearray(tensor.raw_data)
    for _ in range(rng.integers(1, 5) if content else 0):
        content[rng.integers(len(content))] = rng.integers(256)
    tensor.raw_data = bytes(content)


def damage_length(rng: np.random.Generator, tensor: onnx.TensorProto) -> None:
    count = len(tensor.raw_data) // ITEM_BYTES[tensor.data_type]
    set_length(tensor, int(max(0, rng.choice([0, 1, count - 1, count + 1, rng.integers(2 * count + 1)]))))


def damage_shape(rng: np.random.Generator, tensor: onnx.TensorProto) -> None:
    """Change the tensor's shape but not its elements."""
    count = len(tensor.raw_data) // ITEM_BYTES[tensor.data_type]
    tensor.dims[:] = [[count], [1, count], [count, 1], [1, 1, count, 1]][rng.integers(4)]


def damage_type(rng: np.random.Generator, tensor: onnx.TensorProto) -> None:
    tensor.data_type = TYPES[rng.integers(len(TYPES))]
    set_length(tensor, len(tensor.raw_data) // ITEM_BYTES[tensor.data_type])


def damage_integers(rng: np.random.Generator, tensor: onnx.TensorProto) -> None:
    if tensor.data_type == TensorProto.INT64 and tensor.raw_data:
        numbers = numpy_helper.to_array(tensor).copy()
        extreme = [-(2**63), 2**63 - 1, -1, 0, 1 << 40]
        place = rng.integers(numbers.size)
        change = int(rng.integers(-40, 41))
        numbers.reshape(-1)[place] = (
            extreme[rng.integers(5)] if rng.random() < 0.3 else numbers.reshape(-1)[place] + change
        )
        tensor.raw_data = numbers.tobytes()


def damage_attribute(rng: np.random.Generator, node: onnx.NodeProto) -> None:
    attribute = node.attribute[rng.integers(len(node.attribute))]
    near = [attribute.i + change for change in range(-3, 4) if abs(attribute.i + change) < 2**62]
    extreme = [-(2**63), 2**63 - 1, -1, 0, 1, 8, 16, 32, 2**31, 1 << 17, (1 << 17) + 1]
    chosen = near if near and rng.random() < 0.5 else extreme
    attribute.i = chosen[rng.integers(len(chosen))]


def damage_inputs(rng: np.random.Generator, node: onnx.NodeProto) -> None:
    a, b = rng.integers(1, len(node.input), 2)
    match rng.integers(3):
        case 0:
            node.input[a], node.input[b] = node.input[b], node.input[a]
        case 1:
            node.input[a] = node.input[b]
        case _:
            del node.input[max(4, a) :]


TENSOR_DAMAGES = [damage_bytes, damage_length, damage_shape, damage_type, damage_integers]


def damage(rng: np.random.Generator, model: onnx.ModelProto) -> None:
    """Damage one to three parts of the model's only node or its tensors."""
    node, tensors = model.graph.node[0], model.graph.initializer
    for _ in range(rng.integers(1, 4)):
        place = rng.integers(8)
        if place == 0:
            damage_attribute(rng, node)
        elif place == 1:
            damage_inputs(rng, node)
        else:
            TENSOR_DAMAGES[rng.integers(len(TENSOR_DAMAGES))](rng, tensors[rng.integers(len(tensors))])
