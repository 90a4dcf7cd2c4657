"""Rewrites int8 layers of several tools into the two forms that the passes support (stored_int8.py).

    DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by scales       (quantize_dynamic)
        becomes MatMulIntegerToFloat after the same DynamicQuantizeLinear
    QLinearMatMul, QGemm                                                  (quantize_static, QOperator)
    MatMulIntegerToFloat with a fixed input range
    QuantizeLinear -> MatMulInteger (-> Add int32) -> Cast -> Mul         (SparseML)
        become DequantizeLinear of input and weight -> MatMul or Gemm (-> QuantizeLinear)              (QDQ)

ONNX Runtime itself fuses the first form to MatMulIntegerToFloat, so layers that no pass replaces run as before. It does
not fuse every QDQ layer to an integer operator (1.31: not if several layers share an int8 activation), so fold_back
undoes the second rewrite. A node with unexpected inputs or attributes is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

import numpy as np
import onnx_ir as ir

from ortolan import _native

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array, remove_unused, required_constant
from .graph import native_linears
from .node_checks import MICROSOFT_DOMAIN, node_input
from .stored_int8 import MATMUL_INTEGER_TO_FLOAT, StoredInt8, StoredInt8Tensors, read_int8

NewName = Callable[[str], str]

_NONE: Mapping[str, int] = {}
_TYPES = ("MatMulInteger", "QLinearMatMul", "QGemm", MATMUL_INTEGER_TO_FLOAT)


def unify_quantized(model: ir.Model, new_name: NewName) -> list[ir.Node]:
    """Rewrite all int8 layers of the model, in place; return the MatMul and Gemm nodes that fold_back can undo."""
    made: dict[Hashable, ir.Value] = {}
    products: list[ir.Node] = []
    for linear in list(_forms(model)):
        unused = [value for old in linear.nodes for value in old.inputs if value is not None]
        product = _Writer(linear, made, new_name).put()
        if linear.quantize is not None:
            model.opset_imports.setdefault(MICROSOFT_DOMAIN, 1)
        else:
            products.append(product)
        for value in unused:
            remove_unused(value)
    return products


def fold_back(model: ir.Model, products: Sequence[ir.Node]) -> None:
    """Turn QDQ layers that no pass has replaced back into QLinearMatMul, QGemm or MatMulIntegerToFloat."""
    for node in products:
        factors = [value.producer() if value is not None else None for value in node.inputs[:2]]
        if node.graph is None or not all(map(_dequantizes, factors)):
            continue
        x, weight = (list(factor.inputs) for factor in factors if factor is not None)
        quantize = _quantize_behind(node)
        y = [] if quantize is None else list(quantize.inputs[1:])
        domain, gemm = MICROSOFT_DOMAIN, node.op_type == "Gemm"
        attributes = {"transB": node.attributes["transB"].as_int()} if gemm else {}
        if gemm:
            value = node_input(node, 2)
            bias = value.producer() if value is not None else None
            if value is not None and not _dequantizes(bias):
                continue  # a float bias
            op_type, inputs = "QGemm", [*x, *weight, None if bias is None else bias.inputs[0], *y]
        elif quantize is not None:
            op_type, inputs, domain = "QLinearMatMul", [*x, *weight, *y], ""
        else:
            op_type, inputs = MATMUL_INTEGER_TO_FLOAT, [x[0], weight[0], x[1], weight[1], *x[2:], *weight[2:]]
        if len(x) < 3 or (quantize is not None and len(y) < 2):  # no zero points
            continue
        while inputs[-1] is None:
            inputs.pop()
        last = node if quantize is None else quantize
        new = ir.node(op_type, inputs, attributes, domain=domain, name=node.name)
        unused = [value for value in node.inputs if value is not None]
        old = [node] if quantize is None else [node, quantize]
        ir.convenience.replace_nodes_and_values(node.graph, last, old, [new], [last.outputs[0]], [new.outputs[0]])
        for value in unused:
            remove_unused(value)
        if domain:
            model.opset_imports.setdefault(domain, 1)


def _dequantizes(node: ir.Node | None) -> bool:
    return node is not None and node.op_type == "DequantizeLinear" and node.domain in DEFAULT_DOMAINS


def _quantize_behind(node: ir.Node) -> ir.Node | None:
    following = _only_user(node.outputs[0])
    if following is None:
        return None
    constant = all(constant_tensor(value) is not None for value in following.inputs[1:])
    return following if following.op_type == "QuantizeLinear" and constant else None


def stored_layers(model: ir.Model) -> list[StoredInt8]:
    """Return the weights whose integers can be kept, of layers that unify_quantized would rewrite."""
    stored = [read_int8(linear).stored() for linear in _forms(model)]
    return [one for one in stored if isinstance(one, StoredInt8)]


def is_unsupported_form(linear: _native.Linear) -> bool:
    """Return whether unify_quantized would rewrite the layer."""
    fixed = linear.x_scale is not None and linear.quantize is None
    return fixed or (linear.node.op_type == "MatMulInteger" and linear.node.domain in DEFAULT_DOMAINS)


# --- reading ----------------------------------------------------------------------------------------------------------


def _forms(model: ir.Model) -> Iterator[_native.Linear]:
    """Yield the layers that are not in a supported form, in graph order."""
    if not any(node.op_type in _TYPES for node in model.graph.all_nodes()):
        return
    found = native_linears(model)
    for node in model.graph.all_nodes():
        linear = found.get(node)
        if isinstance(linear, _native.Linear) and is_unsupported_form(linear):
            yield linear


def _bias(linear: _native.Linear, numbers: StoredInt8Tensors) -> ir.Value | np.ndarray | None:
    """Return the bias [n]: an int32 constant of a QGemm, to multiply by the scales of x and W; or float32."""
    if linear.bias is None:
        return None
    tensor = required_constant(linear.bias)
    if not linear.bias_in_steps:
        return float_array(tensor)
    gemm = _is_gemm(linear)
    if gemm and list(tensor.shape.numpy()) == [linear.n]:
        kept: ir.Value = linear.bias
        return kept
    steps = _scalar(linear.x_scale) * numbers.scales if gemm else linear.scales_of_columns(False)
    return np.asarray(np.broadcast_to(float_array(tensor).reshape(-1), (linear.n,)) * steps, np.float32)


def _is_gemm(linear: _native.Linear) -> bool:
    return bool(linear.node.op_type == "QGemm")


def _only_user(value: ir.Value) -> ir.Node | None:
    uses = list(value.uses())
    node = value.producer()
    alone = len(uses) == 1 and not value.is_graph_output() and node is not None and uses[0].node.graph is node.graph
    return uses[0].node if alone and uses[0].node.domain in DEFAULT_DOMAINS else None


# --- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes a layer to the graph in one of the two supported forms."""

    def __init__(self, linear: _native.Linear, made: dict[Hashable, ir.Value], new_name: NewName) -> None:
        """made: values shared by several layers, by key."""
        node = linear.node
        assert isinstance(node.graph, ir.Graph)
        self._linear, self._made, self._new_name, self._graph = linear, made, new_name, node.graph
        self._numbers = read_int8(linear)
        self._name = node.name or node.op_type
        codes = node.inputs[0]  # quantized x, perhaps the output of a layer that is already replaced
        assert codes is not None
        self._codes = codes
        self._nodes: list[ir.Node] = []

    def put(self) -> ir.Node:
        """Replace the layer's nodes; return the new MatMul, Gemm or MatMulIntegerToFloat."""
        linear = self._linear
        scales, zeros = self._weight_range()
        if linear.quantize is not None:
            inputs = [self._codes, linear.weight, linear.x_scale, scales, linear.x_zero_point, zeros]
            output = self._add(MATMUL_INTEGER_TO_FLOAT, inputs, self._name, domain=MICROSOFT_DOMAIN)
        else:
            output = self._product(scales, zeros)
        old = linear.nodes
        given = old[-1].outputs[0]
        output.type, output.shape = given.type, given.shape
        ir.convenience.replace_nodes_and_values(self._graph, old[-1], old, self._nodes, [given], [output])
        return next(node for node in self._nodes if node.name == self._name)

    def _product(self, scales: ir.Value, zeros: ir.Value | None) -> ir.Value:
        """Add DequantizeLinear of x and W, MatMul or Gemm, bias and QuantizeLinear; return the output."""
        linear, numbers = self._linear, self._numbers
        x = self._shared(
            [self._codes, linear.x_scale, linear.x_zero_point], "DequantizeLinear", f"{self._codes.name}/floats"
        )
        axis = 0 if numbers.transposed else 1
        weight = self._shared(
            [linear.weight, scales, zeros], "DequantizeLinear", f"{linear.weight.name}/floats", {"axis": axis}
        )
        bias = _bias(linear, numbers)
        if isinstance(bias, ir.Value):
            steps = self._constant(f"{self._name}/bias_scales", _in_one(numbers.scales * _scalar(linear.x_scale)))
            # With a bias in this form, ONNX Runtime can fuse the Gemm to QGemm.
            bias = self._add("DequantizeLinear", [bias, steps], f"{self._name}/bias", {"axis": 0})
        elif bias is not None:
            bias = self._constant(f"{self._name}/bias", bias)
        if _is_gemm(linear):
            factors = [x, weight] if bias is None else [x, weight, bias]
            output = self._add("Gemm", factors, self._name, {"transB": int(numbers.transposed)})
        else:
            output = self._add("MatMul", [x, weight], self._name)
            if bias is not None:
                output = self._add("Add", [output, bias], f"{self._name}/add_bias")
        if linear.y_scale is not None:
            inputs = [output, linear.y_scale, linear.y_zero_point]
            output = self._add("QuantizeLinear", inputs, f"{self._name}/quantize")
        return output

    def _weight_range(self) -> tuple[ir.Value, ir.Value]:
        """Return scales and zero points of equal shapes; ONNX Runtime fuses no layer without zero points."""
        numbers, name = self._numbers, self._linear.weight.name
        scales, zeros = _in_one(numbers.scales), _in_one(numbers.zero_points)
        kind = numbers.codes.dtype.numpy()
        if scales.shape != zeros.shape:
            scales, zeros = (np.broadcast_to(array.reshape(-1), (numbers.n,)) for array in (scales, zeros))
        return self._constant(f"{name}.scales", scales), self._constant(f"{name}.zero_points", zeros.astype(kind))

    def _shared(
        self, inputs: list[ir.Value | None], op_type: str, name: str, attributes: Mapping[str, int] = _NONE
    ) -> ir.Value:
        """Return the output of a node that several layers share, added on first use."""
        key = (self._graph, op_type, *inputs, *attributes.items())
        if key not in self._made:
            self._made[key] = self._add(op_type, inputs, self._new_name(name), attributes)
        return self._made[key]

    def _add(
        self,
        op_type: str,
        inputs: Sequence[ir.Value | None],
        name: str,
        attributes: Mapping[str, int] = _NONE,
        domain: str = "",
    ) -> ir.Value:
        node = ir.node(op_type, inputs, attributes, domain=domain, name=name)
        node.outputs[0].name = self._new_name(f"{name}_output")
        self._nodes.append(node)
        return node.outputs[0]

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        """Add an initializer to the layer's graph, or return the equal one of the same name."""
        key = (self._graph, name, array.dtype.str, array.shape, array.tobytes())
        if key not in self._made:
            tensor = ir.Tensor(np.ascontiguousarray(array).reshape(array.shape), name=self._new_name(name))
            value = ir.Value(
                name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
            )
            self._graph.register_initializer(value)
            self._made[key] = value
        return self._made[key]


def _scalar(value: ir.Value) -> np.ndarray:
    tensor = constant_tensor(value)
    assert tensor is not None
    return float_array(tensor).reshape(())


def _in_one(array: np.ndarray) -> np.ndarray:
    """Return a scalar if all elements are equal, else the array."""
    return array[0].reshape(()) if (array == array[0]).all() else array
