"""Scale the inputs of layers (AWQ): multiply the layers' weights by a scale per input, and divide the inputs by it.

The division is folded into constants: the weight (and bias) of a LayerNorm or RMSNorm, as one node or as Mul and Add,
or the output columns of a linear layer. Between these and the scaled layers may be operators that commute with a
positive scale: Relu, Identity, one side of a Mul (down_proj reads gate * up, so up_proj divides), the numerator of a
Div. All consumers of the value must be scaled layers. The model's result stays the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ...find.constants import DEFAULT_DOMAINS, constant_tensor, float_array, lazy, remove_unused
from ...find.linear import Linear, layer_key, linears_in, op_name
from ...measure.recorder import InputRecorder
from ...operators.nodes import new_initializer
from ...operators.sparse_amx_matmul_storage import stored_in
from ...weights.quantizers.awq import search_scales
from ...weights.quantizers.grid import Quantization
from ..context import PassContext
from ..weight_groups import WeightGroup

# Indices of the norm's inputs that scale its channels and add to them.
_NORMS = {
    "LayerNormalization": (1, 2),
    "RMSNormalization": (1,),
    "SimplifiedLayerNormalization": (1,),
    "SkipLayerNormalization": (2, 3),
    "SkipSimplifiedLayerNormalization": (2,),
}
_ROWS = 512  # input rows on which scales are searched
_BATCH_BYTES = 256 * 1024**2  # recorded inputs kept in memory at a time


@dataclass(frozen=True)
class Division:
    """A constant to divide along its last axis, or its first axis (a transposed weight)."""

    node: ir.Node
    index: int  # index of the node's input
    first_axis: bool = False
    linear: Linear | None = None  # the layer, if the constant is its weight


@dataclass
class _Site:
    """A value, the layers that read it, and the constants to divide."""

    value: ir.Value
    groups: list[WeightGroup]
    divisions: list[Division]

    @property
    def k(self) -> int:
        return self.groups[0].linears[0].k


def scale_inputs(
    model: ir.Model,
    context: PassContext,
    groups: Sequence[WeightGroup],
    recorder: InputRecorder,
    quantization: Quantization,
) -> None:
    """Scale the inputs of these groups where that reduces the quantization error, and fold the scales."""
    # Weights that are quantized already are not scaled.
    linears = {linear.output: linear for linear in linears_in(model) if context.layer(linear).weight_bits is None}
    by_value: dict[ir.Value, list[WeightGroup]] = {}
    for group in groups:
        by_value.setdefault(group.linears[0].x, []).append(group)
    sites, refused = [], dict[str, list[str]]()
    for value, takers in by_value.items():
        found = _why_not(context, value, takers, recorder) or _find_divisions(value, takers, linears)
        if isinstance(found, str):
            refused.setdefault(found, []).extend(group.linears[0].name for group in takers)
        else:
            sites.append(_Site(value, takers, found))
    done = 0
    for batch in _batches(sites):
        names = [site.value.name or "" for site in batch]
        rows = recorder.some_rows(names, _ROWS, context.telling(Stage.CALIBRATE))
        for site in batch:
            context.progress(Stage.SCALE, done, len(sites))
            done += 1
            _scale(model, context, site, rows[site.value.name or ""], quantization)
            context.release()
    context.progress(Stage.SCALE, done, len(sites))
    for reason, names in refused.items():
        layers = f"{len(names)} layers, such as {names[0]!r}," if len(names) > 1 else f"layer {names[0]!r}"
        context.note(f"the inputs of {layers} are not scaled: {reason}")


def _batches(sites: Sequence[_Site]) -> Iterator[list[_Site]]:
    batch: list[_Site] = []
    size = 0
    for site in sites:
        needed = 4 * _ROWS * site.k
        if batch and size + needed > _BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(site)
        size += needed
    if batch:
        yield batch


def _why_not(
    context: PassContext, value: ir.Value, groups: Sequence[WeightGroup], recorder: InputRecorder
) -> str | None:
    if value.name not in recorder.names:
        return "they are inside a subgraph, where they cannot be recorded"
    for group in groups:
        if any(linear.x is not value for linear in group.linears):
            return "layers with other inputs share the weight"
        stored = stored_in(group.linears[0].matrix())
        if not all(context.gains(linear, stored) for linear in group.linears):
            return "a layer that reads them is not replaced"
        context.release()
    return None


def _find_divisions(
    value: ir.Value, groups: Sequence[WeightGroup], linears: dict[ir.Value, Linear]
) -> list[Division] | str:
    """Return the constants to divide so that only these layers see scaled inputs, or why that is impossible."""
    first = groups[0].linears[0]
    takers = {linear.node for group in groups for linear in group.linears}
    return _search(value, takers, first.k, linears)


def _search(value: ir.Value, takers: set[ir.Node], k: int, linears: dict[ir.Value, Linear]) -> list[Division] | str:
    if value.is_graph_output():
        return "they are an output of the model, or computed from one"
    for taker in value.consumers():
        if taker not in takers:
            return f"they, or a value they are computed from, are also read by {op_name(taker)}"
    node = value.producer()
    if node is None:
        return "they are computed from an input of the model"
    if value in linears:
        return _of_linear(linears[value], k)
    if node.op_type in _NORMS and value is node.outputs[0]:
        return _of_norm(node, k)
    if node.domain not in DEFAULT_DOMAINS:
        return _made_by(node)
    inputs = [source for source in node.inputs if source is not None]
    if node.op_type in ("Relu", "Identity", "Div"):
        return _search(inputs[0], {node}, k, linears) if inputs[0] not in inputs[1:] else _made_by(node)
    if node.op_type not in ("Mul", "Add") or inputs[0] is inputs[1]:
        return _made_by(node)
    constants = [constant_tensor(source) for source in inputs]
    if node.op_type == "Add":
        if (constants[0] is None) == (constants[1] is None):
            return _made_by(node)
        index = 0 if constants[0] is not None else 1
        if not _is_vector(constants[index], k):
            return _made_by(node)
        found = _search(inputs[1 - index], {node}, k, linears)
        return found if isinstance(found, str) else [*found, Division(node, index)]
    for index, tensor in enumerate(constants):
        if _is_vector(tensor, k):
            return [Division(node, index)]
    reason = ""
    for source, tensor in zip(inputs, constants, strict=True):
        if tensor is None:
            found = _search(source, {node}, k, linears)
            if not isinstance(found, str):
                return found
            reason = found
    return reason or _made_by(node)


def _of_linear(linear: Linear, k: int) -> list[Division] | str:
    if linear.n != k:
        return _made_by(linear.node)
    if linear.int4 is not None or linear.int8 is not None:
        return f"the weight of the layer that computes them is stored in {4 if linear.int4 is not None else 8} bits"
    if len(list(linear.weight_value.uses())) > 1:
        return "the weight of the layer that computes them has other consumers"
    divisions = [Division(linear.node, 1, first_axis=linear.transposed, linear=linear)]
    if linear.bias_value is not None:
        node = linear.add or linear.node
        divisions.append(Division(node, list(node.inputs).index(linear.bias_value)))
    return divisions


def _of_norm(node: ir.Node, k: int) -> list[Division] | str:
    divisions = []
    for index in _NORMS[node.op_type]:
        value = node.inputs[index] if index < len(node.inputs) else None
        if value is None and index != _NORMS[node.op_type][0]:  # no bias
            continue
        if not _is_vector(constant_tensor(value), k):
            return f"the weight of {op_name(node)} is not a constant with one value per channel"
        divisions.append(Division(node, index))
    return divisions


def _is_vector(tensor: ir.TensorProtocol | None, k: int) -> bool:
    if tensor is None:
        return False
    shape = list(tensor.shape.numpy())
    return bool(shape) and shape[-1] == k and tensor.size == k


def _made_by(node: ir.Node) -> str:
    return f"they are computed by {op_name(node)}, into which a scale cannot be folded"


def _scale(model: ir.Model, context: PassContext, site: _Site, rows: np.ndarray, quantization: Quantization) -> None:
    """Search the scales of one value, and fold them if they reduce the error."""
    matrices = [np.array(group.linears[0].matrix()) for group in site.groups]
    scales, scaled_error, plain_error = search_scales(rows, matrices, quantization)
    del matrices
    if not scaled_error < plain_error:
        return
    for division in site.divisions:
        _divide(model, context, division, scales)
        if division.linear is not None:
            key = layer_key(division.linear)
            context.layers.originals[key] = _product(context.layers.originals[key], 1 / scales[None, :])
    for group in site.groups:
        first = group.linears[0]
        factors = scales if first.transposed else scales[:, None]
        group.put(model, context, _scaled(first.weight, factors), "quantized")
        for linear in group.linears:
            key = layer_key(linear)
            context.layers.originals[key] = _product(context.layers.originals[key], scales[:, None])
            if key in context.layers.captured:
                context.layers.captured[key] = context.layers.captured[key] / scales


def _divide(model: ir.Model, context: PassContext, division: Division, scales: np.ndarray) -> None:
    """Divide the constant in place, or a copy if it has other consumers."""
    value = division.node.inputs[division.index]
    assert value is not None
    old = constant_tensor(value)
    assert old is not None
    tensor = _scaled(old, 1 / (scales[:, None] if division.first_axis else scales))
    if value.is_initializer() and len(list(value.uses())) == 1 and not value.is_graph_output():
        tensor.name = value.name
        value.const_value = tensor
        value.shape = ir.Shape(tensor.shape.numpy())
        return
    tensor.name = context.new_name(model, f"{value.name}_scaled")
    division.node.replace_input_with(division.index, new_initializer(model.graph, tensor))
    remove_unused(value)


def _scaled(tensor: ir.TensorProtocol, factors: np.ndarray) -> ir.LazyTensor:
    """Return the tensor times the factors, in its own type. A scalar becomes a vector."""
    shape = np.broadcast_shapes(tuple(tensor.shape.numpy()), factors.shape)
    return lazy(
        lambda: (float_array(tensor) * factors).astype(tensor.dtype.numpy()), tensor.dtype, ir.Shape(list(shape))
    )


def _product(matrix: Callable[[], np.ndarray], factors: np.ndarray) -> Callable[[], np.ndarray]:
    return lambda: matrix() * factors
