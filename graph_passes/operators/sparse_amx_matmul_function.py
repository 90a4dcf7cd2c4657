"""SparseAMXMatMul as an ONNX function: the operator's specification, and the fallback without Ortolan's library.

The function uses only operators whose meaning has not changed since opset 13 (except ReduceMax). It supports any k, n
and rank of X. The weight formats are specified in ops/formats/bitmap.h and two_four.h.

A function can read its node's attributes, but cannot test which inputs are present or their types. So it contains the
variants that the layers of one model use (Uses). If layers use different variants, every node computes all of them, and
selects the result by an attribute, or for storages by the sizes of masks and offsets. Unused variants must not fail:
indices are clipped, and types cast.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from .function_body import PANEL_COLUMNS, FunctionBody
from .linear_function import NORM_INPUTS, LayerUses, end_of_layer, linear_function, rows_of_product

OP_TYPE = "SparseAMXMatMul"
INPUTS = ("X", "masks", "values", "offsets", "bias", "residual", "scales", *NORM_INPUTS, "zero_points")
ATTRIBUTES = ("k", "n", "format_version", "weight_bits", "group_size", "activation", "gated_columns", "x_zero_points")

# As in ops/formats/bitmap.h.
TILE_ROWS = 16
INT4_BIAS = 8

# 2:4 storage (ops/formats/two_four.h) holds two weights of each quad of inputs. A span is 8 quads of 16 columns.
QUAD = 4
QUAD_STORED = 2
_SPAN_QUADS = 8
_SPAN_BYTES = 64  # bytes of a span's masks
_SPAN_SLOTS = _SPAN_QUADS * PANEL_COLUMNS * QUAD_STORED

_SMALLEST_MAXIMUM = 2.0**-100  # least max|x|, and least half range; equals the constant in ops/matmul/bitmap_weight.h


def row_inputs(weight_bits: int) -> int:
    """Return how many inputs of each column are stored in one row of a tile."""
    return 2 if weight_bits == 16 else 4


@dataclass(frozen=True)
class Uses(LayerUses):
    """The features that the SparseAMXMatMul nodes of a model use.

    Attributes:
        weight_bits: Values of the attribute.
        dense: Some layers use dense storage.
        bitmap: Some layers use bitmap storage.
        two_four: Some layers use 2:4 storage.
        x_zero_points: Values of the attribute of nodes with int8 weights.
        zero_points: Some nodes have this input.
    """

    weight_bits: frozenset[int] = frozenset({16})
    dense: bool = False
    bitmap: bool = True
    two_four: bool = False
    x_zero_points: frozenset[int] = frozenset({0})
    zero_points: bool = False

    @property
    def differ(self) -> bool:
        """True if some layers use 2:4 storage and others do not."""
        return self.two_four and (self.bitmap or self.dense)


def sparse_amx_matmul_function(opset: int, uses: Uses, unpack_once: bool = True) -> ir.Function:
    """Return the function for a model of this opset.

    Args:
        opset: The model's opset.
        uses: The features that the model's nodes use.
        unpack_once: Unpack from constants alone, so that ONNX Runtime folds the unpacking when it creates the session.
            It keeps all intermediate results, at least 37 bytes per weight. False: the unpacking has X as an input
            without effect, so that each run unpacks layer by layer.
    """
    last = INPUTS[-1] if uses.zero_points else NORM_INPUTS[-1] if uses.norm else "scales"
    inputs = {name: ir.val(name) for name in INPUTS[: INPUTS.index(last) + 1]}
    body = FunctionBody(opset)
    k, n = body.attribute("k"), body.attribute("n")
    weight = _Weight(body, inputs, uses, k, n, None if unpack_once else inputs["X"]).matrix()
    product = _product(body, rows_of_product(body, inputs["X"], uses), weight, uses)
    y = end_of_layer(body, product, inputs, uses)
    return linear_function(OP_TYPE, opset, body, inputs, y, ATTRIBUTES, uses)


def unpacked_bitmap(
    body: FunctionBody,
    masks: ir.Value,
    values: ir.Value,
    k: ir.Value,
    n: ir.Value,
    dense: bool,
    seems_to_depend_on: ir.Value | None,
) -> ir.Value:
    """Return a bf16 bitmap as float32 [k, n]. dense: dense storage is possible. seems_to_depend_on: see _Weight."""
    return _Weight(body, {"masks": masks, "values": values}, Uses(dense=dense), k, n, seems_to_depend_on).matrix()


class _Weight:
    """Unpacks W to float32. seems_to_depend_on: a value that is not constant, to prevent folding; or None."""

    def __init__(
        self,
        body: FunctionBody,
        inputs: dict[str, ir.Value],
        uses: Uses,
        k: ir.Value,
        n: ir.Value,
        seems_to_depend_on: ir.Value | None,
    ) -> None:
        self._body = body
        self._inputs = inputs
        self._uses = uses
        self._k, self._n = k, n
        self._zero = body.integer(0)
        if seems_to_depend_on is not None:
            self._zero = body.op("Min", body.op("Size", seems_to_depend_on), self._zero)
        self._is_two_four = self._find_storage() if uses.differ else None
        inputs_of_rows = self._of_bits(lambda bits: body.integer(row_inputs(bits)))
        self._tile_inputs = body.op("Mul", inputs_of_rows, body.integer(TILE_ROWS))
        # In 2:4 storage, a row holds one quad of each column.
        self._row_inputs = self._by_storage(body.integer(QUAD), inputs_of_rows)
        self._panels = body.divided_up(self._n, body.integer(PANEL_COLUMNS))
        # Rows are handled four at a time, because int4 formats store two rows (in 2:4 storage two rows of quads) in the
        # same bytes.
        self._by_fours = body.shape(self._panels, -1, 2, 2, PANEL_COLUMNS, self._row_inputs)

    def matrix(self) -> ir.Value:
        """Return W [k, n], with scales applied."""
        body, op = self._body, self._body.op
        # [panel, row of its tiles, column, input in row] -> [input, column].
        matrix_order = op("Transpose", self._in_tile_order(), perm=[1, 2, 3, 5, 0, 4])
        padded_n = op("Mul", self._panels, body.integer(PANEL_COLUMNS))
        padded = op("Reshape", matrix_order, body.shape(-1, padded_n))
        if self._uses.zero_points:  # one zero point per column, in order, or a single 0
            zero_points = op("Reshape", self._inputs["zero_points"], body.ints(1, -1))
            padded = op("Sub", padded, op("Cast", zero_points, to=ir.DataType.FLOAT))
        if self._uses.weight_bits != {16}:
            padded = op("Mul", padded, self._scales(op("Shape", padded), padded_n))
        return op("Slice", padded, body.ints(0, 0), body.shape(self._k, self._n))

    def _in_tile_order(self) -> ir.Value:
        """Return all weights, including zeros, float32 [panels, fours of rows, 2, 2, 16, inputs of a row]."""
        body, op, uses = self._body, self._body.op, self._uses
        mask_bytes = self._mask_bytes()
        found = [self._two_four(mask_bytes)] if uses.two_four else []
        found += [self._bitmap(mask_bytes)] if uses.bitmap or uses.dense else []
        stored, positions = map(self._by_storage, *found) if uses.differ else found[0]
        values = self._values_at(positions)
        weights = {}
        if uses.weight_bits != {4}:
            weights[16] = weights[8] = op("Cast", values, to=ir.DataType.FLOAT)
        if 4 in uses.weight_bits:
            # Low nibbles belong to even rows, high nibbles to odd rows; a row of 2:4 storage is two quads.
            of_quads = body.constant(np.array([0, 4], np.uint8).reshape(2, 1, 1, 1))
            shifts = self._by_storage(of_quads, body.constant(np.array([0, 4], np.uint8).reshape(2, 1, 1)))
            shifted = op("BitShift", op("Cast", values, to=ir.DataType.UINT8), shifts, direction="RIGHT")
            nibbles = op("Mod", shifted, body.constant(np.array(16, np.uint8)))
            weights[4] = op("Sub", op("Cast", nibbles, to=ir.DataType.FLOAT), body.number(INT4_BIAS))
        return op("Where", op("Cast", stored, to=ir.DataType.BOOL), self._by_bits(weights), body.number(0))

    def _of_bits(self, make: Callable[[int], ir.Value]) -> ir.Value:
        """Return make(weight_bits) for the node's attribute weight_bits."""
        return self._by_bits({bits: make(bits) for bits in sorted(self._uses.weight_bits)})

    def _by_bits(self, values: Mapping[int, ir.Value]) -> ir.Value:
        used = {bits: values[bits] for bits in sorted(self._uses.weight_bits)}
        return used.popitem()[1] if len(set(used.values())) == 1 else self._body.by_attribute("weight_bits", used)

    def _find_storage(self) -> ir.Value:
        """Return whether the layer uses 2:4 storage: it has masks but no offsets."""
        body, op = self._body, self._body.op
        has_masks = op("Greater", op("Size", self._inputs["masks"]), body.integer(0))
        return op("And", has_masks, op("Equal", op("Size", self._inputs["offsets"]), body.integer(0)))

    def _by_storage(self, two_four: ir.Value, others: ir.Value) -> ir.Value:
        if self._is_two_four is None:
            return two_four if self._uses.two_four else others
        return self._body.op("Where", self._is_two_four, two_four, others)

    def _mask_bytes(self) -> ir.Value:
        """Return the masks as a vector; for dense storage, all bits are set."""
        body, op = self._body, self._body.op
        masks = op("Reshape", self._inputs["masks"], body.ints(-1))
        if not self._uses.dense:
            return masks
        tiles = op("Mul", self._panels, body.divided_up(self._k, self._tile_inputs))
        weights = op("Mul", op("Mul", tiles, self._tile_inputs), body.integer(PANEL_COLUMNS))
        missing = op("Sub", op("Div", weights, body.integer(8)), op("Size", masks))
        ones = op("ConstantOfShape", body.vector(missing), value=ir.tensor(np.full(1, 255, np.uint8)))
        return op("Concat", masks, ones, axis=0)

    def _bits(self, mask_bytes: ir.Value, bits: int) -> ir.Value:
        """Split each byte into groups of `bits` bits, lowest first, on a new last axis."""
        body, op = self._body, self._body.op
        shifts = op("Cast", op("Add", body.ints(*range(0, 8, bits)), self._zero), to=ir.DataType.UINT8)
        shifted = op("BitShift", op("Unsqueeze", mask_bytes, body.ints(-1)), shifts, direction="RIGHT")
        return op("Mod", shifted, body.constant(np.array(2**bits, np.uint8)))

    def _bitmap(self, mask_bytes: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return whether each weight is stored, uint8, and the index of its value, int32, both in tile order.

        Mask bit i of a row is bit i % 8 of byte i // 8; the count of set bits before it is the index of its value.
        (ONNX Runtime would not fold NonZero, whose output size is unknown.)
        """
        body, op = self._body, self._body.op
        bits = op("Reshape", self._bits(mask_bytes, 1), body.ints(-1))
        flat = op("Cast", bits, to=ir.DataType.INT32)
        positions = {}
        if self._uses.weight_bits != {4}:
            before = op("CumSum", flat, body.integer(0), exclusive=1)
            positions[16] = positions[8] = op("Reshape", before, self._by_fours)
        if 4 in self._uses.weight_bits:
            positions[4] = self._int4_positions(op("Reshape", flat, self._by_fours))
        return op("Reshape", bits, self._by_fours), self._by_bits(positions)

    def _int4_positions(self, stored: ir.Value) -> ir.Value:
        """Return the byte of each weight. Even and odd rows of a panel are two streams with the same start."""
        body, op = self._body, self._body.op
        streams = op("Transpose", stored, perm=[0, 3, 1, 2, 4, 5])
        one_axis = op("Reshape", streams, body.shape(self._panels, 2, -1))
        before = op("CumSum", one_axis, body.integer(2), exclusive=1)
        panel_bytes = body.reduce_max(body.reduce_max(op("Add", before, one_axis), 2), 1)
        positions = op("Add", before, op("CumSum", panel_bytes, body.integer(0), exclusive=1))
        return op("Transpose", op("Reshape", positions, op("Shape", streams)), perm=[0, 2, 3, 1, 4, 5])

    def _two_four(self, mask_bytes: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the result of `_bitmap` for 2:4 storage, in the order of quads of ops/formats/two_four.h."""
        body, op = self._body, self._body.op
        inputs = self._slot_inputs(mask_bytes)
        quad = body.constant(np.arange(QUAD, dtype=np.int32))
        first, second = (
            op("Equal", op("Slice", inputs, body.ints(slot), body.ints(slot + 1), body.ints(-1)), quad)
            for slot in range(QUAD_STORED)
        )
        spans = op("Div", op("Size", mask_bytes), body.integer(_SPAN_BYTES))
        span = op("Reshape", op("Range", body.integer(0), spans, body.integer(1)), body.ints(-1, 1, 1))
        values_of_span = self._of_bits(lambda bits: body.integer(_SPAN_SLOTS if bits != 4 else _SPAN_SLOTS // 2))
        first_slots = self._of_bits(lambda bits: body.constant(_first_slots(bits)))
        of_span = op("Add", op("Mul", span, values_of_span), first_slots)
        position = op("Reshape", op("Cast", of_span, to=ir.DataType.INT32), self._quads_by_fours(1))
        next_position = op("Add", position, body.constant(np.array(1, np.int32)))
        stored, positions = (
            op("Cast", op("Or", first, second), to=ir.DataType.UINT8),
            op("Where", second, next_position, position),
        )
        if not self._uses.differ or 16 not in self._uses.weight_bits:
            return stored, positions
        # Use the shape of bf16 weights in other storages, whose rows hold two inputs.
        return op("Reshape", stored, self._by_fours), op("Reshape", positions, self._by_fours)

    def _slot_inputs(self, mask_bytes: ir.Value) -> ir.Value:
        """Return which input of its quad each slot holds, int32 [panels, fours of quads, 2, 2, 16, slots]."""
        body, op = self._body, self._body.op
        # Order of a column's axes: for bf16 (slots, halves of the rows, rows), for other types (quads of a row, slots,
        # rows).
        by_columns = op("Reshape", mask_bytes, body.ints(-1, PANEL_COLUMNS, 2, 2))
        inputs = op("Cast", self._bits(by_columns, 2), to=ir.DataType.INT32)
        by_quads: dict[int, ir.Value] = {}
        for kinds, order in (({16}, [0, 3, 4, 1, 2]), ({8, 4}, [0, 4, 2, 1, 3])):
            if used := kinds & self._uses.weight_bits:
                ordered = op("Transpose", inputs, perm=order)
                by_quads |= dict.fromkeys(used, op("Reshape", ordered, self._quads_by_fours(QUAD_STORED)))
        return self._by_bits(by_quads)

    def _quads_by_fours(self, count: int) -> ir.Value:
        """Return the shape of a tensor with `count` elements per quad."""
        return self._body.shape(self._panels, -1, 2, 2, PANEL_COLUMNS, count)

    def _values_at(self, positions: ir.Value) -> ir.Value:
        body, values = self._body, self._inputs["values"]
        if len(self._uses.weight_bits) > 1 or self._uses.differ:
            # Shape, because ONNX Runtime's Size does not support bf16
            last = body.op("Sub", body.op("Shape", values), body.integer(1))
            positions = body.op("Min", positions, body.op("Cast", last, to=ir.DataType.INT32))
        return body.op("Gather", values, positions)

    def _scales(self, padded_shape: ir.Value, padded_n: ir.Value) -> ir.Value:
        """Expand scales [panels, groups, 16] to [padded k, padded n] (undefined in padding), or to one row."""
        body, op = self._body, self._body.op
        by_groups = op("Transpose", op("Cast", self._inputs["scales"], to=ir.DataType.FLOAT), perm=[1, 0, 2])
        rows = op("Reshape", by_groups, body.shape(-1, padded_n))
        if 4 not in self._uses.weight_bits:
            return rows
        # Weights other than int4 have group_size 0 and a single group.
        group_size = op("Max", body.attribute("group_size"), body.integer(1))
        padded_k = op("Squeeze", op("Slice", padded_shape, body.ints(0), body.ints(1)), body.ints(0))
        groups = op("Div", op("Range", body.integer(0), padded_k, body.integer(1)), group_size)
        last = op("Sub", op("Slice", op("Shape", rows), body.ints(0), body.ints(1)), body.integer(1))
        return op("Gather", rows, op("Min", groups, last))


def _row_maximum(body: FunctionBody, x: ir.Value) -> ir.Value:
    # If x has no rows, ONNX Runtime's ReduceMax keeps the width of x; the Slice cuts it to 1.
    return body.op("Slice", body.reduce_max(x, -1), body.ints(0), body.ints(1), body.ints(-1))


def _without_zero_points(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ...]:
    """Return rows rounded to int8, as floats, and the scale of each row."""
    op = body.op
    largest = op("Max", _row_maximum(body, op("Abs", x)), body.number(_SMALLEST_MAXIMUM))
    q = op("Round", op("Mul", x, op("Div", body.number(127), largest)))
    return q, op("Div", largest, body.number(127))


def _with_zero_points(body: FunctionBody, x: ir.Value) -> tuple[ir.Value, ...]:
    """Return rows rounded to int8, minus each row's zero point, as floats; and the scale of each row."""
    op = body.op
    zero, half = body.number(0), body.number(0.5)
    maximum = op("Max", _row_maximum(body, x), zero)
    minus_minimum = op("Max", _row_maximum(body, op("Neg", x)), zero)
    half_range = op("Add", op("Mul", maximum, half), op("Mul", minus_minimum, half))
    half_range = op("Max", half_range, body.number(_SMALLEST_MAXIMUM))
    factor = op("Div", body.number(127), half_range)
    largest_q = op("Sub", body.number(254), op("Round", op("Mul", minus_minimum, factor)))
    q = op("Min", op("Round", op("Mul", x, factor)), largest_q)
    return q, op("Div", half_range, body.number(127))


def _product(body: FunctionBody, x: ir.Value, w: ir.Value, uses: Uses) -> ir.Value:
    """Return X W with X rounded to bf16, or row by row to int8 with a scale."""
    op = body.op
    rounded, scales = {}, {}
    if 16 in uses.weight_bits:
        rounded[16] = op("Cast", op("Cast", x, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
        scales[16] = body.number(1)
    if 4 in uses.weight_bits or (8 in uses.weight_bits and 0 in uses.x_zero_points):
        rounded[8], scales[8] = rounded[4], scales[4] = _without_zero_points(body, x)
    if 8 in uses.weight_bits and 1 in uses.x_zero_points:
        found = _with_zero_points(body, x)
        if 0 in uses.x_zero_points:
            plain = rounded[8], scales[8]
            pairs = zip(plain, found, strict=True)
            found = tuple(body.by_attribute("x_zero_points", dict(enumerate(pair))) for pair in pairs)
        rounded[8], scales[8] = found
    if uses.weight_bits == {16}:
        return op("MatMul", rounded[16], w)
    if uses.weight_bits == {8} or (uses.weight_bits == {4, 8} and uses.x_zero_points == {0}):
        return op("Mul", op("MatMul", rounded[8], w), scales[8])
    if uses.weight_bits == {4}:
        return op("Mul", op("MatMul", rounded[4], w), scales[4])
    kinds = sorted(uses.weight_bits)
    x = body.by_attribute("weight_bits", {bits: rounded[bits] for bits in kinds})
    return op("Mul", op("MatMul", x, w), body.by_attribute("weight_bits", {bits: scales[bits] for bits in kinds}))


def _first_slots(weight_bits: int) -> np.ndarray:
    """Return the index of each quad's first value among the values of its span: int64 [quads, 16]."""
    quad, column = np.mgrid[:_SPAN_QUADS, :PANEL_COLUMNS].astype(np.int64)
    slots: np.ndarray = (quad * PANEL_COLUMNS + column) * QUAD_STORED
    if weight_bits != 16:  # a row holds two quads; in int4, two rows share their bytes
        row = quad // 2 if weight_bits == 8 else quad // 4
        slots = ((row * PANEL_COLUMNS + column) * 2 + quad % 2) * QUAD_STORED
    return slots
