"""Quantized weights of GGUF files in the formats of Ortolan's operators, with groups of 32 inputs.

    Q4_0                   4 bits, q - 8, with a scale           kept exactly
    Q4_1                   4 bits, q, with scale and minimum     kept exactly
    Q8_0, Q5_0             8 bits with a scale                   kept exactly
    Q4_K                   4 bits, q, with scale and minimum     q kept; scale and minimum, each a float16 times
                                                                 a 6-bit integer, rounded to float16
    Q5_1, Q5_K, Q6_K and   8 bits with a scale                   rounded: the scale with the least squared error
    all others, floats too                                       among several

With float16 scales and minimums, Q4_K takes 5 bits per weight; exact float32 values would take 6 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.constants import lazy
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight

from ..graph_builder import ModelBuildError
from .file import StoredWeight

GROUP = 32
_SUPER_BLOCK = 256  # number of inputs in a Q4_K block
_STEPS = 127.0
# Candidate scales, relative to the scale that maps the largest weight to the largest integer.
_SCALE_FACTORS = tuple(1 + 0.004 * step for step in range(-4, 5))
# Smaller relative errors come from float32 arithmetic and count as exact.
_NEGLIGIBLE = 1e-7


@dataclass(frozen=True)
class KeptWeight:
    """A quantized weight and its error.

    Attributes:
        stored: The weight in the file, [n, k].
        quantized: The weight for Ortolan's operators, [k, n].
        error: ||V - W|| / ||W|| for the file's weight W and the quantized weight V.
    """

    stored: StoredWeight
    quantized: QuantizedWeight
    error: float

    @property
    def format(self) -> str:
        """A description of the format."""
        if self.quantized.minimum:
            return f"{self.quantized.bits} bits with minimums"
        return f"{self.quantized.bits} bits"


@dataclass(frozen=True)
class _Format:
    """A GGUF type that stores each row of a weight as blocks, uint8 [n, blocks, bytes].

    The functions return q [n, blocks, inputs]; and scales, and minimums if the type has them, [n, groups].
    """

    bits: int
    block_bytes: int
    q: Callable[[np.ndarray], np.ndarray]
    scales: Callable[[np.ndarray], np.ndarray]
    minimums: Callable[[np.ndarray], np.ndarray] | None = None
    exact: bool = True


def _half(start: int) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that reads the float16 at this byte of each block, [n, blocks]."""
    return lambda blocks: np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack […, bytes] to […, 2 * bytes]: low nibbles, then high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(blocks: np.ndarray) -> np.ndarray:
    return np.unpackbits(blocks[..., 2:6], axis=-1, bitorder="little")


def _q4_k_parts(blocks: np.ndarray, of_minimums: bool) -> np.ndarray:
    """Return the eight scales or minimums of each block (a float16 times a 6-bit integer), as float16 [n, groups]."""
    low, high, both = (blocks[..., start : start + 4] for start in (4, 8, 12))
    if of_minimums:
        factors = np.concatenate([high & 63, (both >> 4) | ((high >> 2) & 48)], axis=-1)
    else:
        factors = np.concatenate([low & 63, (both & 15) | ((low >> 2) & 48)], axis=-1)
    unit = _half(2 if of_minimums else 0)(blocks).astype(np.float32)
    product = unit[..., None] * factors.astype(np.float32)
    with np.errstate(over="ignore"):
        return (-product if of_minimums else product).astype(np.float16).reshape(len(blocks), -1)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    packed = blocks[..., 16:].reshape(*blocks.shape[:2], -1, GROUP)  # each row holds the nibbles of two groups
    return _nibbles(packed).reshape(*blocks.shape[:2], _SUPER_BLOCK)


_FORMATS = {
    "Q4_0": _Format(4, 18, lambda blocks: _nibbles(blocks[..., 2:]).view(np.int8) - np.int8(8), _half(0)),
    "Q4_1": _Format(4, 20, lambda blocks: _nibbles(blocks[..., 4:]), _half(0), _half(2)),
    "Q8_0": _Format(8, 34, lambda blocks: blocks[..., 2:].view(np.int8), _half(0)),
    "Q5_0": _Format(
        8,
        22,
        lambda blocks: (_nibbles(blocks[..., 6:]) | (_fifth_bits(blocks) << 4)).view(np.int8) - np.int8(16),
        _half(0),
    ),
    "Q4_K": _Format(
        4,
        144,
        _q4_k,
        lambda blocks: _q4_k_parts(blocks, False),
        lambda blocks: _q4_k_parts(blocks, True),
        exact=False,
    ),
}


def keep_gguf_weight(stored: StoredWeight, spill: TensorSpill, eight_bits: bool = False) -> KeptWeight:
    """Return a weight [n, k] of the file in a format of Ortolan's operators.

    Computed tensors are stored in `spill`; all other tensors are read from the file when needed. eight_bits: Convert
    4-bit weights to 8 bits.

    Raises:
        ModelBuildError: Scales are not finite, or weights are too large for float16 scales.
    """
    found = _FORMATS.get(stored.kind)
    if found is None or (eight_bits and found.bits != 8):
        rounded = _round(stored, spill)
        return KeptWeight(stored, rounded, _error(stored, rounded))
    quantized = _as_stored(stored, found)
    _check_finite(stored, quantized)
    return KeptWeight(stored, quantized, 0.0 if found.exact else _error(stored, quantized))


def join_quantized(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join weights side by side; None if their formats differ."""
    first = parts[0]
    kinds = {(part.bits, part.symmetric, part.minimum, part.scales.dtype) for part in parts}
    if len(kinds) > 1:
        return None

    def joined(tensors: Sequence[ir.TensorProtocol | None]) -> ir.TensorProtocol | None:
        present = [tensor for tensor in tensors if tensor is not None]
        if not present:
            return None
        rows, columns = present[0].shape.numpy()[0], sum(tensor.shape.numpy()[1] for tensor in present)
        return lazy(
            lambda: np.concatenate([tensor.numpy() for tensor in present], axis=1),
            present[0].dtype,
            ir.Shape([rows, columns]),
        )

    q, scales = joined([part.q for part in parts]), joined([part.scales for part in parts])
    assert q is not None and scales is not None
    return QuantizedWeight(first.bits, GROUP, q, scales, minimums=joined([part.minimums for part in parts]))


def _as_stored(stored: StoredWeight, found: _Format) -> QuantizedWeight:
    n, k = stored.shape

    def read(part: Callable[[np.ndarray], np.ndarray], dtype: type[np.generic]) -> Callable[[], np.ndarray]:
        def compute() -> np.ndarray:
            array = part(stored.stored().reshape(n, -1, found.block_bytes)).reshape(n, -1)
            return np.ascontiguousarray(array.T).astype(dtype, copy=False)

        return compute

    groups = ir.Shape([k // GROUP, n])
    whole, q_type = (np.uint8, ir.DataType.UINT8) if found.minimums else (np.int8, ir.DataType.INT8)
    return QuantizedWeight(
        found.bits,
        GROUP,
        lazy(read(found.q, whole), q_type, ir.Shape([k, n])),
        lazy(read(found.scales, np.float16), ir.DataType.FLOAT16, groups),
        minimums=lazy(read(found.minimums, np.float32), ir.DataType.FLOAT, groups) if found.minimums else None,
    )


def _check_finite(stored: StoredWeight, quantized: QuantizedWeight) -> None:
    for part in (quantized.scales, quantized.minimums):
        if part is not None and not np.isfinite(part.numpy()).all():
            raise ModelBuildError(
                f"tensor {stored.name!r} ({stored.kind}) has scales that are NaN, infinite or too large for float16; "
                "download the file again"
            )


def _round(stored: StoredWeight, spill: TensorSpill) -> QuantizedWeight:
    n, k = stored.shape
    groups = -(-k // GROUP)
    q, scales = np.empty((k, n), np.int8), np.empty((groups, n), np.float16)
    for start in range(0, n, stored.rows_at_once):
        stop = min(n, start + stored.rows_at_once)
        part = np.zeros((stop - start, groups * GROUP), np.float32)
        part[:, :k] = stored.floats(start, stop)
        integers, found = _round_groups(part.reshape(stop - start, groups, GROUP), stored.name)
        q[:, start:stop] = integers.reshape(stop - start, -1)[:, :k].T
        scales[:, start:stop] = found.T
    return QuantizedWeight(
        8,
        GROUP,
        spill.add(f"{stored.name}.q", q, ir.DataType.INT8),
        spill.add(f"{stored.name}.scales", scales, ir.DataType.FLOAT16),
    )


def _round_groups(groups: np.ndarray, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Quantize groups, float32 [rows, groups, 32], to int8 and float16 scales [rows, groups]."""
    peak = np.abs(groups).max(axis=-1)
    with np.errstate(over="ignore", invalid="ignore"):
        largest = (peak / np.float32(_STEPS) * np.float32(max(_SCALE_FACTORS))).astype(np.float16)
    if not np.isfinite(largest).all():
        raise ModelBuildError(f"tensor {name!r} holds NaN, infinity or weights that are too large for float16 scales")
    least = np.full(peak.shape, np.inf, np.float32)
    scales = np.zeros(peak.shape, np.float16)
    q = np.zeros(groups.shape, np.int8)
    smallest = np.float16(np.finfo(np.float16).smallest_subnormal)
    for factor in _SCALE_FACTORS:
        scale = np.maximum((peak / np.float32(_STEPS) * np.float32(factor)).astype(np.float16), smallest)
        wide = scale.astype(np.float32)[..., None]
        found = np.clip(np.rint(groups / wide), -_STEPS, _STEPS)
        loss = np.square((groups - found * wide) / np.maximum(peak, np.float32(1e-30))[..., None]).sum(axis=-1)
        better = loss < least
        least, scales = np.where(better, loss, least), np.where(better, scale, scales)
        np.copyto(q, found.astype(np.int8), where=better[..., None])
    return q, scales


def _error(stored: StoredWeight, quantized: QuantizedWeight) -> float:
    matrix = quantized.matrix()
    squares = lost = 0.0
    for start in range(0, stored.shape[0], stored.rows_at_once):
        exact = stored.floats(start, start + stored.rows_at_once)
        part = matrix[:, start : start + len(exact)].T
        squares += float(np.vdot(exact, exact))
        difference = part - exact
        lost += float(np.vdot(difference, difference))
    if not np.isfinite(squares):
        raise ModelBuildError(f"tensor {stored.name!r} ({stored.kind}) holds NaN or infinity")
    error = (lost / squares) ** 0.5 if squares else 0.0
    return error if error > _NEGLIGIBLE else 0.0
