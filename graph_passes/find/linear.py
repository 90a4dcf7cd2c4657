"""Finds the linear layers of a model: y = x W + b with a constant W. Used by prune, calibrate, replace and inspect.

A MatMul or Gemm that is not a linear layer is reported with the reason, so that users see why it is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..options import any_matches
from ..weights.quantizers.fixed_range import FixedRange
from .constants import DEFAULT_DOMAINS, constant_key, constant_tensor, constant_values, float_array, stored_bytes
from .fused_attention import count_int8_layers
from .fused_forms import why_left
from .graph import native_linears
from .quantized_forms import is_unsupported_form, stored_layers
from .quantized_weight import QuantizedWeight, dequantized_tensor
from .stored_int4 import MATMUL_NBITS, WEIGHT_INPUTS, StoredInt4, is_matmul_nbits, read_blocks, read_dequantized
from .stored_int8 import (
    DYNAMIC_QUANTIZE_MATMUL,
    MATMUL_INTEGER_TO_FLOAT,
    StoredInt8,
    StoredInt8Tensors,
    read_int8,
    stored_inputs,
)
from .weight_only import read_blocks_int8, read_weight_only

# Fused operators with weights of linear layers, which fused_forms.py splits.
_FUSED = ("Attention", "QAttention", "FusedMatMul", "FusedGemm")
# Operators whose stored integers are lost if they become a NotLinear; why_not_kept reports these nodes.
_STORING = (MATMUL_NBITS, "MatMulBnb4", "MatMulFpQ4", MATMUL_INTEGER_TO_FLOAT, DYNAMIC_QUANTIZE_MATMUL, "QMoE")


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
    rounding: ir.Node | None = None  # the QuantizeLinear of this range whose dequantized output is x
    tensors: StoredInt8Tensors | None = None  # an 8-bit weight with a scale per column, as the model stores it

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
            assert self.tensors is not None
            return self.tensors.tensor(self.dtype)
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
    linears = native_linears(model)
    found: list[Linear | NotLinear] = []
    for node in model.graph.all_nodes():
        one, left = linears.get(node), why_left(node)
        if isinstance(one, _native.Linear):
            found.append(_linear(one))
        elif one is not None and not (left and one[2]):
            found.append(NotLinear(node, f"{op_name(node)}: {one[1]}" if one[2] else one[1]))
        elif left and (one is not None or node.op_type in _FUSED):
            found.append(NotLinear(node, f"{op_name(node)}: {left}"))
    return found


def count_stored(model: ir.Model) -> int:
    """Return the number of layers whose stored 4-bit or 8-bit weights can be kept exactly."""
    layers = sum(isinstance(one.int4, StoredInt4) or isinstance(one.int8, StoredInt8) for one in linears_in(model))
    return layers + len(stored_layers(model)) + count_int8_layers(model)


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


def _linear(found: _native.Linear) -> Linear | NotLinear:
    node, form = found.node, found.form
    int4: StoredInt4 | str | None = None
    int8: StoredInt8 | str | None = None
    tensors = None
    if is_unsupported_form(found):
        if node.op_type == MATMUL_INTEGER_TO_FLOAT:
            return NotLinear(node, "its input has a fixed range; run the pass normalize first")
        return NotLinear(node, f"{op_name(node)}: its weight is already quantized")
    if form == "blocks" and found.bits == 8:
        int8 = read_blocks_int8(found)
        if isinstance(int8, str):
            return NotLinear(node, f"{op_name(node)}: {int8}")
    elif form == "blocks":
        int4 = read_blocks(found)
    elif form == "int4":
        int4 = found.why_not_kept or read_dequantized(found)
    elif form == "int8" and not (int8 := found.why_not_kept):
        tensors = read_int8(found)
        int8 = tensors.stored()
    is_product = node.domain in DEFAULT_DOMAINS
    if is_product and int4 is None and not isinstance(int8, StoredInt8):
        wider = read_weight_only(found.weight, found.transposed)
        if isinstance(wider, StoredInt4):
            int4 = wider
        elif wider is not None:
            int8 = wider
    x_range, rounding = None, None
    if is_product and (given := found.x_range) is not None:
        x_range, rounding = FixedRange(np.float32(given[0]), np.uint8(given[1])), given[2]
    return Linear(
        node, found.add, found.x, found.weight, found.transposed, found.bias, found.k, found.n,
        ir.DataType(found.dtype), int4, int8, x_range, rounding, tensors,
    )  # fmt: skip


def _holds_matrix(node: ir.Node) -> bool:
    tensors = (constant_tensor(value) for value in node.inputs)
    return any(tensor is not None and len(tensor.shape) >= 2 for tensor in tensors)


def layer_key(layer: Linear | NotLinear) -> ir.Value:
    """Return the value that identifies a layer."""
    return layer.node.outputs[0]
