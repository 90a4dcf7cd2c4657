"""Rewrites int8 layers of several tools into the two forms that the passes support (stored_int8.py).

    DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by scales       (quantize_dynamic)
        becomes MatMulIntegerToFloat after the same DynamicQuantizeLinear
    QLinearMatMul, QGemm                                                  (quantize_static, QOperator)
    MatMulIntegerToFloat with a fixed input range
    QuantizeLinear -> MatMulInteger (-> Add int32) -> Cast -> Mul         (SparseML)
        become DequantizeLinear of input and weight -> MatMul or Gemm (-> QuantizeLinear)              (QDQ)

ONNX Runtime itself fuses the first form to MatMulIntegerToFloat, so layers that no pass replaces run as before. It does
not fuse every QDQ layer to an integer operator (1.31: not if several layers share an int8 activation), so fold_back
undoes the second rewrite. A node with unexpected inputs or attributes is kept, and why_not returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor, float_array, remove_unused
from .node_checks import MICROSOFT_DOMAIN, UnfitError, constant_input, expect, integer_attribute, node_input
from .stored_int8 import (
    INT8_TYPES,
    MATMUL_INTEGER_TO_FLOAT,
    StoredInt8,
    StoredInt8Tensors,
    dynamic_source,
    maker,
    range_at,
    read_stored_int8,
    stored_inputs,
)

NewName = Callable[[str], str]

_NONE: Mapping[str, int] = {}


@dataclass
class _Form:
    """An int8 layer y = x W + bias, perhaps with quantized y."""

    nodes: list[ir.Node]  # nodes to replace, in order; the first one reads the weight
    output: ir.Value
    numbers: StoredInt8Tensors
    weight: ir.Value
    codes: ir.Value  # quantized x
    x_scale: ir.Value
    x_zero: ir.Value | None
    dynamic: bool = False  # True: x_scale and x_zero come from a DynamicQuantizeLinear; False: constants
    gemm: bool = False
    bias: ir.Value | np.ndarray | None = None  # int32 constant [n], to multiply by x_scale * scales; or float32 [n]
    y: tuple[ir.Value, ir.Value | None] | None = None  # scale and zero point of the output; None: a float output


def unify_quantized(model: ir.Model, new_name: NewName) -> list[ir.Node]:
    """Rewrite all int8 layers of the model, in place; return the MatMul and Gemm nodes that fold_back can undo."""
    made: dict[Hashable, ir.Value] = {}
    products: list[ir.Node] = []
    for node in list(model.graph.all_nodes()):
        # A node that was replaced together with an earlier one has no graph.
        form = _recognize(node) if node.graph is not None else None
        if not isinstance(form, _Form):
            continue
        unused = [value for old in form.nodes for value in old.inputs if value is not None]
        product = _Writer(form, made, new_name).put()
        if form.dynamic:
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
    try:
        following = _only_user(node.outputs[0])
    except UnfitError:
        return None
    constant = all(constant_tensor(value) is not None for value in following.inputs[1:])
    return following if following.op_type == "QuantizeLinear" and constant else None


def stores_int8(node: ir.Node) -> bool:
    """Return whether unify_quantized would rewrite this node, with a weight whose integers can be kept."""
    form = _recognize(node)
    return isinstance(form, _Form) and isinstance(form.numbers.stored(), StoredInt8)


def why_not(node: ir.Node) -> str | None:
    """Return why unify_quantized cannot rewrite a node of an int8 layer; None if it can, or if there is no need."""
    form = _recognize(node)
    return form if isinstance(form, str) else None


def _recognize(node: ir.Node) -> _Form | str | None:
    """Return the layer, or why it cannot be rewritten; None for other nodes and layers in a supported form."""
    read = _READERS.get((node.domain if node.domain not in DEFAULT_DOMAINS else "", node.op_type))
    if read is None:
        return None
    try:
        return read(node)
    except UnfitError as reason:
        return str(reason)


# --- reading ----------------------------------------------------------------------------------------------------------


def _qlinear_matmul(node: ir.Node) -> _Form:
    """Read QLinearMatMul.

    Inputs: a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point.
    """
    form = _fixed(node, read_stored_int8(node, 3, 4, 5), 3)
    form.y = _output_range(node, 6, 7)
    return form


def _qgemm(node: ir.Node) -> _Form:
    """Read QGemm.

    Inputs: A, a_scale, a_zero_point, B, b_scale, b_zero_point, C, y_scale, y_zero_point.
    """
    transposed = integer_attribute(node, "transB", 0) == 1
    expect(integer_attribute(node, "transA", 0) == 0, "transA is 1, expected 0")
    alpha = node.attributes["alpha"].value if "alpha" in node.attributes else 1.0
    expect(alpha == 1.0, f"alpha is {alpha}, expected 1")
    numbers = read_stored_int8(node, 3, 4, 5, transposed)
    form = _fixed(node, numbers, 3)
    form.gemm = True
    n = numbers.n
    if node_input(node, 6) is not None:
        bias = constant_input(node, 6, "bias", (ir.DataType.INT32,), (n,), (1, n), (), (1,), (1, 1))
        form.bias = node.inputs[6] if list(bias.shape) == [n] else _in_steps(bias, numbers, form)
    if node_input(node, 7) is not None:
        form.y = _output_range(node, 7, 8)
    return form


def _matmul_integer_to_float(node: ir.Node) -> _Form | None:
    """Read MatMulIntegerToFloat.

    Inputs: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.
    """
    quantize = dynamic_source(node_input(node, 0))
    inputs = stored_inputs(node)
    assert inputs is not None
    if quantize is not None:
        _check_dynamic(node, quantize, 4)
        expect(node_input(node, 2) is quantize.outputs[1], "its a_scale is not an output of its DynamicQuantizeLinear")
        return None
    form = _fixed(node, read_stored_int8(node, *inputs.weight), inputs.codes, scale=2, zero=4)
    if node_input(node, inputs.bias) is not None:
        bias = constant_input(node, inputs.bias, "bias", (ir.DataType.FLOAT,), (form.numbers.n,))
        form.bias = float_array(bias)
    return form


def _matmul_integer(node: ir.Node) -> _Form:
    """Read MatMulInteger, an optional Add of a bias, Cast, and Mul by scales.

    Inputs: A, B, a_zero_point, b_zero_point.
    """
    codes, weight = node_input(node, 0), node_input(node, 1)
    if codes is None or weight is None:
        raise UnfitError("an input is missing")
    expect(constant_tensor(codes) is None, "the constant is the first input (W x, not x W)")
    shape = constant_input(node, 1, "weight", INT8_TYPES).shape.numpy()
    expect(len(shape) == 2, f"its weight {weight.name!r} is {len(shape)}-D, expected 2-D")
    quantize = dynamic_source(codes)
    source = quantize if quantize is not None else maker(codes, "QuantizeLinear")
    if source is None:
        raise UnfitError(
            "its input range is unknown: neither QuantizeLinear nor DynamicQuantizeLinear computes its input"
        )
    nodes, bias = [node], None
    following = _only_user(node.outputs[0])
    if following.op_type == "Add":
        expect(quantize is None, "a bias is added to its int32 sums, whose scale depends on the input")
        bias = _columns(_other(following, nodes[-1].outputs[0]), ir.DataType.INT32, shape[1], "bias")
        nodes.append(following)
        following = _only_user(following.outputs[0])
    to = following.attributes.get("to")
    expect(
        following.op_type == "Cast" and to is not None and to.value == ir.DataType.FLOAT,
        f"its sums go into {following.op_type} {following.name!r}, expected a Cast to float32 and a Mul by the scales",
    )
    nodes.append(following)
    step = _multiply(nodes, shape[1], None if quantize is None else quantize.outputs[1])
    scales = step
    if quantize is not None:
        _check_dynamic(node, quantize, 2)
        x_scale, x_zero = quantize.outputs[1], node_input(node, 2)
    else:
        x_scale, x_zero = _range_of_codes(node, source)
        scales = step / _scalar(x_scale)
    form = _Form(
        nodes, nodes[-1].outputs[0], read_stored_int8(node, 1, scales, 3), weight, codes, x_scale, x_zero,
        dynamic=quantize is not None,
    )  # fmt: skip
    if bias is not None:
        form.bias = np.asarray(bias * step, np.float32)
    return form


def _multiply(nodes: list[ir.Node], n: int, x_scale: ir.Value | None) -> np.ndarray:
    """Append the Mul nodes that apply the scales to `nodes`; return the product of the constant scales, float32 [n].

    x_scale: value that must also be a factor; None: constants only.
    """
    product, found = np.ones(n, np.float32), x_scale is None
    constants = 0
    while not (found and constants):
        value = nodes[-1].outputs[0]
        multiply = _only_user(value)
        expect(multiply.op_type == "Mul", f"{multiply.op_type} {multiply.name!r} follows, expected a Mul by its scales")
        for factor in _factors(_other(multiply, value)):
            if factor is not None and factor is x_scale and not found:
                found = True
            else:
                product = product * _columns(factor, ir.DataType.FLOAT, n, "scales")
                constants += 1
        nodes.append(multiply)
    return product


def _columns(value: ir.Value | None, dtype: ir.DataType, n: int, what: str) -> np.ndarray:
    """Return a constant with one or n elements as float32 [n]."""
    tensor = constant_tensor(value)
    if tensor is None or tensor.dtype != dtype or list(tensor.shape.numpy()) not in ([n], [1, n], [1], [1, 1], []):
        name = None if value is None else value.name
        raise UnfitError(f"its {what} {name!r} are not a {dtype.name} constant with 1 or {n} elements")
    return np.broadcast_to(float_array(tensor).reshape(-1), (n,))


def _range_of_codes(node: ir.Node, quantize: ir.Node) -> tuple[ir.Value, ir.Value | None]:
    """Return the constant scale and zero point of a MatMulInteger's input, from its QuantizeLinear."""
    known, own = range_at(quantize, 1, 2), constant_tensor(node_input(node, 2))
    scale, zero = node_input(quantize, 1), node_input(quantize, 2)
    if known is None or scale is None:
        raise UnfitError("its input has no constant positive scale with a constant 8-bit zero point")
    first, second = constant_tensor(zero), own
    same = (node_input(node, 2) is None) == (second is None) and _number(first) == _number(second)
    expect(same, "its a_zero_point differs from the zero point of its QuantizeLinear")
    return scale, zero


def _number(zero_point: ir.TensorProtocol | None) -> list[int]:
    return [0] if zero_point is None else list(zero_point.numpy().reshape(-1))


def _fixed(node: ir.Node, numbers: StoredInt8Tensors, weight: int, scale: int = 1, zero: int = 2) -> _Form:
    """Return the layer of one node; inputs `scale` and `zero` are the constant scale and zero point of x."""
    codes, weight_value, x_scale = (node_input(node, index) for index in (0, weight, scale))
    if codes is None or weight_value is None or x_scale is None:
        raise UnfitError("an input is missing")
    expect(constant_tensor(codes) is None, "both inputs are constant")
    _check_range(node, scale, zero, "input")
    return _Form([node], node.outputs[0], numbers, weight_value, codes, x_scale, node_input(node, zero))


def _output_range(node: ir.Node, scale: int, zero: int) -> tuple[ir.Value, ir.Value | None]:
    value = node_input(node, scale)
    _check_range(node, scale, zero, "output")
    assert value is not None
    return value, node_input(node, zero)


def _check_range(node: ir.Node, scale: int, zero: int, what: str) -> None:
    tensor = constant_tensor(node_input(node, scale))
    known = range_at(node, scale, zero) is not None
    expect(known, f"its {what} has no constant positive scale with a constant 8-bit zero point")
    expect(tensor is None or tensor.dtype == ir.DataType.FLOAT, f"the scale of its {what} is not float32")


def _in_steps(bias: ir.TensorProtocol, numbers: StoredInt8Tensors, form: _Form) -> np.ndarray:
    """Return an int32 bias as floats [n]: multiplied by the scales of x and W."""
    steps = _scalar(form.x_scale) * numbers.scales
    return np.asarray(np.broadcast_to(float_array(bias).reshape(-1), (numbers.n,)) * steps, np.float32)


def _check_dynamic(node: ir.Node, quantize: ir.Node, zero: int) -> None:
    """Check that the zero point is an output of the DynamicQuantizeLinear."""
    same = len(quantize.outputs) == 3 and node_input(node, zero) is quantize.outputs[2]
    expect(same, "its a_zero_point is not an output of its DynamicQuantizeLinear")


def _only_user(value: ir.Value) -> ir.Node:
    uses = list(value.uses())
    node = value.producer()
    alone = len(uses) == 1 and not value.is_graph_output() and node is not None and uses[0].node.graph is node.graph
    expect(alone, f"its sums {value.name!r} have other consumers, expected only a Cast and a Mul by the scales")
    expect(uses[0].node.domain in DEFAULT_DOMAINS, f"{uses[0].node.op_type} follows its sums")
    return uses[0].node


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    expect(len(node.inputs) == 2, f"{node.op_type} {node.name!r} has {len(node.inputs)} inputs, expected 2")
    first, second = node.inputs
    return second if first is value else first


def _factors(value: ir.Value | None) -> list[ir.Value | None]:
    """Return the two operands if a value is computed by Mul, else the value itself."""
    node = value.producer() if value is not None else None
    if constant_tensor(value) is None and node is not None and node.op_type == "Mul" and node.domain in DEFAULT_DOMAINS:
        return list(node.inputs)
    return [value]


_READERS: dict[tuple[str, str], Callable[[ir.Node], _Form | None]] = {
    ("", "MatMulInteger"): _matmul_integer,
    ("", "QLinearMatMul"): _qlinear_matmul,
    (MICROSOFT_DOMAIN, "QGemm"): _qgemm,
    (MICROSOFT_DOMAIN, MATMUL_INTEGER_TO_FLOAT): _matmul_integer_to_float,
}


# --- writing ----------------------------------------------------------------------------------------------------------


class _Writer:
    """Writes a layer to the graph in one of the two supported forms."""

    def __init__(self, form: _Form, made: dict[Hashable, ir.Value], new_name: NewName) -> None:
        """made: values shared by several layers, by key."""
        node = form.nodes[0]
        assert isinstance(node.graph, ir.Graph)
        self._form, self._made, self._new_name, self._graph = form, made, new_name, node.graph
        self._name = node.name or node.op_type
        self._nodes: list[ir.Node] = []

    def put(self) -> ir.Node:
        """Replace the layer's nodes; return the new MatMul, Gemm or MatMulIntegerToFloat."""
        form = self._form
        scales, zeros = self._weight_range()
        if form.dynamic:
            inputs: list[ir.Value | None] = [form.codes, form.weight, form.x_scale, scales, form.x_zero, zeros]
            while inputs[-1] is None:
                inputs.pop()
            output = self._add(MATMUL_INTEGER_TO_FLOAT, inputs, self._name, domain=MICROSOFT_DOMAIN)
        else:
            output = self._product(scales, zeros)
        output.type, output.shape = form.output.type, form.output.shape
        ir.convenience.replace_nodes_and_values(
            self._graph, form.nodes[-1], form.nodes, self._nodes, [form.output], [output]
        )
        return next(node for node in self._nodes if node.name == self._name)

    def _product(self, scales: ir.Value, zeros: ir.Value | None) -> ir.Value:
        """Add DequantizeLinear of x and W, MatMul or Gemm, bias and QuantizeLinear; return the output."""
        form = self._form
        codes = [form.codes, form.x_scale, form.x_zero]
        x = self._shared(codes, "DequantizeLinear", f"{form.codes.name}/floats")
        axis = 0 if form.numbers.transposed else 1
        weight = self._shared(
            [form.weight, scales, zeros], "DequantizeLinear", f"{form.weight.name}/floats", {"axis": axis}
        )
        bias = form.bias
        if isinstance(bias, ir.Value):
            steps = self._constant(f"{self._name}/bias_scales", _in_one(form.numbers.scales * _scalar(form.x_scale)))
            # With a bias in this form, ONNX Runtime can fuse the Gemm to QGemm.
            bias = self._add("DequantizeLinear", [bias, steps], f"{self._name}/bias", {"axis": 0})
        elif bias is not None:
            bias = self._constant(f"{self._name}/bias", bias)
        if form.gemm:
            factors = [x, weight] if bias is None else [x, weight, bias]
            output = self._add("Gemm", factors, self._name, {"transB": int(form.numbers.transposed)})
        else:
            output = self._add("MatMul", [x, weight], self._name)
            if bias is not None:
                output = self._add("Add", [output, bias], f"{self._name}/add_bias")
        if form.y is not None:
            output = self._add("QuantizeLinear", [output, *form.y], f"{self._name}/quantize")
        return output

    def _weight_range(self) -> tuple[ir.Value, ir.Value]:
        """Return scales and zero points of equal shapes; ONNX Runtime fuses no layer without zero points."""
        numbers, name = self._form.numbers, self._form.weight.name
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
