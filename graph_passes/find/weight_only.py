"""Reads 4-bit and 8-bit weights that a model dequantizes by arithmetic on constants.

    Cast -> (Sub or Add of zero points) -> Mul or Div by scales       zero points are integers or fractions
    DequantizeLinear, also with blocks                                if stored_int4.py and stored_int8.py do not apply
    MatMulNBits with 8 bits

Reshape, Transpose, Squeeze, Unsqueeze and Identity may be between these nodes. The integers are kept if an Ortolan
operator supports the result: 8 bits with a scale and a zero point per column, or with a scale per group of 32, 64 or
128 inputs; 4 bits in such groups with zero points, or with minimums for fractional zero points. If nothing fits, a
reason is returned. Arithmetic that wraps or clips integers is not recognized. A model is untrusted: see node_checks.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan import _native

from ..weights.quantizers.grid import LEVELS, narrowed
from .constants import DEFAULT_DOMAINS, constant_tensor, float_array, lazy, required_constant
from .node_checks import UnfitError, constant_input, expect, integer_attribute, node_input
from .quantized_weight import MAX_INPUTS, too_wide
from .stored_int4 import INT4_TYPES, StoredInt4, group_size_of
from .stored_int8 import FLOAT_TYPES, INT8_TYPES, ZERO_POINTS, StoredInt8, StoredInt8Tensors

_MOVES = ("Reshape", "Flatten", "Transpose", "Squeeze", "Unsqueeze")
_WIDER = (ir.DataType.INT16, ir.DataType.INT32, ir.DataType.INT64)  # integer types that contain all 8-bit codes
_MOST_IN_INTEGERS = 2**15 - 256  # up to this, codes - zero point does not wrap in types of _WIDER
_MOST_STEPS = 32
_LARGEST_SCALE = np.finfo(np.float32).max / 256  # a scale times any code stays finite
_MIDDLE = {ir.DataType.UINT8: 128, ir.DataType.INT4: -8}  # subtracted: gives int8 from uint8, and 0 … 15 from int4
_RUNS = (128, 64, 32)
_META = "ortolan.weight_only"

Stored = StoredInt4 | StoredInt8 | str | None
_Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class _Scaled:
    """The value scales (codes - zero_points); scales and zero_points are float32 and broadcast to `shape`."""

    codes: Callable[[], _Array]
    dtype: ir.DataType  # type of the codes
    shape: tuple[int, ...]
    scales: _Array
    zero_points: _Array
    is_scaled: bool = False


def read_weight_only(value: ir.Value, transposed: bool) -> Stored:
    """Return the weight that a layer's input [k, n] ([n, k] if transposed) dequantizes, or why it cannot be kept.

    None: the input is not dequantized from 4-bit or 8-bit integers in one of the ways above.
    """
    roots = _roots(value)
    if value.producer() is None or not any(one.dtype in (*INT8_TYPES, *INT4_TYPES) for one in roots):
        return None
    return _once(value, transposed, roots, lambda: _read(value, transposed))


def read_blocks_int8(linear: _native.Linear) -> StoredInt8 | str:
    """Return the weight of an 8-bit MatMulNBits node, or why it cannot be kept."""
    roots = [tensor for one in linear.node.inputs[1:5] if (tensor := constant_tensor(one)) is not None]
    found = _once(linear.codes, False, roots, lambda: _blocks(linear))
    assert isinstance(found, StoredInt8 | str)
    return found


def _once(value: ir.Value, transposed: bool, roots: list[ir.TensorProtocol], read: Callable[[], Stored]) -> Stored:
    """Return read(), cached in the value's meta: reading visits all weights, and passes search layers many times."""
    known = value.meta.get(_META)
    if known is None or known[0] != transposed or [id(one) for one in known[1]] != [id(one) for one in roots]:
        try:
            found = read()
        except UnfitError as reason:
            found = str(reason)
        known = value.meta[_META] = (transposed, roots, found)
    found = known[2]
    return found


def _roots(value: ir.Value) -> list[ir.TensorProtocol]:
    """Return the constants that a value is computed from; empty if that takes more than _MOST_STEPS steps."""
    waiting, found = [value], list[ir.TensorProtocol]()
    for _ in range(_MOST_STEPS):
        if not waiting:
            return found
        one = waiting.pop()
        node = one.producer()
        if node is not None and node.op_type != "Constant":
            waiting += [source for source in node.inputs if source is not None]
        elif (tensor := constant_tensor(one)) is not None:
            found.append(tensor)
    return []


def _read(value: ir.Value, transposed: bool) -> Stored:
    found = _scaled(value)
    if found is None or not found.is_scaled:
        return None
    expect(len(found.shape) == 2, f"its codes are {len(found.shape)}-D, expected 2-D")
    expect(min(found.shape) > 0, f"its weight is empty: {list(found.shape)}")
    if transposed:
        found = _moved(found, np.transpose)
    return _four_bits(found) if found.dtype in INT4_TYPES else _eight_bits(found)


def _blocks(linear: _native.Linear) -> StoredInt8 | str:
    """Read an 8-bit MatMulNBits: codes uint8 [n, blocks, block_size]; scales and zero points [n, blocks] or flat."""
    k, n, block = linear.k, linear.n, linear.block_size
    blocks = -(-k // block)
    packed, scales, zeros = required_constant(linear.codes), required_constant(linear.scales), linear.zero_points

    def spread(tensor: ir.TensorProtocol) -> _Array:
        rows = np.asarray(tensor.numpy()).astype(np.float32).reshape(n, blocks).T
        return np.repeat(rows, block, axis=0)[:k]

    points = np.full((1, 1), 128, np.float32) if zeros is None else spread(required_constant(zeros))
    codes = packed.numpy
    return _eight_bits(
        _Scaled(lambda: codes().reshape(n, -1)[:, :k].T, packed.dtype, (k, n), spread(scales), points, True),
        in_groups=True,
    )


# --- evaluating the arithmetic ----------------------------------------------------------------------------------------


def _scaled(value: ir.Value | None, steps: int = _MOST_STEPS) -> _Scaled | None:
    tensor = constant_tensor(value)
    if value is None or tensor is None or not steps:
        return None
    node = value.producer()
    if node is None or node.op_type == "Constant":
        if tensor.dtype not in (*INT8_TYPES, *INT4_TYPES):
            return None
        shape = tuple(tensor.shape.numpy())
        one = np.ones([1] * len(shape), np.float32)
        return _Scaled(tensor.numpy, tensor.dtype, shape, one, 0 * one)
    if node.domain not in DEFAULT_DOMAINS:
        return None
    if node.op_type == "DequantizeLinear":
        return _dequantized(node)
    if node.op_type in ("Add", "Sub", "Mul", "Div"):
        return _arithmetic(node, tensor.dtype, steps - 1)
    source = _scaled(node_input(node, 0), steps - 1)
    if source is None or node.op_type == "Identity":
        return source
    if node.op_type == "Cast":
        return source if tensor.dtype in FLOAT_TYPES or _is_exact(source, tensor.dtype) else None
    if node.op_type not in _MOVES:
        return None
    return _moved(source, _move(node, tuple(tensor.shape.numpy())), keeps_axes=node.op_type == "Transpose")


def _move(node: ir.Node, shape: tuple[int, ...]) -> Callable[[_Array], _Array]:
    """Return a function that moves an array's elements as the node does."""
    if node.op_type == "Transpose":
        given = node.attributes.get("perm")
        order = None if given is None else tuple(given.as_ints())
        return lambda array: np.transpose(array, order)
    return lambda array: array.reshape(shape)


def _moved(source: _Scaled, move: Callable[[_Array], _Array], keeps_axes: bool = True) -> _Scaled:
    def spread(array: _Array) -> _Array:
        if keeps_axes:
            return move(array)
        full = move(np.broadcast_to(array, source.shape))
        return full[(slice(0, 1),) * full.ndim] if array.size == 1 else full

    shape = move(np.broadcast_to(np.int8(0), source.shape)).shape
    codes = source.codes
    return replace(
        source,
        codes=lambda: move(codes()),
        shape=shape,
        scales=spread(source.scales),
        zero_points=spread(source.zero_points),
    )


def _is_exact(scaled: _Scaled, dtype: ir.DataType) -> bool:
    """Return whether integers of this type represent codes - zero_points exactly, without wrapping or clipping."""
    zeros = scaled.zero_points
    small = bool((np.abs(zeros) <= _MOST_IN_INTEGERS).all())  # NaN fails
    return dtype in _WIDER and not scaled.is_scaled and small and _is_whole(zeros)


def _arithmetic(node: ir.Node, dtype: ir.DataType, steps: int) -> _Scaled | None:
    """Evaluate Add, Sub, Mul or Div of codes and a zero point or scale. dtype: output type of the node.

    Integer outputs are supported only for Add and Sub that cannot wrap.
    """
    for index in (0, 1) if node.op_type in ("Add", "Mul") else (0,):
        source, other = _scaled(node_input(node, index), steps), constant_tensor(node_input(node, 1 - index))
        if source is None or other is None:
            continue
        shape = tuple(other.shape.numpy())
        shape = (1,) * (len(source.shape) - len(shape)) + shape
        if len(shape) != len(source.shape) or any(a not in (1, b) for a, b in zip(shape, source.shape, strict=True)):
            continue  # perhaps the codes are the other operand
        factor = float_array(other).reshape(shape)
        if node.op_type in ("Mul", "Div"):
            if dtype not in FLOAT_TYPES:
                return None
            with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
                scales = source.scales * factor if node.op_type == "Mul" else source.scales / factor
            return replace(source, scales=scales, is_scaled=True)
        if source.is_scaled:
            raise UnfitError(f"{node.op_type} ({node.name!r}) adds a zero point after the scales, expected before them")
        offset = factor if node.op_type == "Sub" else -factor
        less = replace(source, zero_points=source.zero_points + offset)
        return less if dtype in FLOAT_TYPES or _is_exact(less, dtype) else None
    return None


def _dequantized(node: ir.Node) -> _Scaled | None:
    """Read a DequantizeLinear whose scales are one per tensor, per index of an axis, or per block of an axis."""
    codes = constant_tensor(node_input(node, 0))
    if codes is None or codes.dtype not in (*INT8_TYPES, *INT4_TYPES):
        return None
    shape = tuple(codes.shape.numpy())
    axis, block = integer_attribute(node, "axis", 1), integer_attribute(node, "block_size", 0)
    expect(-len(shape) <= axis < len(shape) or not block, f"axis of its DequantizeLinear is {axis}")
    expect(block >= 0, f"its block_size is {block}, expected a multiple of 32")
    axis = axis % max(len(shape), 1)
    along = [1] * len(shape)
    if block:
        blocks = tuple(-(-size // block) if at == axis else size for at, size in enumerate(shape))
        shapes: tuple[tuple[int, ...], ...] = (blocks,)
    elif shape:
        along[axis] = shape[axis]
        shapes = ((), (1,), (shape[axis],))
    else:
        shapes = ((), (1,))

    def spread(tensor: ir.TensorProtocol) -> _Array:
        array = float_array(tensor) if tensor.dtype in FLOAT_TYPES else tensor.numpy().astype(np.float32)
        if block:
            return np.repeat(array, min(block, shape[axis]), axis=axis)[tuple(slice(size) for size in shape)]
        return array.reshape(along if array.size > 1 else [1] * len(shape))

    scales = spread(constant_input(node, 1, "weight's scales", FLOAT_TYPES, *shapes))
    zeros = np.zeros([1] * len(shape), np.float32)
    if node_input(node, 2) is not None:
        zeros = spread(constant_input(node, 2, "weight's zero points", (codes.dtype,), *shapes))
    return _Scaled(codes.numpy, codes.dtype, shape, scales, zeros, True)


# --- formats of the operators -----------------------------------------------------------------------------------------


def _eight_bits(found: _Scaled, in_groups: bool = False) -> StoredInt8 | str:
    """Return an 8-bit weight. in_groups: use the group format even if each column has one scale."""
    k, n = found.shape
    _check(found)
    expect(_is_whole(found.zero_points), "its zero points are fractions, which 8-bit formats do not support")
    low, high = ZERO_POINTS[found.dtype]
    least, most = float(found.zero_points.min()), float(found.zero_points.max())
    expect(
        low <= least and most <= high,
        f"its zero points are from {least:g} to {most:g}, expected {low} to {high}, the range of its "
        f"{found.dtype.name.lower()} codes",
    )
    run = _run(found)
    scales, zeros = (_by_run(array, run, k, n) for array in (found.scales, found.zero_points.astype(np.int16)))
    name = "weight"
    if run >= k and not in_groups:
        numbers = lazy(found.codes, found.dtype, ir.Shape([k, n]), name)
        expect(bool((scales > 0).all()), "its scales are not all above 0")
        return StoredInt8Tensors(numbers, False, scales[0], zeros[0]).stored()
    size = group_size_of(k, run)

    def centred() -> _Array:
        rows = zeros[np.arange(k) // run]
        less: _Array = np.subtract(found.codes(), rows, dtype=np.int16)
        return less

    if (zeros != _MIDDLE.get(found.dtype, 0)).any():
        low, high = (int(limit) for limit in (centred().min(), centred().max()))
        expect(
            low >= -128 and high < 128,
            f"its codes minus zero points are from {low} to {high}, expected -128 to 127, because 8-bit groups have no "
            "zero points; quantize with symmetric int8 weights",
        )
    q = lazy(lambda: centred().astype(np.int8), ir.DataType.INT8, ir.Shape([k, n]), name)
    return StoredInt8(8, size, q, ir.Tensor(narrowed(_spread(scales, run, size, k))))


def _check(found: _Scaled) -> None:
    """Raise UnfitError if kernels cannot compute with the scales, zero points or number of inputs."""
    expect(bool(np.isfinite(found.zero_points).all()), "its zero points hold NaN or infinity")
    largest = float(np.abs(found.scales).max())
    expect(largest <= float(_LARGEST_SCALE), f"its largest scale is {largest:g}, expected a finite value below 1e36")
    expect(found.shape[0] <= MAX_INPUTS, too_wide(found.shape[0]))


def _four_bits(found: _Scaled) -> StoredInt4:
    k, n = found.shape
    _check(found)
    run = _run(found)
    size = group_size_of(k, run)
    scales, zeros = (_spread(_by_run(array, run, k, n), run, size, k) for array in (found.scales, found.zero_points))
    less = _MIDDLE.get(found.dtype, 0)
    symmetric = found.dtype == ir.DataType.INT4 and not zeros.any()
    zeros = zeros - np.float32(less)
    whole = _is_whole(zeros) and bool(((zeros >= 0) & (zeros <= LEVELS)).all())

    def q() -> _Array:
        codes = found.codes().astype(np.int8)
        return codes if symmetric else (codes - np.int8(less)).view(np.uint8)

    by_group = narrowed(scales)
    points = ir.Tensor(zeros.astype(np.uint8)) if whole and not symmetric else None
    return StoredInt4(
        4,
        size,
        lazy(q, ir.DataType.INT8 if symmetric else ir.DataType.UINT8, ir.Shape([k, n])),
        ir.Tensor(by_group, name="scales"),
        points,
        None if whole else ir.Tensor((-scales * zeros).astype(np.float32)),
    )


def _is_whole(zero_points: _Array) -> bool:
    return bool((zero_points == np.rint(zero_points)).all())


def _run(scaled: _Scaled) -> int:
    """Return the number of inputs per scale and zero point; k for one per column.

    Raises:
        UnfitError: No operator supports this block size.
    """
    changes = [
        np.flatnonzero((array[1:] != array[:-1]).any(axis=1)) + 1 for array in (scaled.scales, scaled.zero_points)
    ]
    block = math.gcd(*map(int, np.concatenate(changes)))  # 0: they are the same for all inputs
    run = next((run for run in _RUNS if block % run == 0), None)
    if run is None:
        found = f"per block of {block} inputs" if block > 1 else "per input"
        raise UnfitError(f"its scales are {found}, expected one per output, or blocks of a multiple of 32 inputs")
    return run if block else scaled.shape[0]


def _by_run(array: _Array, run: int, k: int, n: int) -> _Array:
    """Return the first row of each run of [k or 1, n or 1], as [runs, n]."""
    rows = array if array.shape[0] == 1 else array[::run]
    return np.ascontiguousarray(np.broadcast_to(rows, (-(-k // run), n)))


def _spread(rows: _Array, run: int, size: int, k: int) -> _Array:
    """Expand [runs, n] to [groups, n], with `size` inputs per group."""
    return np.ascontiguousarray(rows[np.arange(-(-k // size)) * size // run])
