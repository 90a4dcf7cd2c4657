"""Models of one MatMulNBits node with 4 or 8 bits, and the expected result of the provider in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from ..ops.groups import GroupLayer
from ..passes.stored_layers import pack_nibbles

NAMES = ("B", "scales", "zero_points", "g_idx", "bias")


@dataclass
class NBits:
    """A MatMulNBits node with y = x W + bias. The padding of W after input k is random, because it must not matter.

    Args:
        zero_points: "" (none), "packed" (bytes), "whole" (integers as floats) or "fractions" (floats).
        changed: maps attributes and tensors to replacements; None removes one.
    """

    k: int
    n: int
    block: int
    bits: int = 4
    zero_points: str = ""
    bias: bool = False
    flat: bool = False
    accuracy_level: int | None = None
    changed: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.k, self.n, self.block, self.bits])
        self.q = rng.integers(0, 1 << self.bits, (self.n, self.blocks * self.block)).astype(np.uint8)
        scales = rng.standard_normal((self.n, self.blocks)) * self.k**-0.5 / 4
        self.scales = scales.astype(np.float32)
        middle = 1 << (self.bits - 1)
        zeros = np.full((self.n, self.blocks), middle, np.float32)
        if self.zero_points == "fractions":
            zeros = rng.uniform(-3, 18, zeros.shape).astype(np.float32)
        elif self.zero_points and self.bits == 4:
            zeros = rng.integers(0, 16, zeros.shape).astype(np.float32)
        elif self.zero_points:
            # Weights minus zero points fit an int8 only if the zero points are near the middle of the range.
            zeros = rng.integers(100, 156, zeros.shape).astype(np.float32)
            centred = np.clip(self.q.reshape(self.n, self.blocks, -1) - zeros[:, :, None], -100, 99)
            self.q = (centred + zeros[:, :, None]).astype(np.uint8).reshape(self.n, -1)
        self.zeros = zeros
        self.b = rng.standard_normal(self.n).astype(np.float32)

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        shape = (-1,) if self.flat else (self.n, -1)
        packed = pack_nibbles(self.q) if self.bits == 4 else self.q
        found = {"B": packed.reshape(self.n, self.blocks, -1), "scales": self.scales.reshape(shape)}
        if self.zero_points == "packed":
            zeros = self.zeros.astype(np.uint8)
            found["zero_points"] = (pack_nibbles(zeros) if self.bits == 4 else zeros).reshape(shape)
        elif self.zero_points:
            found["zero_points"] = self.zeros.reshape(shape)
        if self.bias:
            found["bias"] = self.b
        found |= {name: one for name, one in self.changed.items() if name in NAMES}
        return {name: one for name, one in found.items() if one is not None}

    def node(self, x: str = "x", y: str = "y", name: str = "linear", prefix: str = "") -> onnx.NodeProto:
        tensors = self.tensors
        inputs = [x, *(prefix + name if name in tensors else "" for name in NAMES)]
        while not inputs[-1]:
            inputs.pop()
        attributes = {"K": self.k, "N": self.n, "bits": self.bits, "block_size": self.block}
        attributes |= {"accuracy_level": self.accuracy_level} | self.changed
        attributes = {name: one for name, one in attributes.items() if name not in NAMES and one is not None}
        return helper.make_node("MatMulNBits", inputs, [y], name=name, domain="com.microsoft", **attributes)

    def initializers(self, prefix: str = "") -> list[onnx.TensorProto]:
        return [numpy_helper.from_array(array, prefix + name) for name, array in self.tensors.items()]

    def model(self, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
        """Return a model with input x [batch, k] and output y."""
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [self.node()],
            "one layer",
            [value("x", dtype, ["batch", self.k])],
            [value("y", dtype, None)],
            self.initializers(),
        )
        return whole(graph)

    def oracle(self, group: int) -> GroupLayer:
        """Return the expected layer, whose x is quantized in groups of `group` inputs."""
        groups = -(-self.k // group)
        rows = np.minimum(np.arange(groups) * group // self.block, self.blocks - 1)
        scales, zeros = (np.ascontiguousarray(array.T[rows]) for array in (self.scales, self.zeros))
        q = np.ascontiguousarray(self.q[:, : self.k].T)
        if self.bits == 8:
            by_input = self.zeros.T[np.arange(self.k) // self.block]
            return GroupLayer((q - by_input).astype(np.int8), scales, None, group)
        if self.zero_points == "fractions":
            return GroupLayer(q, scales, None, group, -scales * zeros)
        return GroupLayer(q, scales, zeros.astype(np.uint8) if self.zero_points else None, group)

    def x(self, rows: int) -> np.ndarray:
        return np.random.default_rng(rows).standard_normal((rows, self.k), dtype=np.float32)


def whole(graph: onnx.GraphProto) -> onnx.ModelProto:
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, ir_version=10, opset_imports=opsets)
