"""Tables for LutPostOp: element-wise operators on a quantized value, computed for every code.

Reference: sparse-int8-transformers, section 3.3 and algorithm 2. ONNX Runtime runs the operators on all 256 or 65,536
codes, so a table contains exactly its results, including rounding and saturation.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import one_line

from ..names import MINIMUM_IR_VERSION
from .constants import DEFAULT_DOMAINS, constant_tensor
from .node_checks import MICROSOFT_DOMAIN

# Types of a table's index; its entries have one of these types or float32.
CODE_TYPES = (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16)

# Element-wise operators, with the indices of inputs that must be scalars: scales, zero points and bounds. All other
# inputs broadcast against each other.
_NO_PARAMETERS: frozenset[int] = frozenset()
BROADCASTING = (
    *("Abs", "Acos", "Acosh", "Add", "And", "Asin", "Asinh", "Atan", "Atanh", "Cast", "Ceil", "Celu", "Cos", "Cosh"),
    *("Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater", "GreaterOrEqual", "HardSigmoid", "HardSwish"),
    *("Identity", "IsInf", "IsNaN", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min", "Mish", "Mod"),
    *("Mul", "Neg", "Not", "Or", "PRelu", "Pow", "Reciprocal", "Relu", "Round", "Selu", "Shrink", "Sigmoid", "Sign"),
    *("Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Sub", "Sum", "Swish", "Tan", "Tanh", "ThresholdedRelu"),
    *("Where", "Xor"),
)
_QUANTIZATION = frozenset({1, 2})
_ELEMENT_WISE: Mapping[tuple[str, str], frozenset[int]] = {
    **{("", op_type): _NO_PARAMETERS for op_type in BROADCASTING},
    ("", "Clip"): frozenset({1, 2}),
    ("", "DequantizeLinear"): _QUANTIZATION,
    ("", "QuantizeLinear"): _QUANTIZATION,
    (MICROSOFT_DOMAIN, "DequantizeLinear"): _QUANTIZATION,
    (MICROSOFT_DOMAIN, "QuantizeLinear"): _QUANTIZATION,
    (MICROSOFT_DOMAIN, "FastGelu"): _NO_PARAMETERS,
    (MICROSOFT_DOMAIN, "Gelu"): _NO_PARAMETERS,
    (MICROSOFT_DOMAIN, "QuickGelu"): _NO_PARAMETERS,
    (MICROSOFT_DOMAIN, "QLinearAdd"): frozenset({1, 2, 4, 5, 6, 7}),
    (MICROSOFT_DOMAIN, "QLinearLeakyRelu"): frozenset({1, 2, 3, 4}),
    (MICROSOFT_DOMAIN, "QLinearMul"): frozenset({1, 2, 4, 5, 6, 7}),
    (MICROSOFT_DOMAIN, "QLinearSigmoid"): frozenset({1, 2, 3, 4}),
}
_RANDOM = ("Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike")
_TEXT = ir.DataType.STRING

# Longest path of element-wise operators from a constant to a computed scalar.
_DEEPEST_NUMBER = 8


class NoTableError(Exception):
    """The reason why a chain has no table."""


@dataclass(frozen=True, eq=False)
class Chain:
    """Element-wise operators that compute `output`, of the same shape as `input`, from `input` and scalars."""

    input: ir.Value
    nodes: tuple[ir.Node, ...]  # in graph order
    output: ir.Value

    @property
    def operators(self) -> list[str]:
        """Types of the nodes."""
        return [node.op_type for node in self.nodes]


@dataclass
class Cone:
    """All element-wise nodes that depend only on one value and on scalars."""

    input: ir.Value
    nodes: list[ir.Node] = field(default_factory=list)  # in graph order
    refused: dict[ir.Node, str] = field(default_factory=dict)  # consumers outside the cone, with the reason

    def values(self) -> Iterator[ir.Value]:
        """Yield the outputs of the nodes."""
        for node in self.nodes:
            yield node.outputs[0]

    def chain_to(self, output: ir.Value) -> Chain:
        """Return the nodes that compute `output`, one of the cone's values."""
        inside, needed, waiting = set(self.nodes), set(), [output.producer()]
        while waiting:
            node = waiting.pop()
            if node in inside and node not in needed:
                needed.add(node)
                waiting += [value.producer() for value in node.inputs if value is not None]
        return Chain(self.input, tuple(node for node in self.nodes if node in needed), output)


def find_cone(x: ir.Value, graph: ir.Graph, order: Mapping[ir.Node, int], without: Collection[str] = ()) -> Cone:
    """Find the cone of x in one graph. order: index of each node in the graph. without: operator types to exclude."""
    cone = Cone(x)
    known = {x}
    waiting = _consumers(x)
    while True:
        reasons = {
            node: f"stops at {node.op_type}" if node.op_type in without else _why_not(node, graph, known, x)
            for node in waiting
        }
        found = [node for node, reason in reasons.items() if reason is None]
        if not found:
            cone.refused = {node: reason for node, reason in reasons.items() if reason is not None}
            cone.nodes.sort(key=lambda node: order[node])
            return cone
        cone.nodes += found
        known.update(node.outputs[0] for node in found)
        waiting = [node for node in waiting if node not in found]
        for node in found:
            waiting += [use for use in _consumers(node.outputs[0]) if use not in cone.nodes and use not in waiting]


def find_chain(cone: Cone) -> Chain | None:
    """Return the longest chain that replaces all consumers of the cone's input.

    Intermediate values have no other consumers. LutPostOp, or the operator that computes the input, replaces the chain.
    """
    inside: set[ir.Node] = set()
    longest = None
    # Values that nodes outside the first `count` nodes read. A chain is complete if only its output is such a value.
    open_values = {cone.input}
    for count, node in enumerate(cone.nodes, 1):
        inside.add(node)
        open_values.add(node.outputs[0])
        open_values = {value for value in open_values if seen_outside(value, inside)}
        if open_values <= {node.outputs[0]}:
            longest = Chain(cone.input, tuple(cone.nodes[:count]), node.outputs[0])
    return longest


def seen_outside(value: ir.Value, nodes: Collection[ir.Node]) -> bool:
    """Return whether the value has consumers besides these nodes."""
    return value.is_graph_output() or any(use.node not in nodes for use in value.uses())


def graph_order(graph: ir.Graph) -> dict[ir.Node, int]:
    """Return the index of each node."""
    return {node: place for place, node in enumerate(graph)}


def data_inputs(node: ir.Node) -> list[ir.Value]:
    """Return the inputs except scales, zero points and bounds."""
    parameters = _ELEMENT_WISE.get(_key(node), _NO_PARAMETERS)
    return [value for index, value in enumerate(node.inputs) if value is not None and index not in parameters]


def is_constant(value: ir.Value) -> bool:
    """Return whether a value is constant, or a scalar computed element-wise from constants."""
    return _constant_shape(value) is not None


def code_type(x: ir.Value) -> ir.DataType | None:
    """Return the element type of a value, which for quantized values a zero point can tell; None if unknown."""
    for node in _consumers(x):
        quantized = node.op_type != "Clip" and 2 in _ELEMENT_WISE.get(_key(node), _NO_PARAMETERS)
        zero_point = constant_tensor(node.inputs[2]) if len(node.inputs) > 2 and node.inputs[0] is x else None
        if quantized and node.op_type != "QuantizeLinear" and zero_point is not None:
            return zero_point.dtype
    if x.dtype is not None:
        return x.dtype
    maker = x.producer()
    if maker is not None and maker.op_type == "QuantizeLinear" and len(maker.inputs) > 2:
        zero_point = constant_tensor(maker.inputs[2])
        return None if zero_point is None else zero_point.dtype
    return None


def make_table(chain: Chain, dtype: ir.DataType, opsets: Mapping[str, int]) -> np.ndarray:
    """Return the chain's output for every possible code, indexed by the code's bits.

    Args:
        chain: a chain whose input has the type `dtype`.
        dtype: one of CODE_TYPES.
        opsets: opset version by domain of the model.

    Raises:
        NoTableError: ONNX Runtime cannot run the chain.
    """
    return evaluate(chain, _all_codes(dtype), opsets)


def evaluate(chain: Chain, x: np.ndarray, opsets: Mapping[str, int]) -> np.ndarray:
    """Return the chain's output for x [count].

    Args:
        chain: the chain to run.
        x: values of the type of the chain's input.
        opsets: opset version by domain of the model.

    Raises:
        NoTableError: ONNX Runtime cannot run the chain.
    """
    value = _input("x", x)
    nodes, y = _copy(chain, value)
    return _run(value, x, nodes, y, opsets)


def make_quantized_table(
    chain: Chain,
    x_scale: float,
    x_zero_point: np.integer,
    y_scale: float,
    y_zero_point: np.integer,
    opsets: Mapping[str, int],
) -> np.ndarray:
    """Return the table of QuantizeLinear(chain(DequantizeLinear(code))) for a float32 chain.

    The table has 256 entries for an 8-bit x_zero_point and 65,536 for a 16-bit one. It has the type of y_zero_point and
    is indexed by the code's bits. opsets: opset version by domain of the model.

    Raises:
        NoTableError: ONNX Runtime cannot run the chain.
    """
    codes = _all_codes(ir.DataType.from_numpy(x_zero_point.dtype))
    x = _input("x", codes)
    from_codes = _node("DequantizeLinear", [x, _constant(np.float32(x_scale)), _constant(x_zero_point)], "dequantized")
    nodes, y = _copy(chain, from_codes.outputs[0])
    to_codes = _node("QuantizeLinear", [y, _constant(np.float32(y_scale)), _constant(y_zero_point)], "quantized")
    return _run(x, codes, [from_codes, *nodes, to_codes], to_codes.outputs[0], opsets)


def _consumers(x: ir.Value) -> list[ir.Node]:
    return list(dict.fromkeys(use.node for use in x.uses()))


def _key(node: ir.Node) -> tuple[str, str]:
    return ("" if node.domain in DEFAULT_DOMAINS else node.domain, node.op_type)


def _why_not(node: ir.Node, graph: ir.Graph, known: Collection[ir.Value], x: ir.Value) -> str | None:
    """Return why a node cannot join the cone of x; None if it is element-wise on `known` values and scalars."""
    op_type = node.op_type
    if node.graph is not graph:
        return f"{op_type} is in another graph, a branch or a loop"
    if op_type in _RANDOM:
        return f"{op_type} is random"
    if _key(node) not in _ELEMENT_WISE:
        return f"{op_type} is not element-wise"
    if op_type == "Cast" and node.attributes["to"].as_int() == _TEXT:
        return "Cast to text has no table"
    parameters = _ELEMENT_WISE[_key(node)]
    for index, value in enumerate(node.inputs):
        if value is None or (value in known and index not in parameters):
            continue
        shape = _constant_shape(value)
        if shape is None:
            return f"{op_type} has another input that is neither constant nor computed from {x.name!r}"
        if any(length != 1 for length in shape):
            return f"{op_type} has a constant of shape {list(shape)}, expected a scalar: " + (
                "it is quantized per axis"
                if index in parameters
                else "it computes a different function at each position"
            )
        # A constant with more axes than x would add axes to the result.
        rank = 1 if index in parameters else 0 if x.shape is None else len(x.shape)
        if len(shape) > rank:
            known_rank = "of unknown rank" if x.shape is None else f"of rank {rank}"
            return f"{op_type} has a constant of shape {list(shape)}, expected []: {x.name!r} is {known_rank}"
    return None


def _constant_shape(value: ir.Value, depth: int = _DEEPEST_NUMBER) -> tuple[int, ...] | None:
    """Return the shape of a constant or of a scalar computed from constants (quantizers also quantize scalars)."""
    tensor = constant_tensor(value)
    if tensor is not None:
        return tuple(tensor.shape.numpy())
    node = value.producer()
    if node is None or _key(node) not in _ELEMENT_WISE or depth == 0:
        return None
    parameters = _ELEMENT_WISE[_key(node)]
    longest: tuple[int, ...] = ()
    for index, operand in enumerate(node.inputs):
        shape = () if operand is None else _constant_shape(operand, depth - 1)
        if shape is None or any(length != 1 for length in shape):
            return None
        if index not in parameters:
            longest = max(longest, shape, key=len)
    return longest


def _all_codes(dtype: ir.DataType) -> np.ndarray:
    """Return every code of an integer type, in the order of its bits as an unsigned integer."""
    bits = 8 * dtype.numpy().itemsize
    return np.arange(2**bits, dtype=f"uint{bits}").view(dtype.numpy())


def _input(name: str, codes: np.ndarray) -> ir.Value:
    dtype = ir.DataType.from_numpy(codes.dtype)
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(codes.shape))


def _constant(number: np.generic) -> ir.Value:
    tensor = ir.Tensor(np.asarray(number))
    return ir.Value(type=ir.TensorType(tensor.dtype), shape=ir.Shape(()), const_value=tensor)


def _node(op_type: str, inputs: list[ir.Value], output: str) -> ir.Node:
    """Return a com.microsoft node, whose QuantizeLinear and DequantizeLinear support 16 bits in every opset."""
    return ir.node(op_type, inputs, domain=MICROSOFT_DOMAIN, outputs=[ir.Value(name=output)])


def _copy(chain: Chain, x: ir.Value) -> tuple[list[ir.Node], ir.Value]:
    """Return copies of the chain's nodes with x as input, and the copy of the chain's output."""
    values: dict[ir.Value, ir.Value] = {chain.input: x}
    nodes: list[ir.Node] = []

    def copied(value: ir.Value | None) -> ir.Value | None:
        if value is None or value in values:
            return None if value is None else values[value]
        tensor = constant_tensor(value)
        if tensor is not None:
            # A copy of the tensor, because naming a value also renames its tensor.
            own = ir.Tensor(tensor.numpy(), dtype=tensor.dtype)
            values[value] = ir.Value(type=ir.TensorType(own.dtype), shape=own.shape, const_value=own)
        else:
            node = value.producer()
            assert node is not None
            copy(node)
        return values[value]

    def copy(node: ir.Node) -> None:
        inputs = [copied(value) for value in node.inputs]
        values[node.outputs[0]] = y = ir.Value(name=f"y{len(nodes)}")
        nodes.append(ir.Node(node.domain, node.op_type, inputs, node.attributes.values(), outputs=[y]))

    for node in chain.nodes:
        copy(node)
    return nodes, values[chain.output]


def _run(x: ir.Value, codes: np.ndarray, nodes: list[ir.Node], y: ir.Value, opsets: Mapping[str, int]) -> np.ndarray:
    import onnxruntime

    inputs = dict.fromkeys(value for node in nodes for value in node.inputs if value is not None)
    constants = [value for value in inputs if value.const_value is not None]
    for index, value in enumerate(constants):
        value.name = f"c{index}"
    graph = ir.Graph(
        [x], [y], nodes=nodes, initializers=constants, opset_imports={"": opsets[""], MICROSOFT_DOMAIN: 1}, name="chain"
    )
    model = ir.to_proto(ir.Model(graph, ir_version=MINIMUM_IR_VERSION))
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 4
    try:
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        table: np.ndarray = session.run(None, {"x": codes})[0]
    except Exception as error:  # ONNX Runtime's exceptions have no common base class except Exception
        raise NoTableError(f"ONNX Runtime cannot run it: {one_line(error)}") from error
    return table
