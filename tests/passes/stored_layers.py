"""Layers with stored 4-bit weights, as MatMulNBits or after DequantizeLinear, and their dequantized weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .small_models import make_model

TYPES = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16, ml_dtypes.bfloat16: TensorProto.BFLOAT16}


def pack_nibbles(rows: np.ndarray) -> np.ndarray:
    """Pack rows of values 0 … 15 two per byte, the first of them in the low bits."""
    padded = np.zeros((len(rows), -(-rows.shape[1] // 2) * 2), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return padded[:, ::2] | padded[:, 1::2] << 4


@dataclass
class NBitsLayer:
    """A MatMulNBits y = x W. Padding after input k is random, to prove that nothing reads it."""

    k: int
    n: int
    block: int
    zero_points: str = ""  # "": none; "packed": 4-bit integers; "float": in the type of the scales
    dtype: Any = np.float32
    flat: bool = False  # scales and zero points are 1-D tensors
    bias: bool = False
    seed: int = 0
    accuracy_level: int | None = None
    extra: dict[str, np.ndarray] = field(default_factory=dict)  # tensors to replace, or g_idx

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        self.q = rng.integers(0, 16, (self.n, self.blocks * self.block)).astype(np.uint8)
        self.zeros = rng.integers(0, 16, (self.n, self.blocks)).astype(np.uint8)
        # Scales are positive or negative, as ONNX Runtime's symmetric quantizer makes them.
        scales = rng.standard_normal((self.n, self.blocks)) * self.k**-0.5 / 4
        self.scales = scales.astype(self.dtype)
        self.b = rng.standard_normal(self.n).astype(self.dtype)

    @property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @property
    def matrix(self) -> np.ndarray:
        """Return the dequantized W, float32 [k, n]."""
        weights = np.empty((self.k, self.n), np.float32)
        for column in range(self.n):
            for row in range(self.k):
                block = row // self.block
                zero = self.zeros[column, block] if self.zero_points else 8
                weights[row, column] = np.float32(self.scales[column, block]) * np.float32(
                    int(self.q[column, row]) - int(zero)
                )
        return weights

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        shape = (-1,) if self.flat else (self.n, -1)
        tensors = {
            "B": pack_nibbles(self.q).reshape(self.n, self.blocks, self.block // 2),
            "scales": self.scales.reshape(shape),
        }
        if self.zero_points:
            packed = self.zero_points == "packed"
            zeros = pack_nibbles(self.zeros) if packed else self.zeros.astype(self.dtype)
            tensors["zero_points"] = zeros.reshape(shape)
        if self.bias:
            tensors["bias"] = self.b
        return tensors | self.extra

    def node(self, x: str = "x", y: str = "y", name: str = "linear", prefix: str = "") -> onnx.NodeProto:
        tensors = self.tensors
        names = ["B", "scales", "zero_points", "g_idx", "bias"]
        inputs = [x, *(f"{prefix}{name}" if name in tensors else "" for name in names)]
        while not inputs[-1]:
            inputs.pop()
        attributes = {"K": self.k, "N": self.n, "bits": 4, "block_size": self.block}
        if self.accuracy_level is not None:
            attributes["accuracy_level"] = self.accuracy_level
        return helper.make_node("MatMulNBits", inputs, [y], name=name, domain="com.microsoft", **attributes)

    def model(self, *more: onnx.NodeProto, **arguments: Any) -> onnx.ModelProto:
        """Return a model x -> y. The nodes in `more` compute y from the layer's output p."""
        kind = TYPES[self.dtype]
        return make_model(
            [self.node(y="p" if more else "y"), *more],
            {"x": (kind, ["batch", self.k])},
            {"y": (kind, ["batch", self.n])},
            self.tensors,
            **{"opset": 21, "ir_version": 10, "domains": {"com.microsoft": 1}} | arguments,
        )

    def inputs(self, rows: int = 5) -> np.ndarray:
        return np.random.default_rng(self.seed + 1).standard_normal((rows, self.k)).astype(self.dtype)


@dataclass
class DequantizedLayer:
    """A MatMul or Gemm y = x W whose W comes from a DequantizeLinear of int4 or uint4."""

    k: int
    n: int
    block: int | None  # inputs per scale; None: one scale per column; 0: one scale for the weight
    signed: bool = True
    zero_points: bool = False
    form: str = "matmul"  # "matmul" and "gemm": W is stored as [k, n]; "transpose" and "gemm_trans_b": as [n, k]
    dtype: Any = np.float32
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        low = -8 if self.signed else 0
        groups = -(-self.k // self.block) if self.block else 1
        columns = 1 if self.block == 0 else self.n
        self.q = rng.integers(low, low + 16, (self.k, self.n))
        self.zeros = rng.integers(low, low + 16, (groups, columns))
        self.scales = (rng.standard_normal((groups, columns)) * self.k**-0.5 / 4).astype(self.dtype)

    @property
    def turned(self) -> bool:
        return self.form in ("transpose", "gemm_trans_b")

    @property
    def matrix(self) -> np.ndarray:
        weights = np.empty((self.k, self.n), np.float32)
        for column in range(self.n):
            for row in range(self.k):
                at = row // self.block if self.block else 0, column if self.block != 0 else 0
                zero = int(self.zeros[at]) if self.zero_points else 0
                weights[row, column] = np.float32(self.scales[at]) * np.float32(int(self.q[row, column]) - zero)
        return weights

    def model(self) -> onnx.ModelProto:
        int4 = ml_dtypes.int4 if self.signed else ml_dtypes.uint4

        def laid(array: np.ndarray) -> np.ndarray:
            """Return a scale or zero-point tensor in the shape that the node expects."""
            if not self.block:
                return array.reshape(() if self.block == 0 else -1)
            return np.ascontiguousarray(array.T if self.turned else array)

        q = np.ascontiguousarray(self.q.T if self.turned else self.q)
        tensors = {"q": q.astype(int4), "scales": laid(self.scales)}
        if self.zero_points:
            tensors["zeros"] = laid(self.zeros.astype(int4))
        attributes = {"axis": int(self.turned) if self.block else int(not self.turned)}
        if self.block:
            attributes["block_size"] = self.block
        nodes = [helper.make_node("DequantizeLinear", list(tensors), ["W"], name="dequantize", **attributes)]
        if self.form == "transpose":
            nodes += [helper.make_node("Transpose", ["W"], ["T"]), helper.make_node("Identity", ["T"], ["I"])]
        if self.form in ("matmul", "transpose"):
            nodes.append(helper.make_node("MatMul", ["x", "I" if self.turned else "W"], ["y"], name="linear"))
        else:
            nodes.append(helper.make_node("Gemm", ["x", "W"], ["y"], name="linear", transB=int(self.turned)))
        kind = TYPES[self.dtype]
        return make_model(
            nodes,
            {"x": (kind, ["batch", self.k])},
            {"y": (kind, ["batch", self.n])},
            tensors,
            opset=21,
            ir_version=10,
        )


def unpacked_matrix(model: onnx.ModelProto) -> np.ndarray:
    """Return the dequantized weight of the model's only W4A8MatMul: float32 [k, n]."""
    from ortolan import _native

    (node,) = [node for node in model.graph.node if node.op_type == "W4A8MatMul"]
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    k, n, group = (sizes[name] for name in ("k", "n", "group_size"))
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    found = {name: tensors.get(node.input[index]) for index, name in enumerate(ROLES) if index < len(node.input)}

    def by_input(rows: np.ndarray) -> np.ndarray:
        """Expand [panels, groups, 16] to one value per weight, [k, n]."""
        matrix = rows.transpose(1, 0, 2).reshape(rows.shape[1], -1)[:, :n]
        return np.repeat(matrix, group, axis=0)[:k]

    q = _native.unpack_int4_group(found["weights"], k, n).astype(np.float32)
    zeros = found.get("zero_points")
    q -= 8 if zeros is None else by_input(zeros).astype(np.float32)
    return by_input(found["scales"]).astype(np.float32) * q


ROLES = ("X", "weights", "scales", "bias", "residual", "zero_points")
