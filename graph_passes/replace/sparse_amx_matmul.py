"""SparseAMXMatMul: bf16 weights as a bitmap and their non-zeros (the format is specified in ops/formats/bitmap.h)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..normalize import ORTOLAN_DOMAIN
from .replacement import PackedWeight, Replacement

OP_TYPE = "SparseAMXMatMul"

# As in ops/formats/bitmap.h.
_PANEL_COLUMNS = 16
_TILE_INPUTS = 32
_TILE_ROWS = 16
_PADDING = 32

# Of the packed tensors; the kernel refuses any other.
_FORMAT_VERSION = 1


class SparseAMXMatMul(Replacement):
    """Y = bf16(X) W + bias with fp32 sums."""

    rounding = 1.2 * 2**-7  # 2^-8 for each x and each w, and some for the order of fp32 sums

    def pack(self, matrix: np.ndarray) -> PackedWeight:
        from ortolan import _native

        masks, values, offsets = _native.pack_bitmap(np.ascontiguousarray(matrix))
        return [
            ("masks", masks, ir.DataType.UINT8),
            ("values", values, ir.DataType.BFLOAT16),
            ("offsets", offsets, ir.DataType.INT64),
        ]

    def packed_bytes(self, k: int, n: int, stored: int) -> int:
        panels, tiles = -(-n // _PANEL_COLUMNS), -(-k // _TILE_INPUTS)
        return 64 * panels * tiles + 2 * (stored + _PADDING) + 8 * (panels + 1)

    def attributes(self, k: int, n: int) -> list[ir.Attr]:
        return [ir.AttrInt64("k", k), ir.AttrInt64("n", n), ir.AttrInt64("format_version", _FORMAT_VERSION)]

    def run(self, x: np.ndarray, packed: PackedWeight, k: int, n: int) -> np.ndarray:
        from ortolan import _native

        masks, values, offsets = (array for _, array, _ in packed)
        return _native.sparse_amx_matmul(x, masks, values, offsets, k, n)

    def function(self, opset: int, unpack_once: bool) -> ir.Function:
        return sparse_amx_matmul_function(opset, unpack_once)


def sparse_amx_matmul_function(opset: int, unpack_once: bool = True) -> ir.Function:
    """The operator's body: unpack W to float32, then an ordinary MatMul. It serves any k, n and rank of X.

    Uses only operators that mean the same from opset 13 on. It needs no offsets: they let threads start anywhere.

    unpack_once: all of the unpacking has constant inputs, so ONNX Runtime does it when the session is created; while it
    does, it keeps every intermediate result of every layer, 37 bytes a weight. False: the unpacking seems to depend on
    X, so it is done layer by layer in each run.
    """
    x, masks, values, offsets, bias = (ir.val(name) for name in ("X", "masks", "values", "offsets", "bias"))
    body = _Body()
    op = body.op
    k, n = body.attribute("k"), body.attribute("n")
    panels_tiles = op("Slice", op("Shape", masks), body.ints(0), body.ints(2))
    panels = op("Slice", panels_tiles, body.ints(0), body.ints(1))
    tiles = op("Slice", panels_tiles, body.ints(1), body.ints(2))

    # One uint8 a bit, lowest bit first: mask bit i of a row is bit i % 8 of byte i // 8.
    mask_bytes = op("Unsqueeze", masks, body.ints(-1))
    shifts = body.constant(np.arange(8, dtype=np.uint8))
    if not unpack_once:
        nothing = op("Min", op("Size", x), body.constant(np.array(0, np.int64)))
        shifts = op("Cast", op("Add", body.ints(*range(8)), nothing), to=ir.DataType.UINT8)
    shifted = op("BitShift", mask_bytes, shifts, direction="RIGHT")
    bits = op("Reshape", op("Mod", shifted, body.constant(np.array(2, np.uint8))), body.ints(-1))

    # Where bit i is set, the number of bits before it says which value stands there; elsewhere is a zero. (NonZero and
    # ScatterElements would do as well, but ONNX Runtime does not precompute operators of unknown output size.)
    before = op("CumSum", op("Cast", bits, to=ir.DataType.INT32), body.constant(np.array(0, np.int32)), exclusive=1)
    candidates = op("Cast", op("Gather", values, before), to=ir.DataType.FLOAT)
    is_stored = op("Cast", bits, to=ir.DataType.BOOL)
    tile_order = op("Where", is_stored, candidates, body.constant(np.array(0, np.float32)))

    # Panel, tile, row of k-pairs, column, element of the pair -> input, column of the matrix.
    pairs = op("Reshape", tile_order, op("Concat", panels_tiles, body.ints(_TILE_ROWS, _PANEL_COLUMNS, 2), axis=0))
    matrix_order = op("Transpose", pairs, perm=[1, 2, 4, 0, 3])
    padded_k = op("Mul", tiles, body.ints(_TILE_INPUTS))
    padded_n = op("Mul", panels, body.ints(_PANEL_COLUMNS))
    padded = op("Reshape", matrix_order, op("Concat", padded_k, padded_n, axis=0))
    w = op("Slice", padded, body.ints(0, 0), op("Concat", k, n, axis=0))

    # Gemm's C may be missing and Add's input may not: this is the bias as a row, or zeros where there is none.
    no_rows = op("ConstantOfShape", op("Concat", body.ints(1), n, axis=0), value=ir.tensor(np.zeros(1, np.float32)))
    bias_row = op("Gemm", body.constant(np.zeros((1, 1), np.float32)), no_rows, bias)
    bias_vector = op("Reshape", bias_row, body.ints(-1))

    rounded = op("Cast", op("Cast", x, to=ir.DataType.BFLOAT16), to=ir.DataType.FLOAT)
    y = op("Add", op("MatMul", rounded, w), bias_vector)
    y.name = "Y"
    graph = ir.Graph([x, masks, values, offsets, bias], [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr(name, ir.AttributeType.INT, None) for name in ("k", "n", "format_version")]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


class _Body:
    """Writes the nodes of a function."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()

    @property
    def nodes(self) -> tuple[ir.Node, ...]:
        return tuple(self._tape.nodes)

    def op(self, op_type: str, *inputs: ir.Value, **attributes: object) -> ir.Value:
        return self._tape.op(op_type, inputs, attributes)  # type: ignore[arg-type]

    def constant(self, array: np.ndarray) -> ir.Value:
        return self.op("Constant", value=ir.tensor(array))

    def ints(self, *numbers: int) -> ir.Value:
        return self.constant(np.array(numbers, np.int64))

    def attribute(self, name: str) -> ir.Value:
        """The function's attribute as an int64 [1]."""
        reference = ir.RefAttr("value_int", name, ir.AttributeType.INT)
        return self.op("Unsqueeze", self.op("Constant", value_int=reference), self.ints(0))
