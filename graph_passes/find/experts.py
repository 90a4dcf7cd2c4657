"""Reads mixtures of experts: the operators QMoE and MoE of ONNX Runtime's CPU provider.

Both route a row to the k experts with the largest router logits, and compute, with weights of each expert,

    Y = sum over the selected experts of p fc2(activation(fc1(X)))

QMoE stores integers, which are kept exactly; MoE stores floats. A model is untrusted: types and shapes are checked.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .constants import float_array, lazy
from .epilogue import Activation
from .fused_writer import real_number
from .linear import Linear
from .node_checks import MICROSOFT_DOMAIN, UnfitError, constant_input, expect, integer_attribute, makers, node_input
from .quantized_weight import MAX_INPUTS, QuantizedWeight, too_wide
from .stored_int4 import blocks_of, group_size_of, spread_blocks

QMOE, MOE = "QMoE", "MoE"
# Key in node.meta of a MoE: functions that read the weight [k, n] of each expert, for both layers.
WEIGHTS_BY_EXPERT = "ortolan.weights_by_expert"

_ACTIVATIONS = {
    "relu": Activation.RELU,
    "gelu": Activation.GELU_TANH,
    "silu": Activation.SILU,
    "swiglu": Activation.SILU,
    "identity": Activation.NONE,
}
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16)
_BYTES = (ir.DataType.UINT8,)
_ATTRIBUTES = (
    "accuracy_level", "activation_alpha", "activation_beta", "activation_type", "block_size", "expert_weight_bits",
    "fc1_expert_weight_bits", "fc2_expert_weight_bits", "k", "normalize_routing_weights", "quant_type",
    "swiglu_fusion", "swiglu_limit",
)  # fmt: skip
# Attributes that must be 0 or missing.
_UNSUPPORTED = ("swiglu_limit_after_activation", "use_sparse_mixer", "weights_prepacked")


@dataclass(frozen=True)
class ExpertsForm:
    """The formula of a mixture of experts, without its weights (ops/moe/plan.h)."""

    count: int
    hidden: int
    inner: int
    activation: Activation
    gated: bool
    alpha: float = 1.0
    beta: float = 0.0
    limit: float = float("inf")


@dataclass(frozen=True, eq=False)
class ExpertsLayer:
    """One layer of all experts.

    Attributes:
        k: Inputs.
        weights: The weight of each expert, read when it is called: integers, or float32 [k, n].
        bias: float32 [experts, n], or None.
        halves: The columns of the gate and of the factor, or None.
        nbytes: The size of the stored tensors.
    """

    k: int
    weights: list[Callable[[], QuantizedWeight | np.ndarray]]
    bias: np.ndarray | None
    halves: tuple[slice, slice] | None
    nbytes: int


@dataclass(frozen=True, eq=False)
class GivenExperts:
    """Quantized weights of one layer of all experts, given with the model.

    Attributes:
        weights: The weight of each expert.
        nbytes: The size of the tensors that they were read from.
    """

    weights: Sequence[QuantizedWeight]
    nbytes: int

    def of(self, layer: ExpertsLayer) -> ExpertsLayer:
        """Return the layer with these weights instead of its floats."""
        return dataclasses.replace(layer, weights=[lambda w=w: w for w in self.weights], nbytes=self.nbytes)  # type: ignore[misc]


@dataclass(frozen=True, eq=False)
class Experts:
    """A node that is a mixture of experts."""

    node: ir.Node
    form: ExpertsForm
    selected: int  # experts of a row
    normalizes: bool  # weights of the selected experts sum to 1
    up: ExpertsLayer
    down: ExpertsLayer


def expert_nodes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the QMoE and MoE nodes of a model, including those in subgraphs."""
    for node in model.graph.all_nodes():
        if node.domain == MICROSOFT_DOMAIN and node.op_type in (QMOE, MOE):
            yield node


def count_stored_experts(model: ir.Model) -> int:
    """Return the number of QMoE nodes whose integers can be kept exactly."""
    count = 0
    for node in expert_nodes(model):
        with suppress(UnfitError):
            count += node.op_type == QMOE and bool(read_experts(node))
    return count


def router_layers(model: ir.Model, linears: Sequence[Linear]) -> list[Linear]:
    """Return the layers with float weights that select the experts of a supported QMoE or MoE node."""
    nodes = set[ir.Node]()
    for node in expert_nodes(model):
        logits = node_input(node, 1)
        with suppress(UnfitError):
            if logits is not None and read_experts(node):
                nodes.update(makers(logits, ("Reshape", "Cast", "Identity")))
    return [one for one in linears if (one.add or one.node) in nodes and one.int4 is None and one.int8 is None]


def stored_bits(node: ir.Node) -> tuple[int, int]:
    """Return the bits of both layers of a QMoE."""
    both = integer_attribute(node, "expert_weight_bits", 4)
    first, second = (integer_attribute(node, f"{layer}_expert_weight_bits", 0) for layer in ("fc1", "fc2"))
    return first if first > 0 else both, second if second > 0 else both


def read_experts(node: ir.Node) -> Experts:
    """Read a QMoE or MoE node.

    Raises:
        UnfitError: The node has a form that Ortolan's operator does not support; the message is the reason.
    """
    for name in node.attributes:
        expect(name in (*_ATTRIBUTES, *_UNSUPPORTED), f"its attribute {name!r} is not supported")
    for name in _UNSUPPORTED:
        found = integer_attribute(node, name, 0)
        expect(found == 0, f"its attribute {name!r} is {found}, which is not supported")
    kind = _text(node, "activation_type", "relu")
    expect(kind in _ACTIVATIONS, f"its activation_type is {kind!r}, expected {', '.join(_ACTIVATIONS)}")
    expect(_text(node, "quant_type", "int") == "int", f"its quant_type is {_text(node, 'quant_type', 'int')!r}")
    return _read_quantized(node, kind) if node.op_type == QMOE else _read_floats(node, kind)


def _read_floats(node: ir.Node, kind: str) -> Experts:
    expect(node_input(node, 6) is None and node_input(node, 7) is None, "it has a third layer (fc3)")
    up, down = (constant_input(node, index, f"fc{index // 2}", _FLOATS) for index in (2, 4))
    form, halves = _form(node, kind, tuple(up.shape.numpy()), tuple(down.shape.numpy()))

    separate = node.meta.get(WEIGHTS_BY_EXPERT, (None, None))

    def layer(
        tensor: ir.TensorProtocol,
        bias: int,
        halves: tuple[slice, slice] | None,
        readers: list[Callable[[], np.ndarray]] | None,
    ) -> ExpertsLayer:
        def of_expert(e: int) -> Callable[[], np.ndarray]:
            return lambda: np.ascontiguousarray(tensor.numpy()[e].astype(np.float32).T)

        n, k = tensor.shape.numpy()[1:]
        weights = readers or map(of_expert, range(form.count))
        return ExpertsLayer(k, [*weights], _bias(node, bias, form.count, n), halves, tensor.nbytes)

    normalizes = bool(integer_attribute(node, "normalize_routing_weights", 0))
    first, second = layer(up, 3, halves, separate[0]), layer(down, 5, None, separate[1])
    return Experts(node, form, _selected(node, form), normalizes, first, second)


def _read_quantized(node: ir.Node, kind: str) -> Experts:
    expect(all(node_input(node, index) is None for index in (8, 9, 10, 13)), "it has a third layer (fc3)")
    expect(all(one is None for one in node.inputs[15:]), "it has scales of activations or of whole weights")
    bits = stored_bits(node)
    shapes = []
    for index, name, width in zip((2, 5), ("fc1", "fc2"), bits, strict=True):
        expect(width in (4, 8), f"{name} has {width} bits, expected 4 or 8")
        *leading, size = constant_input(node, index, f"weights of {name}", _BYTES).shape.numpy()
        shapes.append((*leading, size * 8 // width))
    form, halves = _form(node, kind, *shapes)

    def layer(first: int, zero_points: int, k: int, n: int, halves: tuple[slice, slice] | None) -> ExpertsLayer:
        weights = _stored_layer(node, bits[first // 5], first, zero_points, form.count, k, n)
        tensors = [constant_input(node, index, "weights", (*_BYTES, *_FLOATS)) for index in (first, first + 1)]
        nbytes = sum(tensor.nbytes for tensor in tensors)
        return ExpertsLayer(k, weights, _bias(node, first + 2, form.count, n), halves, nbytes)

    up_layer = layer(2, 11, form.hidden, form.inner * (2 if form.gated else 1), halves)
    # The CPU's QMoE always normalizes, unless it is given the weights.
    normalizes = node_input(node, 14) is None or bool(integer_attribute(node, "normalize_routing_weights", 0))
    down_layer = layer(5, 12, form.inner, form.hidden, None)
    return Experts(node, form, _selected(node, form), normalizes, up_layer, down_layer)


def _form(
    node: ir.Node, kind: str, up: tuple[int, ...], down: tuple[int, ...]
) -> tuple[ExpertsForm, tuple[slice, slice] | None]:
    """Return the form from the shapes [experts, n, k] of both weights, and the columns of gate and factor."""
    expect(len(up) == 3 and len(down) == 3, f"its weights have shapes {list(up)} and {list(down)}, expected 3-D")
    fusion = integer_attribute(node, "swiglu_fusion", 0)
    gated = kind == "swiglu"
    expect(gated == (fusion in (1, 2)), f"its swiglu_fusion is {fusion} with activation_type {kind!r}")
    count, n, hidden = up
    inner = n // 2 if gated else n
    expected = (count, hidden, inner)
    fits = min(up) > 0 and down == expected and (not gated or n % 2 == 0)
    expect(fits, f"its weights have shapes {list(up)} and {list(down)}, expected {list(expected)} for the second")
    for k in (hidden, inner):
        expect(k <= MAX_INPUTS, too_wide(k))
    halves = None
    if gated:
        halves = (slice(0, n, 2), slice(1, n, 2)) if fusion == 1 else (slice(0, inner), slice(inner, n))
    form = ExpertsForm(count, hidden, inner, _ACTIVATIONS[kind], gated)
    if not gated:
        return form, halves
    alpha, beta = real_number(node, "activation_alpha", 1.0), real_number(node, "activation_beta", 0.0)
    limit = real_number(node, "swiglu_limit", form.limit)
    expect(0 < alpha < np.inf and abs(beta) < np.inf and limit > 0,
           f"its activation_alpha, activation_beta and swiglu_limit are {alpha}, {beta} and {limit}")  # fmt: skip
    return dataclasses.replace(form, alpha=alpha, beta=beta, limit=limit), halves


def _selected(node: ir.Node, form: ExpertsForm) -> int:
    k = integer_attribute(node, "k", 1)
    expect(1 <= k <= form.count, f"its k is {k}, expected 1 to {form.count}")
    return k


def _bias(node: ir.Node, index: int, count: int, n: int) -> np.ndarray | None:
    if node_input(node, index) is None:
        return None
    return float_array(constant_input(node, index, "bias", _FLOATS, (count, n)))


def _stored_layer(
    node: ir.Node, bits: int, first: int, zero_points: int, count: int, k: int, n: int
) -> list[Callable[[], QuantizedWeight | np.ndarray]]:
    """Return the stored weight of each expert: codes [experts, n, k * bits / 8], scales [experts, n, blocks]."""
    block = integer_attribute(node, "block_size", 0) or k
    expect(block > 0, f"its block_size is {block}")
    blocks = -(-k // block)
    shapes = [(count, n, blocks), *([(count, n)] if blocks == 1 else [])]
    codes = constant_input(node, first, "weights", _BYTES, (count, n, k * bits // 8))
    expect(k * bits % 8 == 0, f"it has {k} inputs, expected an even number")
    scales = constant_input(node, first + 1, "scales", _FLOATS, *shapes)
    points = None
    if node_input(node, zero_points) is not None:
        expect(bits == 4, "it has zero points of 8 bits")
        expect(blocks > 1, "it has one zero point for each column")
        points = constant_input(node, zero_points, "zero points", _BYTES, (count, n, -(-blocks // 2)))
    group = group_size_of(k, block)

    def one(tensor: ir.TensorProtocol, e: int) -> ir.LazyTensor:
        shape = ir.Shape(tensor.shape.numpy()[1:])
        return lazy(lambda: np.asarray(tensor.numpy()[e]), tensor.dtype, shape, tensor.name)

    def read(e: int) -> QuantizedWeight:
        if bits == 4:
            found = blocks_of(k, n, block, one(codes, e), one(scales, e), None if points is None else one(points, e))
            found.check_scales()
            return found
        q = (codes.numpy()[e].reshape(n, k) ^ np.uint8(128)).view(np.int8).T
        by_block = np.asarray(scales.numpy()[e]).reshape(n, blocks).T
        by_group = np.ascontiguousarray(spread_blocks(by_block, blocks, block, group, k))
        return QuantizedWeight(8, group, ir.tensor(np.ascontiguousarray(q)), ir.tensor(by_group))

    return [lambda e=e: read(e) for e in range(count)]  # type: ignore[misc]


def _text(node: ir.Node, name: str, default: str) -> str:
    attr = node.attributes.get(name)
    if attr is None:
        return default
    if attr.type != ir.AttributeType.STRING or attr.is_ref():
        raise UnfitError(f"its attribute {name!r} is not a string")
    return attr.as_string()
