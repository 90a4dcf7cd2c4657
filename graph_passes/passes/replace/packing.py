"""Pack weights into constants of the model, and measure the operator's error on recorded inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import onnx_ir as ir

from ortolan.errors import VerificationError

from ...find.constants import constant_tensor
from ...find.epilogue import Epilogue
from ...find.linear import Linear, layer_key
from ...operators.hidden import HiddenLayer
from ...operators.joined import Halves, columns_of, join_columns
from ...operators.nodes import new_initializer
from ...operators.replacement import LayerWeight, Replacement, range_arrays, stored_tensor
from ...weights.quantizers.fixed_range import FixedRange
from ..context import PassContext


@dataclass(frozen=True, eq=False)
class Target:
    """The layers that become one node: a single layer or layers of one input side by side, with fused operators."""

    linears: Sequence[Linear]
    weight: LayerWeight  # weight of all layers
    epilogue: Epilogue
    hidden: HiddenLayer | None = None  # the hidden layer before it
    attention: ir.Node | None = None  # the attention that reads the three layers' outputs as one tensor
    halves: Halves | None = None  # gate and up halves of a single layer

    @property
    def gated_columns(self) -> int:
        """Return the columns of the gate, or 0."""
        if self.halves is not None:
            return self.linears[0].n // 2
        return self.linears[0].n if len(self.linears) == 2 else 0

    @property
    def replaced(self) -> list[Linear]:
        """Return all layers; the first one reads the node's input."""
        return [*self.linears] if self.hidden is None else [self.hidden.mlp.hidden, *self.linears]


class Packer:
    """Creates the constants of an operator's nodes.

    ONNX Runtime gives an operator only the constants of its own graph, so equal ones are shared within a graph.
    """

    def __init__(self, model: ir.Model, context: PassContext, replacement: Replacement) -> None:
        self._model = model
        self._context = context
        self._replacement = replacement
        self._packed: dict[tuple[Hashable, int], dict[str, ir.Value]] = {}
        self._ranges: dict[tuple[FixedRange, int], dict[str, ir.Value]] = {}

    @property
    def copies(self) -> int:
        """Return the number of packed weights that are stored again for another graph."""
        return len(self._packed) - len({weights for weights, _ in self._packed})

    def constants_of(self, target: Target) -> dict[str, ir.Value]:
        """Return the constants by the names of the operator's inputs, without the layer's bias."""
        first, x_range, norm = target.linears[0], target.weight.x_range, target.epilogue.norm
        constants = dict(self._pack(target.linears, target.weight, target.halves))
        if target.hidden is not None:
            constants |= self._pack_hidden(target.hidden)
        elif x_range is not None:
            constants |= self._range_inputs(first, x_range)
        return constants if norm is None else constants | self._constants(first, norm.arrays())

    def bias(self, linears: Sequence[Linear], halves: Halves | None = None) -> ir.Value | None:
        """Return the bias as a float32 initializer over the weight's columns; the model's own if possible."""
        first, biases = linears[0], [linear.bias() for linear in linears]
        if all(bias is None for bias in biases):
            return None
        value, tensor = first.bias_value, constant_tensor(first.bias_value)
        if (
            len(linears) == 1
            and (halves is None or halves.in_place)
            and value is not None
            and tensor is not None
            and value.is_initializer()
            and tensor.dtype == ir.DataType.FLOAT
            and list(tensor.shape) == [first.n]
        ):
            return value
        arrays = [
            np.zeros(linear.n, np.float32) if bias is None else np.array(bias, np.float32)
            for linear, bias in zip(linears, biases, strict=True)
        ]
        parts = arrays if halves is None else [arrays[0][where] for where in halves.columns]
        return self._constants(first, {"bias": join_columns(parts)})["bias"]

    def _pack(
        self, linears: Sequence[Linear], weight: LayerWeight, halves: Halves | None = None
    ) -> dict[str, ir.Value]:
        """Return the packed weight, once for layers that share it."""
        context, first = self._context, linears[0]
        for linear in linears:
            context.layers.rounding[layer_key(linear)] = self._replacement.typical_rounding(weight.quantized)
        order = None if halves is None else halves.columns[0].start
        key = ((*(linear.weight_key for linear in linears), order), id(first.node.graph))
        if key not in self._packed:
            values = {}
            for part, tensor in self._replacement.pack(weight).items():
                name = context.new_name(self._model, f"{first.weight_value.name}.{part}")
                values[part] = new_initializer(_graph(first), stored_tensor(context.spill, name, tensor))
            self._packed[key] = values
            context.layers.packed_weights += weight.matrix.size
        packed = self._packed[key]
        bounds = columns_of([linear.n for linear in linears]) if halves is None else [halves.packed_columns()]
        measure_packed(context, self._replacement, linears, weight, packed, bounds)
        tensors = {part: value.const_value for part, value in packed.items() if value.const_value is not None}
        storage = self._replacement.storage_of(tensors)
        for linear in linears:
            layer = context.layer(linear)
            layer.bytes_after = sum(tensor.nbytes for tensor in tensors.values()) // len(linears)
            layer.storage = storage
        return packed

    def _pack_hidden(self, hidden: HiddenLayer) -> dict[str, ir.Value]:
        first, table = hidden.mlp.hidden, hidden.table
        assert hidden.weight.x_range is not None
        constants = {f"hidden_{name}": value for name, value in self._pack([first], hidden.weight).items()}
        bias = self.bias([first])
        arrays = {"table": table.table, **range_arrays("table_x", table.x), **range_arrays("table_y", table.y)}
        if bias is None:
            arrays["hidden_bias"] = np.zeros(first.n, np.float32)
        else:
            constants["hidden_bias"] = bias
        constants |= self._constants(first, arrays)
        return constants | self._range_inputs(first, hidden.weight.x_range)

    def _constants(self, linear: Linear, arrays: Mapping[str, np.ndarray]) -> dict[str, ir.Value]:
        names = {part: self._context.new_name(self._model, f"{linear.name}.{part}") for part in arrays}
        return {
            part: new_initializer(_graph(linear), ir.Tensor(array, name=names[part])) for part, array in arrays.items()
        }

    def _range_inputs(self, linear: Linear, chosen: FixedRange) -> dict[str, ir.Value]:
        """Return the range of the layer's input as constants of its graph, shared by equal ranges."""
        key = (chosen, id(linear.node.graph))
        if key not in self._ranges:
            self._ranges[key] = self._constants(linear, range_arrays("x", chosen))
        return self._ranges[key]


def measure_packed(
    context: PassContext,
    replacement: Replacement,
    linears: Sequence[Linear],
    weight: LayerWeight,
    values: Mapping[str, ir.Value],
    bounds: Sequence[slice | np.ndarray],
) -> None:
    """Report ||XW - Y|| / ||XW|| for recorded inputs X, the original weight W and the operator's output Y.

    weight: the weight that was packed. values: its constants. bounds: its columns, for each layer.

    Raises:
        VerificationError: Y differs by more than rounding from the product with the packed weight.
    """
    given = context.layers.captured.get(layer_key(linears[0]))
    originals = [context.layers.originals.get(layer_key(linear)) for linear in linears]
    if given is None or None in originals:
        return
    if any(weight.quantized is one for one in context.given.values()):
        originals = [None] * len(linears)  # the packed weight is the original: no need to compute it again
    packed = {part: value.const_value for part, value in values.items() if value.const_value is not None}

    def measure() -> list[tuple[float, float | None]]:
        return _deviations(replacement, weight, packed, given, originals, bounds, linears[0].name)

    # Cached, because trials of a search often contain the same packed weight.
    digest = blake2b()
    for part, tensor in sorted(packed.items()):
        digest.update(part.encode() + tensor.tobytes())
    digest.update(repr((weight.x_threshold, weight.x_range)).encode())
    key = ("packed", type(replacement), *(linear.name for linear in linears), len(given), digest.digest())
    for linear, (rounding, error) in zip(linears, context.evidence.remembered(key, measure), strict=True):
        context.layers.rounding[layer_key(linear)] = max(context.layers.rounding[layer_key(linear)], rounding)
        context.layer(linear).output_error = error


def _deviations(
    replacement: Replacement,
    weight: LayerWeight,
    packed: Mapping[str, ir.TensorProtocol],
    given: np.ndarray,
    originals: Sequence[Callable[[], np.ndarray] | None],
    columns: Sequence[slice | np.ndarray],
    name: str,
) -> list[tuple[float, float | None]]:
    """Return for each layer ||XW - Y|| / ||XW|| with the packed weight W, and with the original; None: the same one."""
    x = given
    if weight.x_threshold:
        x = np.where(np.abs(given) <= np.float32(weight.x_threshold), np.float32(0), given)
    found = replacement.run(x, packed, weight)
    product = x @ weight.matrix
    if (np.abs(found - product) > replacement.rounding_bound(x, weight)).any():
        raise VerificationError(
            f"layer {name!r} with its packed weight differs from the float product by more than rounding explains; "
            "nothing was saved; please report this, and exclude the layer from replacement meanwhile"
        )
    deviations = []
    for original, where in zip(originals, columns, strict=True):
        y, xw = found[..., where], product[..., where]
        exact = xw if original is None else given @ original()
        deviations.append((_relative(y - xw, xw) or 0.0, _relative(exact - y, exact)))
    return deviations


def _relative(difference: np.ndarray, of: np.ndarray) -> float | None:
    norm = float(np.linalg.norm(of))
    return float(np.linalg.norm(difference)) / norm if norm else None


def _graph(linear: Linear) -> ir.Graph:
    assert linear.node.graph is not None
    return linear.node.graph
