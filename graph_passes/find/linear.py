"""Finds the linear layers of a model: y = x W + b with a constant W. Used by prune, calibrate, replace and inspect.

A MatMul or Gemm that is not a linear layer is reported with the reason, so that users see why it is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ..options import any_matches
from ..weights.quantizers.fixed_range import FixedRange
from .constants import (
    DEFAULT_DOMAINS,
    constant_key,
    constant_tensor,
    constant_values,
    float_array,
    stored_bytes,
    why_not_computed,
)
from .fused_attention import count_int8_layers
from .fused_forms import why_left
from .quantized_forms import stores_int8, why_not
from .quantized_weight import QuantizedWeight, dequantized_tensor
from .stored_int4 import (
    BIAS_INPUT,
    MATMUL_NBITS,
    WEIGHT_INPUTS,
    StoredInt4,
    is_matmul_nbits,
    read_dequantized,
    read_matmul_nbits,
)
from .stored_int8 import (
    DYNAMIC_QUANTIZE_MATMUL,
    MATMUL_INTEGER_TO_FLOAT,
    Malformed,
    StoredInt8,
    StoredInt8Tensors,
    fixed_range,
    layer_input,
    read_dequantized_int8,
    read_int8,
    stored_inputs,
)
from .weight_only import read_matmul_nbits_int8, read_weight_only

# Operators with weights of linear layers that are reported as not replaced, with the reason and perhaps a remedy.
_OTHER_LINEAR_OPS = {
    "Attention": "its QKV weights are inside of a fused operator; run the pass normalize first",
    "QAttention": "its QKV weights are int8 inside of a fused operator; run the pass normalize first",
    "LongformerAttention": "its QKV weights are inside of a fused operator",
    "DecoderAttention": "its QKV weights are inside of a fused operator",
    "FusedMatMul": "a fused MatMul with scaling or transposes; run the pass normalize first",
    "FusedGemm": "a Gemm fused with its activation; run the pass normalize first",
    "GemmFastGelu": "a Gemm fused with its activation, which ONNX Runtime cannot run on CPUs",
    MATMUL_NBITS: "its weight is already quantized",
    "MatMulBnb4": "its weight is already quantized",
    "MatMulFpQ4": "its weight is already quantized",
    "MatMulInteger": "its weight is already quantized",
    MATMUL_INTEGER_TO_FLOAT: "its weight is already quantized",
    DYNAMIC_QUANTIZE_MATMUL: "its weight is already quantized",
    "QLinearMatMul": "its weight is already quantized",
    "QGemm": "its weight is already quantized",
    "MoE": "a mixture of experts in a fused operator",
    "QMoE": "a mixture of experts in a fused operator",
    "Einsum": "Einsum is not supported; export it as MatMul",
}
# Operators whose stored integers are lost if they become a NotLinear; why_not_kept reports these nodes.
_STORING = (MATMUL_NBITS, "MatMulBnb4", "MatMulFpQ4", MATMUL_INTEGER_TO_FLOAT, DYNAMIC_QUANTIZE_MATMUL, "QMoE")
_MISSING = "an input is missing"
_ACTIVATION_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)


@dataclass(frozen=True, eq=False)
class Linear:
    """A linear layer.

    Its node is a MatMul, Gemm, MatMulNBits, or an operator with an int8 weight (stored_int8.py); its bias may come from
    the Add after it.
    """

    node: ir.Node
    add: ir.Node | None
    x: ir.Value
    weight_value: ir.Value  # the node's weight input; quantized: the input with the integers
    transposed: bool  # the weight is [n, k], as for Gemm with transB=1
    bias_value: ir.Value | None
    k: int
    n: int
    dtype: ir.DataType  # type of x and of the output
    # The 4-bit weight that the model stores, or the reason why W4A8MatMul cannot keep its integers; None: not 4-bit.
    int4: StoredInt4 | str | None = None
    # The 8-bit weight that the model stores, or the reason why its integers cannot be kept; None: not 8-bit.
    int8: StoredInt8 | str | None = None
    x_range: FixedRange | None = None  # range of a static QuantizeLinear of x in the model

    @property
    def name(self) -> str:
        """The node's name."""
        return node_name(self.node)

    @property
    def op(self) -> str:
        """The node's operator type, followed by "+Add" if an Add adds the bias."""
        return f"{self.node.op_type}+Add" if self.add else self.node.op_type

    @property
    def output(self) -> ir.Value:
        """The layer's output."""
        return (self.add or self.node).outputs[0]

    @property
    def weight(self) -> ir.TensorProtocol:
        """The weight as a MatMul or Gemm consumes it: [k, n], or [n, k] if transposed."""
        if is_matmul_nbits(self.node):
            stored = self.int8 if self.int4 is None else self.int4
            assert isinstance(stored, QuantizedWeight)
            return dequantized_tensor(stored, self.transposed, self.dtype)
        if stored_inputs(self.node) is not None:
            numbers = read_int8(self.node)
            assert isinstance(numbers, StoredInt8Tensors)
            return numbers.tensor(self.dtype)
        tensor = constant_tensor(self.weight_value)
        assert tensor is not None
        return tensor

    @property
    def weight_values(self) -> list[ir.Value]:
        """The node's inputs that make up the weight."""
        int8 = stored_inputs(self.node)
        indices = WEIGHT_INPUTS if is_matmul_nbits(self.node) else int8.weight if int8 is not None else (1,)
        inputs = [self.node.inputs[index] for index in indices if index < len(self.node.inputs)]
        return [value for value in inputs if value is not None]

    @property
    def stored_bytes(self) -> int:
        """Size of the stored weight in bytes."""
        return sum(stored_bytes(value) for value in self.weight_values)

    @property
    def stored_type(self) -> str:
        """Element type of the stored weight, before any Cast or DequantizeLinear."""
        for bits, stored in ((4, self.int4), (8, self.int8)):
            if isinstance(stored, QuantizedWeight) and stored.group_size is not None:
                return f"int{bits}, groups of {stored.group_size}"
        value = self.weight_value
        while (node := value.producer()) is not None and node.inputs and node.inputs[0] is not None:
            value = node.inputs[0]
        tensor = constant_tensor(value)
        return (tensor if tensor is not None else self.weight).dtype.name

    @property
    def stored_bits(self) -> int | None:
        """4 or 8 if the model stores the weight quantized, even if its integers cannot be kept; else None."""
        return 4 if self.int4 is not None else 8 if self.int8 is not None else None

    @property
    def why_not_stored(self) -> str | None:
        """Reason why the stored integers cannot be kept; None if they can, or if the model stores none."""
        for bits, stored in ((4, self.int4), (8, self.int8)):
            if isinstance(stored, str):
                return f"it is stored in {bits} bits, but {stored}"
        return None

    @property
    def weight_key(self) -> Hashable:
        """Key that is equal for layers that share one weight."""
        return tuple(map(constant_key, self.weight_values)), self.transposed

    @property
    def weight_names(self) -> list[str]:
        """Names of the weight's initializers."""
        return [value.name for value in constant_values(self.weight_value) if value.name]

    def matches(self, globs: tuple[str, ...]) -> bool:
        """Return whether the name of the node or of its weight matches one of the patterns."""
        return any_matches([self.name, *self.weight_names], globs)

    def is_chosen(self, select: tuple[str, ...], exclude: tuple[str, ...]) -> bool:
        """Return whether a pattern of `select` matches, and no pattern of `exclude`."""
        return self.matches(select) and not self.matches(exclude)

    def matrix(self) -> np.ndarray:
        """Return W as float32 [k, n], perhaps a read-only view of a mapped file: do not keep it."""
        return self.matrix_as_it_is()()

    def matrix_as_it_is(self) -> Callable[[], np.ndarray]:
        """Return a function that reads the present W [k, n], even after a pass has changed the layer's weight."""
        for stored in (self.int4, self.int8):
            if isinstance(stored, QuantizedWeight):
                return stored.matrix
        return partial(weight_matrix, self.weight, self.transposed)

    def bias(self) -> np.ndarray | None:
        """The bias as float32 [n]."""
        tensor = constant_tensor(self.bias_value)
        return None if tensor is None else np.broadcast_to(float_array(tensor).reshape(-1), (self.n,))


@dataclass(frozen=True, eq=False)
class NotLinear:
    """A node that multiplies by a matrix but is not a supported linear layer, with the reason."""

    node: ir.Node
    reason: str

    @property
    def name(self) -> str:
        """The node's name."""
        return node_name(self.node)


def weight_matrix(tensor: ir.TensorProtocol, transposed: bool) -> np.ndarray:
    """Return a weight as float32 [k, n], perhaps a read-only view of a mapped file: do not keep it."""
    array = float_array(tensor)
    return array.T if transposed else array


def op_name(node: ir.Node) -> str:
    """Return a node's operator type, with the domain unless it is the default one."""
    return node.op_type if node.domain in DEFAULT_DOMAINS else f"{node.domain}::{node.op_type}"


def node_name(node: ir.Node) -> str:
    """Return a node's name, or a description."""
    return node.name or f"{node.op_type} that makes {node.outputs[0].name!r}"


def find_linears(model: ir.Model) -> list[Linear | NotLinear]:
    """Return all matrix multiplications of the model in graph order, subgraphs (If, Loop, Scan) included."""
    found: list[Linear | NotLinear] = []
    for node in model.graph.all_nodes():
        if node.domain in DEFAULT_DOMAINS and node.op_type in ("MatMul", "Gemm") and len(node.inputs) > 1:
            found.append(_match(node))
        elif is_matmul_nbits(node):
            found.append(_match_nbits(node))
        elif stored_inputs(node) is not None and _holds_matrix(node):
            found.append(_match_int8(node))
        elif node.op_type in _OTHER_LINEAR_OPS and (_holds_matrix(node) or why_left(node)):
            reason = why_not(node) or why_left(node) or _OTHER_LINEAR_OPS[node.op_type]
            found.append(NotLinear(node, f"{op_name(node)}: {reason}"))
    return found


def count_stored(model: ir.Model) -> int:
    """Return the number of layers whose stored 4-bit or 8-bit weights can be kept exactly."""
    layers = sum(isinstance(one.int4, StoredInt4) or isinstance(one.int8, StoredInt8) for one in linears_in(model))
    return layers + sum(stores_int8(node) for node in model.graph.all_nodes()) + count_int8_layers(model)


def why_not_kept(model: ir.Model) -> dict[str, str]:
    """Return the reasons why stored 4-bit or 8-bit weights cannot be kept, by layer name."""
    found = {}
    for one in find_linears(model):
        if isinstance(one, NotLinear):
            if one.node.op_type in _STORING and _holds_matrix(one.node):
                found[one.name] = one.reason
        elif one.why_not_stored:
            found[one.name] = one.why_not_stored
    return found


def linears_in(model: ir.Model) -> Iterator[Linear]:
    """Yield the linear layers of a model."""
    return (found for found in find_linears(model) if isinstance(found, Linear))


def _match(node: ir.Node) -> Linear | NotLinear:
    x, weight_value = node.inputs[0], node.inputs[1]
    if x is None or weight_value is None:
        return NotLinear(node, _MISSING)
    weight = constant_tensor(weight_value)
    if weight is None:
        return NotLinear(node, _why_not_constant(node, weight_value))
    if len(weight.shape) != 2:
        return NotLinear(node, f"weight {weight_value.name!r} is {len(weight.shape)}-D, expected 2-D")
    if weight.dtype not in _ACTIVATION_TYPES:
        return NotLinear(node, f"weight {weight_value.name!r} is {weight.dtype.name}, expected FLOAT or FLOAT16")
    if constant_tensor(x) is not None:
        return NotLinear(node, "both inputs are constant")
    transposed = node.op_type == "Gemm" and _int_attribute(node, "transB", 0) == 1
    rows, columns = weight.shape.numpy()
    k, n = (columns, rows) if transposed else (rows, columns)
    if k == 0 or n == 0:
        return NotLinear(node, f"weight {weight_value.name!r} is empty: {k} x {n}")
    add, bias_value = None, None
    if node.op_type == "Gemm":
        bias_value = node.inputs[2] if len(node.inputs) > 2 else None
        reason = _why_not_plain_gemm(node, bias_value, n)
        if reason:
            return NotLinear(node, reason)
    else:
        add, bias_value = _bias_add(node, weight.dtype, n)
    int4, int8 = read_dequantized(weight_value, transposed), read_dequantized_int8(weight_value, transposed)
    if isinstance(int8, Malformed):
        return NotLinear(node, int8.reason)
    if int4 is None and not isinstance(int8, StoredInt8):
        wider = read_weight_only(weight_value, transposed)
        if isinstance(wider, StoredInt4):
            int4 = wider
        elif wider is not None:
            int8 = wider
    return Linear(
        node, add, x, weight_value, transposed, bias_value, k, n, weight.dtype, int4, int8, fixed_range(x)
    )  # fmt: skip


def _match_nbits(node: ir.Node) -> Linear | NotLinear:
    bits = node.attributes.get("bits")
    int8 = read_matmul_nbits_int8(node) if bits is not None and bits.value == 8 else None
    int4 = read_matmul_nbits(node) if int8 is None else None
    stored = int4 if int8 is None else int8
    if not isinstance(stored, QuantizedWeight):
        return NotLinear(node, f"{op_name(node)}: {stored}")
    x, weight_value, scales = node.inputs[0], node.inputs[1], constant_tensor(node.inputs[2])
    assert weight_value is not None and scales is not None  # checked by read_matmul_nbits
    if x is None:
        return NotLinear(node, _MISSING)
    if constant_tensor(x) is not None:
        return NotLinear(node, "both inputs are constant")
    k, n = stored.q.shape.numpy()
    bias_value = node.inputs[BIAS_INPUT] if len(node.inputs) > BIAS_INPUT else None
    if bias_value is None:
        add, bias_value = _bias_add(node, scales.dtype, n)
        return Linear(node, add, x, weight_value, False, bias_value, k, n, scales.dtype, int4, int8)
    bias = constant_tensor(bias_value)
    if bias is None:
        return NotLinear(node, f"bias {bias_value.name!r} is computed at run time")
    if list(bias.shape) != [n] or bias.dtype != scales.dtype:
        found = f"{bias.dtype.name} {list(bias.shape.numpy())}"
        return NotLinear(node, f"bias {bias_value.name!r} is {found}, expected {scales.dtype.name} [{n}]")
    return Linear(node, None, x, weight_value, False, bias_value, k, n, scales.dtype, int4, int8)


def _match_int8(node: ir.Node) -> Linear | NotLinear:
    """Read a DynamicQuantizeMatMul, or a MatMulIntegerToFloat after a DynamicQuantizeLinear."""
    reason, numbers = why_not(node), read_int8(node)
    if reason is not None or isinstance(numbers, str):
        return NotLinear(node, f"{op_name(node)}: {reason or numbers}")
    inputs, x = stored_inputs(node), layer_input(node)
    assert inputs is not None
    weight_value = node.inputs[inputs.codes]
    assert weight_value is not None  # checked by read_int8
    if x is None:
        fixed = node.op_type == MATMUL_INTEGER_TO_FLOAT and node.inputs[0] is not None
        return NotLinear(node, "its input has a fixed range; run the pass normalize first" if fixed else _MISSING)
    if constant_tensor(x) is not None:
        return NotLinear(node, "both inputs are constant")
    bias_value, add = node.inputs[inputs.bias] if len(node.inputs) > inputs.bias else None, None
    if bias_value is None:
        add, bias_value = _bias_add(node, ir.DataType.FLOAT, numbers.n)
    else:
        bias = constant_tensor(bias_value)
        if bias is None or list(bias.shape.numpy()) != [numbers.n] or bias.dtype != ir.DataType.FLOAT:
            return NotLinear(node, f"bias {bias_value.name!r} is not a FLOAT constant [{numbers.n}]")
    return Linear(
        node, add, x, weight_value, False, bias_value, numbers.k, numbers.n, ir.DataType.FLOAT, int8=numbers.stored()
    )


def _why_not_constant(node: ir.Node, weight_value: ir.Value) -> str:
    if weight_value.is_initializer():
        return (
            "its weight is also a graph input, so callers may replace it; export with keep_initializers_as_inputs=False"
        )
    made = why_not_computed(weight_value)
    if made is not None:
        return f"weight {weight_value.name!r} is computed by {made}; export the model with a stored weight"
    first = constant_tensor(node.inputs[0])
    if first is not None and len(first.shape) >= 2:
        if first.shape[-1] == 1:
            return "it is an outer product, such as rotary angles, not a linear layer"
        return "the constant weight is the first input (W x, not x W)"
    return "the second input is computed at run time (attention scores, or another product of activations)"


def _why_not_plain_gemm(node: ir.Node, bias_value: ir.Value | None, n: int) -> str | None:
    if _int_attribute(node, "transA", 0):
        return "transA is 1, expected 0"
    for name in ("alpha", "beta") if bias_value is not None else ("alpha",):
        number = node.attributes[name].as_float() if name in node.attributes else 1.0
        if number != 1.0:
            return f"{name} is {number:g}, expected 1"
    if bias_value is not None:
        bias = constant_tensor(bias_value)
        if bias is None:
            return f"bias {bias_value.name!r} is computed at run time"
        # A bias [n], [1, n] or with one element is the same for every row.
        shape = list(bias.shape.numpy())
        if shape not in ([n], [1, n], [], [1], [1, 1]):
            return f"bias {bias_value.name!r} has shape {shape}, expected [{n}]"
    return None


def _bias_add(node: ir.Node, dtype: ir.DataType, n: int) -> tuple[ir.Node | None, ir.Value | None]:
    """Return the Add of a constant bias [n] after a MatMul, and the bias, if the Add is the only consumer."""
    product = node.outputs[0]
    uses = list(product.uses())
    if product.is_graph_output() or len(uses) != 1:
        return None, None
    add = uses[0].node
    if add.op_type != "Add" or add.domain not in DEFAULT_DOMAINS or add.graph is not node.graph:
        return None, None
    bias_value = add.inputs[1 - uses[0].idx]
    bias = constant_tensor(bias_value)
    if bias is None or list(bias.shape) != [n] or bias.dtype != dtype:
        return None, None
    return add, bias_value


def _holds_matrix(node: ir.Node) -> bool:
    tensors = (constant_tensor(value) for value in node.inputs)
    return any(tensor is not None and len(tensor.shape) >= 2 for tensor in tensors)


def _int_attribute(node: ir.Node, name: str, default: int) -> int:
    return node.attributes[name].as_int() if name in node.attributes else default


def layer_key(layer: Linear | NotLinear) -> ir.Value:
    """Return the value that identifies a layer."""
    return layer.node.outputs[0]
