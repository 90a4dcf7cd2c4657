"""Layers with stored int8 weights in all forms that quantization tools write, and their dequantized weights."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import OptimizationReport

from ..recipes.forms import NAMED, named
from .small_models import make_model, run

DYNAMIC = ["chain", "chain_of_two", "dynamic", "dynamic_to_float"]
FIXED = ["to_float", "sparse_ml", "qdq", "qdq_transpose", "qdq_gemm", "qdq_gemm_trans_b", "qdq_reshape"]
ROUNDED = ["qlinear", "qgemm", "qgemm_trans_b"]  # outputs are 8-bit

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
MICROSOFT = "com.microsoft"


def sparse_integers(k: int, n: int, fraction: float = 0.75, seed: int = 0) -> np.ndarray:
    """Return int8 [k, n] in -127 … 127; `fraction` of the blocks of four outputs are zero."""
    rng = np.random.default_rng(seed)
    kept = np.repeat(rng.random((k, -(-n // 4))) >= fraction, 4, axis=1)[:, :n]
    return np.where(kept, rng.integers(-127, 128, (k, n)), 0).astype(np.int8)


@dataclass
class Int8Layer:
    """A linear layer y = x W + b. All scales are powers of two, so float32 sums are exact."""

    form: str
    k: int = 32
    n: int = 24
    unsigned: bool = False  # store the weight and its zero points as uint8
    zero_point: int = 0  # zero point of the weight
    per_column: bool = True
    x_unsigned: bool = True  # fixed ranges are uint8 if true, int8 if false
    bias: bool = False
    q: np.ndarray | None = None  # weight integers minus zero points
    changes: dict[str, np.ndarray] = field(default_factory=dict)  # tensors to replace, for models that must be refused
    seed: int = 0

    def __post_init__(self) -> None:
        rng = np.random.default_rng(self.seed)
        if self.q is None:
            self.q = sparse_integers(self.k, self.n, seed=self.seed)
        self.k, self.n = self.q.shape
        powers = rng.integers(-9, -5, self.n) if self.per_column else np.full(self.n, -7)
        self.scales = np.exp2(powers).astype(np.float32)
        self.b = np.exp2(-10).astype(np.float32) * rng.integers(-999, 999, self.n).astype(np.float32)
        self.x_scale, self.y_scale = np.float32(2**-5), np.float32(2**-3)
        self.x_zero, self.y_zero = (111, 128) if self.x_unsigned else (-17, 0)

    @property
    def matrix(self) -> np.ndarray:
        return self.q * self.scales

    @property
    def fixed(self) -> bool:
        return self.form not in DYNAMIC

    @property
    def turned(self) -> bool:
        return self.form in ("qdq_transpose", "qdq_gemm_trans_b", "qgemm_trans_b")

    def inputs(self, rows: int = 5) -> np.ndarray:
        return np.random.default_rng(self.seed + 1).standard_normal((rows, self.k)).astype(np.float32)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """Return x quantized to its fixed range and dequantized."""
        low = 0 if self.x_unsigned else -128
        codes = np.clip(np.rint(x / self.x_scale) + self.x_zero, low, low + 255)
        return (codes - self.x_zero).astype(np.float32) * self.x_scale

    def expected(self, x: np.ndarray) -> np.ndarray:
        """Return the expected y: exact for fixed ranges, also quantized and dequantized for the forms in ROUNDED."""
        y = self.rounded(x) @ self.matrix + (self.b if self.bias else 0)
        if self.form not in ROUNDED:
            return y
        low = 0 if self.x_unsigned else -128
        return (np.clip(np.rint(y / self.y_scale) + self.y_zero, low, low + 255) - self.y_zero) * self.y_scale

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        kind = np.uint8 if self.unsigned else np.int8
        x_kind = np.uint8 if self.x_unsigned else np.int8
        codes = (self.q.astype(np.int16) + self.zero_point).astype(kind)
        scales = self.scales if self.per_column else self.scales[0]
        zeros = np.full(scales.shape, self.zero_point, kind)
        tensors = {
            "W": np.ascontiguousarray(codes.T if self.turned else codes),
            "scales": np.asarray(scales),
            "zeros": np.asarray(zeros),
            "x_scale": np.asarray(self.x_scale),
            "x_zero": np.array(self.x_zero, x_kind),
            "y_scale": np.asarray(self.y_scale),
            "y_zero": np.array(self.y_zero, x_kind),
            "both": np.asarray(scales * self.x_scale),
            "b": self.b,
            "b_int32": np.rint(self.b / (self.scales * self.x_scale)).astype(np.int32),
            "shape": np.array([-1, self.k]),
        }
        if self.form in ("sparse_ml", *ROUNDED):  # these forms store integer biases
            self.b = tensors["b_int32"] * self.scales * self.x_scale
        return tensors | self.changes

    def nodes(self, y: str = "y") -> list[onnx.NodeProto]:
        """Return the nodes from float x to float y."""
        node, form = helper.make_node, self.form
        weight = ["W", "scales", "zeros"]
        quantize = node("QuantizeLinear", ["x", "x_scale", "x_zero"], ["xq"], name="quantize")
        dynamic = node("DynamicQuantizeLinear", ["x"], ["xq", "xs", "xz"], name="dynamic_quantize")
        dequantize = node("DequantizeLinear", ["xq", "x_scale", "x_zero"], ["xd"], name="dequantize")
        result = "p" if self.bias and form not in ("sparse_ml", "qdq_gemm", "qdq_gemm_trans_b", *ROUNDED) else y
        add = [node("Add", [result, "b"], [y], name="add")] if result != y else []
        if form in ("chain", "chain_of_two"):
            nodes = [
                dynamic,
                node("MatMulInteger", ["xq", "W", "xz", "zeros"], ["sums"], name="linear"),
                node("Cast", ["sums"], ["floats"], name="cast", to=FLOAT),
            ]
            if form == "chain":
                nodes += [
                    node("Mul", ["xs", "scales"], ["step"], name="scales_mul"),
                    node("Mul", ["floats", "step"], [result], name="output_mul"),
                ]
            else:
                nodes += [
                    node("Mul", ["scales", "floats"], ["half"], name="mul_1"),
                    node("Mul", ["half", "xs"], [result], name="mul_2"),
                ]
            return nodes + add
        if form == "dynamic":
            return [node("DynamicQuantizeMatMul", ["x", *weight], [result], name="linear", domain=MICROSOFT), *add]
        if form == "dynamic_to_float":
            names = ["xq", "W", "xs", "scales", "xz", "zeros"]
            return [dynamic, node("MatMulIntegerToFloat", names, [result], name="linear", domain=MICROSOFT), *add]
        if form == "to_float":
            names = ["xq", "W", "x_scale", "scales", "x_zero", "zeros"]
            return [quantize, node("MatMulIntegerToFloat", names, [result], name="linear", domain=MICROSOFT), *add]
        if form == "sparse_ml":
            nodes = [quantize, node("MatMulInteger", ["xq", "W", "x_zero", "zeros"], ["sums"], name="linear")]
            if self.bias:
                nodes.append(node("Add", ["sums", "b_int32"], ["biased"], name="add_int32"))
            nodes.append(node("Cast", ["biased" if self.bias else "sums"], ["floats"], name="cast", to=FLOAT))
            return [*nodes, node("Mul", ["floats", "both"], [y], name="rescale")]
        if form in ROUNDED:
            range_ = ["xq", "x_scale", "x_zero"]
            if form == "qlinear":
                linear = node("QLinearMatMul", [*range_, *weight, "y_scale", "y_zero"], ["yq"], name="linear")
            else:
                names = [*range_, *weight, "b_int32" if self.bias else "", "y_scale", "y_zero"]
                linear = node("QGemm", names, ["yq"], name="linear", domain=MICROSOFT, transB=int(self.turned))
            return [quantize, linear, node("DequantizeLinear", ["yq", "y_scale", "y_zero"], [y], name="floats")]
        axis = {"axis": int(not self.turned)} if self.per_column else {}
        nodes = [quantize, dequantize, node("DequantizeLinear", weight, ["Wd"], name="weight", **axis)]
        if form == "qdq_transpose":
            nodes.append(node("Transpose", ["Wd"], ["Wt"], name="transpose"))
        if form == "qdq_reshape":
            nodes.append(node("Reshape", ["xd", "shape"], ["xr"], name="reshape"))
        if form.startswith("qdq_gemm"):
            names = ["xd", "Wd", *(["b"] if self.bias else [])]
            return [*nodes, node("Gemm", names, [y], name="linear", transB=int(self.turned))]
        names = ["xr" if form == "qdq_reshape" else "xd", "Wt" if form == "qdq_transpose" else "Wd"]
        return [*nodes, node("MatMul", names, [result], name="linear"), *add]

    def model(self, *more: onnx.NodeProto, **arguments: Any) -> onnx.ModelProto:
        """Return a model x -> y. The nodes in `more` compute y from the layer's output r."""
        nodes = [*self.nodes("r" if more else "y"), *more]
        used = {name for node in nodes for name in node.input}
        return make_model(
            nodes,
            {"x": (FLOAT, ["batch", self.k])},
            {"y": (FLOAT, ["batch", self.n])},
            {name: array for name, array in self.tensors.items() if name in used},
            **{"domains": {MICROSOFT: 1}} | arguments,
        )


def packed_integers(model: onnx.ModelProto, name: str = "linear") -> tuple[np.ndarray, np.ndarray]:
    """Return the weight of the VNNISpMM node of this name as int8 [k, n] and scales float32 [n]."""
    from ortolan import _native

    (node,) = [node for node in model.graph.node if node.op_type == "VNNISpMM" and node.name == name]
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    values, indices, starts, scales = (tensors[name] for name in node.input[1:5])
    return _native.unpack_block_sparse(values, indices, starts, sizes["k"], sizes["n"]), scales


def optimize(model, output=None, *, recipe=NAMED["sparse-int8-4x1"], options=None, **arguments) -> OptimizationReport:
    options = {"verify.seconds": 0.0, "may_grow": True} | (options or {})
    return ortolan.optimize_onnx(model, output, recipe=named(recipe), options=options, **arguments)


def adopt(model, output=None, **arguments) -> OptimizationReport:
    return optimize(model, output, recipe=NAMED["adopt"], **arguments)


def outputs(model: onnx.ModelProto, x: np.ndarray) -> list[np.ndarray]:
    """Return the model's outputs with the operator library and without it."""
    return [run(model, {"x": x}, library)[0] for library in (True, False)]
