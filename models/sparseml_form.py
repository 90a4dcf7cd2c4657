"""Converts float encoders to the form in which SparseML exports them (for DeepSparse), for tests.

The opset is 14, so LayerNormalization is written as several operators. In the "static" form (trained with quantization)

    tables of words, positions and types   are uint8; DequantizeLinear follows Gather
    linear layers                          are QuantizeLinear -> MatMulInteger -> Add int32 -> Cast -> Mul; layers with
                                           one input share its QuantizeLinear
    attention's scores                     are QLinearMatMul -> DequantizeLinear
    attention's sums of values             are MatMulInteger of two QuantizeLinear -> Cast -> Mul
    residuals                              are the DequantizeLinear of a layer's QuantizeLinear

and weights are uint8 with zero point 128 and one scale. In the "dynamic" form, DynamicQuantizeLinear computes the range
of each linear layer's input, weights are int8, and all other operators compute in float32. Static ranges are measured
on the given feeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSET = 14
_IR_VERSION = 8
_ZERO = 128  # zero point of weights, which SparseML writes as uint8
Feeds = Mapping[str, np.ndarray]


def float_form(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model in opset 14, with LayerNormalization written as several operators.

    Args:
        model: An encoder of build_bert or build_mpnet, opset 17.
    """
    graph = _Graph(model)
    for node in model.graph.node:
        if node.op_type == "LayerNormalization":
            _norm_in_parts(graph, node)
        else:
            graph.nodes.append(node)
    return graph.model()


def quantized_form(
    model: onnx.ModelProto,
    feeds: Sequence[Feeds],
    activations: Literal["static", "dynamic"] = "static",
    products: bool = True,
) -> onnx.ModelProto:
    """Return a float model in the form that SparseML writes after training with quantization.

    Args:
        model: See `float_form`.
        feeds: Inputs on which the ranges of "static" activations are measured.
        activations: "static" or "dynamic" ranges.
        products: If activations are static, also quantize the MatMuls of attention (scores and sums of values).
    """
    source = float_form(model)
    graph = _Graph(source)
    ranges = {} if activations == "dynamic" else _ranges(source, feeds)
    writer = _QuantizedWriter(graph, ranges, products)
    for node in source.graph.node:
        writer.put(node)
    return graph.model()


class _Graph:
    """New nodes and initializers that replace a model's."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._source = model
        self.nodes: list[onnx.NodeProto] = []
        self.tensors = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer}
        self.constants = {
            node.output[0]: numpy_helper.to_array(node.attribute[0].t)
            for node in model.graph.node
            if node.op_type == "Constant"
        }
        self.users: dict[str, list[onnx.NodeProto]] = {}
        for node in model.graph.node:
            for name in node.input:
                self.users.setdefault(name, []).append(node)

    def tensor(self, name: str, value: np.ndarray) -> str:
        self.tensors[name] = value
        return name

    def put(self, kind: str, inputs: Sequence[str], output: str, **attributes: Any) -> str:
        self.nodes.append(helper.make_node(kind, inputs, [output], name=f"{output}_node", **attributes))
        return output

    def model(self) -> onnx.ModelProto:
        source = self._source.graph
        used = {name for node in self.nodes for name in node.input}
        tensors = [numpy_helper.from_array(value, name) for name, value in self.tensors.items() if name in used]
        graph = helper.make_graph(self.nodes, source.name, source.input, source.output, tensors)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=_IR_VERSION)


def _norm_in_parts(graph: _Graph, node: onnx.NodeProto) -> None:
    x, weight, bias = node.input
    name = node.output[0]
    epsilon = next(one.f for one in node.attribute if one.name == "epsilon")
    two = graph.tensor(f"{name}_two", np.array(2, np.float32))
    small = graph.tensor(f"{name}_epsilon", np.array(epsilon, np.float32))
    mean = graph.put("ReduceMean", [x], f"{name}_mean", axes=[-1])
    centred = graph.put("Sub", [x, mean], f"{name}_centred")
    squares = graph.put("Pow", [centred, two], f"{name}_squares")
    variance = graph.put("ReduceMean", [squares], f"{name}_variance", axes=[-1])
    deviation = graph.put("Sqrt", [graph.put("Add", [variance, small], f"{name}_added")], f"{name}_deviation")
    scaled = graph.put("Mul", [graph.put("Div", [centred, deviation], f"{name}_unit"), weight], f"{name}_scaled")
    graph.put("Add", [scaled, bias], name)


@dataclass(frozen=True)
class _Range:
    """Scale and zero point of a uint8 quantization."""

    scale: np.float32
    zero: np.uint8

    @staticmethod
    def of(minimum: float, maximum: float) -> _Range:
        minimum, maximum = min(minimum, 0.0), max(maximum, 0.0)
        scale = np.float32((maximum - minimum) / 255 or 1.0)
        return _Range(scale, np.uint8(np.clip(np.rint(-minimum / scale), 0, 255)))


def _ranges(model: onnx.ModelProto, feeds: Sequence[Feeds]) -> dict[str, _Range]:
    """Measure the uint8 ranges of all inputs and outputs of MatMul that are not constants."""
    import onnxruntime as ort

    constants = {one.name for one in model.graph.initializer}
    products = [node for node in model.graph.node if node.op_type == "MatMul"]
    values = {name for node in products for name in (*node.input, *node.output)} - constants
    names = [name for name in sorted(values)]
    recording = onnx.ModelProto()
    recording.CopyFrom(model)
    del recording.graph.output[:]
    recording.graph.output.extend(helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in names)
    session = ort.InferenceSession(recording.SerializeToString(), providers=["CPUExecutionProvider"])
    minimum, maximum = dict.fromkeys(names, np.inf), dict.fromkeys(names, -np.inf)
    for one in feeds:
        for name, found in zip(names, session.run(names, dict(one)), strict=True):
            minimum[name], maximum[name] = min(minimum[name], found.min()), max(maximum[name], found.max())
    return {name: _Range.of(float(minimum[name]), float(maximum[name])) for name in names}


class _QuantizedWriter:
    """Writes quantized nodes. ranges: ranges of static activations. products: also quantize attention's MatMuls."""

    def __init__(self, graph: _Graph, ranges: Mapping[str, _Range], products: bool) -> None:
        self._graph, self._ranges, self._products = graph, ranges, products and bool(ranges)
        self._quantized: dict[str, tuple[str, str, str]] = {}  # maps a value to its (codes, scale, zero point)
        self._skipped: set[str] = set()  # outputs of nodes that were merged into others

    def put(self, node: onnx.NodeProto) -> None:
        if node.output[0] in self._skipped:
            return
        kind = node.op_type
        if kind == "Gather" and node.input[0] in self._graph.tensors:
            self._table(node)
        elif kind == "MatMul" and node.input[1] in self._graph.tensors:
            self._linear(node)
        elif kind == "MatMul" and self._products:
            self._product(node)
        elif kind == "Add" and self._ranges:
            self._graph.nodes.append(self._with_rounded_residual(node))
        else:
            self._graph.nodes.append(node)

    def _number(self, name: str, value: np.generic) -> str:
        return self._graph.tensor(name, np.asarray(value))

    def _quantize(self, value: str) -> tuple[str, str, str]:
        """Return codes, scale and zero point of a value. The nodes are created once per value."""
        if value not in self._quantized:
            names = (f"{value}_quantized", f"{value}_scale", f"{value}_zero_point")
            if self._ranges:
                one = self._ranges[value]
                scale, zero = self._number(names[1], one.scale), self._number(names[2], one.zero)
                self._graph.put("QuantizeLinear", [value, scale, zero], names[0])
            else:
                node = helper.make_node("DynamicQuantizeLinear", [value], names, name=f"{names[0]}_node")
                self._graph.nodes.append(node)
            self._quantized[value] = names
        return self._quantized[value]

    def _weight(self, name: str) -> tuple[np.ndarray, np.float32]:
        """Return int8 weights and their scale."""
        weight = self._graph.tensors[name]
        scale = np.float32(np.abs(weight).max() / 127 or 1.0)
        return np.clip(np.rint(weight / scale), -127, 127).astype(np.int8), scale

    def _table(self, node: onnx.NodeProto) -> None:
        table, name = node.input[0], node.output[0]
        if self._graph.tensors[table].dtype != np.float32:  # the table of position ids holds integers
            self._graph.nodes.append(node)
            return
        integers, scale = self._weight(table)
        stored = self._graph.tensor(f"{table}_quant", (integers.astype(np.int16) + _ZERO).astype(np.uint8))
        rows = self._graph.put("Gather", [stored, node.input[1]], f"{name}_quant", axis=0)
        scale_name = self._number(f"{table}_scale", scale)
        zero = self._number(f"{table}_zero_point", np.uint8(_ZERO))
        self._graph.put("DequantizeLinear", [rows, scale_name, zero], name)

    def _linear(self, node: onnx.NodeProto) -> None:
        x, weight = node.input
        name = node.output[0]
        integers, scale = self._weight(weight)
        codes, x_scale, x_zero = self._quantize(x)
        if not self._ranges:
            stored = self._graph.tensor(f"{weight}_quantized", integers)
            scale_name = self._number(f"{weight}_scale", scale)
            sums = self._graph.put("MatMulInteger", [codes, stored, x_zero], f"{name}_quant")
            floats = self._graph.put("Cast", [sums], f"{name}_cast", to=TensorProto.FLOAT)
            scaled = self._graph.put("Mul", [floats, scale_name], f"{name}_weight_scale")
            self._graph.put("Mul", [scaled, x_scale], name)
            return
        stored = self._graph.tensor(f"{weight}_quantized", (integers.astype(np.int16) + _ZERO).astype(np.uint8))
        zero = self._number(f"{weight}_zero_point", np.uint8(_ZERO))
        sums = self._graph.put("MatMulInteger", [codes, stored, x_zero, zero], f"{name}_quant")
        step = np.float32(self._ranges[x].scale * scale)
        (add,) = self._graph.users[name]
        bias = next(one for one in add.input if one != name)
        whole = self._graph.tensor(f"{bias}_quantized", np.rint(self._graph.tensors[bias] / step).astype(np.int32))
        sums = self._graph.put("Add", [sums, whole], f"{name}_bias_add_quant")
        floats = self._graph.put("Cast", [sums], f"{sums}_cast", to=TensorProto.FLOAT)
        self._graph.put("Mul", [floats, self._number(f"{whole}.scale", step)], add.output[0])
        self._skipped.add(add.output[0])

    def _product(self, node: onnx.NodeProto) -> None:
        """Quantize attention's MatMul: scores (followed by Div) use QLinearMatMul, sums of values MatMulInteger."""
        name = node.output[0]
        first, second = map(self._quantize, node.input)
        if self._graph.users[name][0].op_type == "Div":
            one = self._ranges[name]
            scale, zero = self._number(f"{name}_scale", one.scale), self._number(f"{name}_zero_point", one.zero)
            rounded = self._graph.put("QLinearMatMul", [*first, *second, scale, zero], f"{name}_quant")
            self._graph.put("DequantizeLinear", [rounded, scale, zero], name)
            return
        sums = self._graph.put("MatMulInteger", [first[0], second[0], first[2], second[2]], f"{name}_quant")
        floats = self._graph.put("Cast", [sums], f"{name}_cast", to=TensorProto.FLOAT)
        step = np.float32(self._ranges[node.input[0]].scale * self._ranges[node.input[1]].scale)
        self._graph.put("Mul", [floats, self._number(f"{name}_rescale.scale", step)], name)

    def _with_rounded_residual(self, node: onnx.NodeProto) -> onnx.NodeProto:
        rounded = onnx.NodeProto()
        rounded.CopyFrom(node)
        for index, value in enumerate(node.input):
            if value in self._quantized:
                rounded.input[index] = self._graph.put(
                    "DequantizeLinear", self._quantized[value], f"{value}_identity_dequantized"
                )
        return rounded
