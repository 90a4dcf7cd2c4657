"""Quantized weights of GGUF files in the formats of Ortolan's operators.

    Q4_0               4 bits, q - 8, with a scale per 32 inputs                              kept exactly
    Q4_1               4 bits, q, with scale and minimum per 32 inputs                        kept exactly
    Q8_0               8 bits with a scale per 32 inputs                                      kept exactly
    MXFP4              5 bits: twice its values are integers                                  kept exactly
    Q5_0, Q5_1         5 bits, like Q4_0 and Q4_1; K-quants of ops/formats/k_quant.h          kept exactly
    Q2_K to Q6_K       K-quants with 256 inputs per scale; Q2_K and Q3_K occupy 4 bits        kept exactly
    all others         8 bits with a scale per 32 inputs, the one with least squared error    rounded; floats too

On request, weights of more bits are rounded to Q6_K, or to 4, 5 or 6 bits in subgroups (ops/formats/subgroup.h).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.find.constants import lazy
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.weights.quantizers.grid import Quantization, dequantize
from ortolan.graph_passes.weights.quantizers.k_quants import round_to_q6_k
from ortolan.graph_passes.weights.quantizers.mse import round_mse

from ..graph_builder import ModelBuildError
from .file import StoredWeight

GROUP = 32
_SUPER_BLOCK = 256  # number of inputs in a block of a K-quant
_ROWS_TO_TRANSPOSE = 256  # at a time, so that both sides stay in the cache
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
        minimums = " with minimums" if self.quantized.minimum else ""
        size = self.quantized.subgroup_size or self.quantized.group_size
        return f"{self.quantized.bits} bits{minimums} in groups of {size}"


Part = Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True)
class _Format:
    """A GGUF type that stores each row of a weight as blocks, uint8 [n, blocks, bytes].

    The functions take the blocks. q returns [n, blocks, inputs]; the others return scales, and minimums if the type has
    them, [n, groups]; and their integer factors, [n, blocks, subgroups], if groups have several subgroups.
    """

    bits: int
    block_bytes: int
    q: Part
    scales: Part
    minimums: Part | None = None
    subgroup_scales: Part | None = None
    subgroup_minimums: Part | None = None
    group: int = GROUP
    subgroup: int | None = None
    zero: int | None = None  # Quantization.k_quant_zero


def _half(start: int) -> Part:
    """Return a function that reads the float16 at this byte of each block, [n, blocks]."""
    return lambda blocks: np.ascontiguousarray(blocks[..., start : start + 2]).view(np.float16)[..., 0]


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """Unpack […, bytes] to […, 2 * bytes]: low nibbles, then high nibbles."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _fifth_bits(packed: np.ndarray) -> np.ndarray:
    """Unpack […, 4] to […, 32]: 16 for bits that are set."""
    bits: np.ndarray = np.unpackbits(packed, axis=-1, bitorder="little") << 4
    return bits


def _in_rows(packed: np.ndarray, width: int) -> np.ndarray:
    """Split […, bytes] into […, rows, width]."""
    return packed.reshape(*packed.shape[:-1], -1, width)


def _flat(parts: np.ndarray) -> np.ndarray:
    """Join all axes after [n, blocks]."""
    return parts.reshape(*parts.shape[:2], -1)


def _shifted(packed: np.ndarray, shifts: range, mask: int) -> np.ndarray:
    """Return packed >> each shift, masked: […, rows, shifts, width] of […, rows, width]."""
    return np.stack([packed >> shift & mask for shift in shifts], axis=-2)


def _six_bits(start: int) -> Part:
    """Return a function that reads eight 6-bit integers, [n, blocks, 8], of Q4_K and Q5_K.

    start: 4 for scales, 8 for minimums. The 12 bytes are four scales, four minimums, and the low bits of four more of
    each; the high bits of these are in the first eight bytes.
    """

    def read(blocks: np.ndarray) -> np.ndarray:
        own, both = blocks[..., start : start + 4], blocks[..., 12:16]
        low = both & 15 if start == 4 else both >> 4
        return np.concatenate([own & 63, low | ((own >> 2) & 48)], axis=-1)

    return read


def _minus(part: Part) -> Part:
    return lambda blocks: -part(blocks)


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    return _flat(_shifted(_in_rows(blocks[..., 16:80], 32), range(0, 8, 2), 3))


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    low = _shifted(_in_rows(blocks[..., 32:96], 32), range(0, 8, 2), 3)
    high = _shifted(_in_rows(blocks[..., :32], 32), range(8), 1).reshape(low.shape)
    # q is low - 4 (1 - high): 8 is its zero point here.
    return _flat(low + (high << 2) + np.uint8(4))


def _q3_k_scales(blocks: np.ndarray) -> np.ndarray:
    low, high = _in_rows(blocks[..., 96:104], 4), blocks[..., 104:108]
    quarters = np.concatenate([low & 15, low >> 4], axis=-2)  # [n, blocks, 4, 4]
    scales = quarters | _shifted(high[..., None, :], range(0, 8, 2), 3)[..., 0, :, :] << 4
    return _flat(scales).view(np.int8) - np.int8(32)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    return _flat(_nibbles(_in_rows(blocks[..., 16:], GROUP)))  # each row holds the nibbles of two subgroups


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(_in_rows(blocks[..., 48:], GROUP))
    high = _shifted(_in_rows(blocks[..., 16:48], GROUP), range(8), 1)
    joined: np.ndarray = _flat(low) | _flat(high) << 4
    return joined


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _nibbles(_in_rows(blocks[..., :128], 64))
    high = _shifted(_in_rows(blocks[..., 128:192], 32), range(0, 8, 2), 3)
    joined: np.ndarray = _flat(low) | _flat(high) << 4
    return joined


def _q6_k_scales(blocks: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(blocks[..., 192:208]).view(np.int8)


# The values of a 4-bit float (E2M1), doubled to integers; scales are halved. They are stored in 5 bits, around 16.
_MXFP4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.int8)
_MXFP4_ZERO = 16


def _mxfp4(blocks: np.ndarray) -> np.ndarray:
    q: np.ndarray = _MXFP4[_nibbles(blocks[..., 1:])] + np.int8(_MXFP4_ZERO)
    return q.view(np.uint8)


def _mxfp4_scales(blocks: np.ndarray) -> np.ndarray:
    scales: np.ndarray = np.ldexp(np.float32(1), blocks[..., 0].astype(np.int32) - 128)
    return scales


def _fit_float16(exponents: np.ndarray) -> bool:
    """Return whether float16 holds these scales exactly, from 2^-24 to 2^15."""
    return bool(((exponents >= 128 - 24) & (exponents <= 128 + 15)).all())


_OF_Q4_K_AND_Q5_K: dict[str, Any] = {
    "scales": _half(0),
    "minimums": _minus(_half(2)),
    "subgroup_scales": _six_bits(4),
    "subgroup_minimums": _six_bits(8),
    "group": _SUPER_BLOCK,
    "subgroup": GROUP,
    "zero": 0,
}
_FORMATS = {
    "Q4_0": _Format(4, 18, lambda blocks: _nibbles(blocks[..., 2:]).view(np.int8) - np.int8(8), _half(0)),
    "Q4_1": _Format(4, 20, lambda blocks: _nibbles(blocks[..., 4:]), _half(0), _half(2)),
    "Q8_0": _Format(8, 34, lambda blocks: blocks[..., 2:].view(np.int8), _half(0)),
    "MXFP4": _Format(5, 17, _mxfp4, _mxfp4_scales, subgroup=GROUP, zero=_MXFP4_ZERO),
    "Q5_0": _Format(
        5,
        22,
        lambda blocks: _nibbles(blocks[..., 6:]) | _fifth_bits(blocks[..., 2:6]),
        _half(0),
        subgroup=GROUP,
        zero=16,
    ),
    "Q5_1": _Format(
        5,
        24,
        lambda blocks: _nibbles(blocks[..., 8:]) | _fifth_bits(blocks[..., 4:8]),
        _half(0),
        _half(2),
        subgroup=GROUP,
        zero=0,
    ),
    "Q2_K": _Format(
        4,
        84,
        _q2_k,
        _half(80),
        _minus(_half(82)),
        lambda blocks: blocks[..., :16] & 15,
        lambda blocks: blocks[..., :16] >> 4,
        group=_SUPER_BLOCK,
        subgroup=16,
        zero=0,
    ),
    "Q3_K": _Format(4, 110, _q3_k, _half(108), subgroup_scales=_q3_k_scales, group=_SUPER_BLOCK, subgroup=16, zero=8),
    "Q4_K": _Format(4, 144, _q4_k, **_OF_Q4_K_AND_Q5_K),
    "Q5_K": _Format(5, 176, _q5_k, **_OF_Q4_K_AND_Q5_K),
    "Q6_K": _Format(6, 210, _q6_k, _half(208), subgroup_scales=_q6_k_scales, group=_SUPER_BLOCK, subgroup=16, zero=32),
}


def keep_gguf_weight(stored: StoredWeight, spill: TensorSpill, wanted: Quantization | None = None) -> KeptWeight:
    """Return a weight [n, k] of the file in a format of Ortolan's operators.

    Computed tensors are stored in `spill`; all other tensors are read from the file when needed. wanted: The format to
    which weights of at least its bits are rounded, except Q6_K to itself; None: keep weights.

    Raises:
        ModelBuildError: Scales are not finite, or weights are too large for float16 scales.
    """
    found = _FORMATS.get(stored.kind)
    if wanted is not None and not _stays(found, wanted):
        return _round_to(stored, spill, wanted)
    if found is None:
        return _round(stored, spill)
    quantized = _as_stored(stored, found)
    _check_finite(stored, quantized)
    return KeptWeight(stored, quantized, 0.0)


def _stays(found: _Format | None, wanted: Quantization) -> bool:
    # Q6_K itself stays.
    return found is not None and (
        found.bits < wanted.bits or (found.bits == wanted.bits and wanted.k_quant_zero is not None)
    )


def join_quantized(parts: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """Join weights side by side; None if their formats differ."""
    first = parts[0]
    kinds = {(_kind(part), part.symmetric, part.minimum, part.scales.dtype) for part in parts}
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

    tensors = [part.tensors() for part in parts]
    return first.with_tensors({name: joined([one[name] for one in tensors]) for name in tensors[0]})


def keep_experts(
    parts: Sequence[StoredWeight], spill: TensorSpill, wanted: Quantization | None = None
) -> list[list[KeptWeight]]:
    """Return the weights of all experts of tensors [experts, n, k], for each tensor: all in one format.

    wanted: See `keep_gguf_weight`. If the tensors' formats would differ, all become 8 bits.
    """
    kinds = {part.kind for part in parts}
    all_rounded = wanted is not None and not any(_stays(_FORMATS.get(kind), wanted) for kind in kinds)

    def keep(stored: StoredWeight) -> KeptWeight:
        if len(kinds) == 1 or all_rounded:
            return keep_gguf_weight(stored, spill, wanted)
        return _round(stored, spill)

    return [[keep(part.expert(e)) for e in range(part.shape[0])] for part in parts]


def in_turns(first: QuantizedWeight, second: QuantizedWeight) -> QuantizedWeight:
    """Return the columns of two weights of the same format in turns."""

    def both(one: ir.TensorProtocol | None, other: ir.TensorProtocol | None) -> ir.TensorProtocol | None:
        if one is None or other is None:
            return None
        rows, columns = one.shape.numpy()
        # Only scales of MXFP4 may differ in their dtype.
        return lazy(
            lambda: np.stack([one.numpy(), other.numpy()], axis=2).reshape(rows, 2 * columns),
            one.dtype if one.dtype == other.dtype else ir.DataType.FLOAT,
            ir.Shape([rows, 2 * columns]),
        )

    others = second.tensors()
    return first.with_tensors({name: both(one, others[name]) for name, one in first.tensors().items()})


def _kind(weight: QuantizedWeight) -> tuple[int | None, ...]:
    return weight.bits, weight.group_size, weight.subgroup_size, weight.k_quant_zero


def _as_stored(stored: StoredWeight, found: _Format) -> QuantizedWeight:
    n, k = stored.shape

    def tensor(part: Part | None, dtype: type[np.generic], inputs: int = 1) -> ir.TensorProtocol | None:
        """Return the part as [k / inputs, n]."""
        if part is None:
            return None

        def compute() -> np.ndarray:
            result = np.empty((k // inputs, n), dtype)
            for start in range(0, n, _ROWS_TO_TRANSPOSE):
                rows = stored.stored(start, start + _ROWS_TO_TRANSPOSE)
                array = part(rows.reshape(len(rows), -1, found.block_bytes)).reshape(len(rows), -1)
                result[:, start : start + len(rows)] = array.T.astype(dtype, copy=False)  # modulo 256 for bytes
            return result

        return lazy(compute, ir.DataType.from_numpy(np.dtype(dtype)), ir.Shape([k // inputs, n]))

    unsigned = found.zero is not None or found.minimums is not None
    wide = found.scales is _mxfp4_scales and not _fit_float16(stored.stored()[:, :: found.block_bytes])
    scales = tensor(found.scales, np.float32 if wide else np.float16, found.group)
    q = tensor(found.q, np.uint8 if unsigned else np.int8)
    assert q is not None and scales is not None
    return QuantizedWeight(
        found.bits,
        found.group,
        q,
        scales,
        minimums=tensor(found.minimums, np.float32, found.group),
        subgroup_scales=tensor(found.subgroup_scales, np.int8, found.subgroup or 1),
        subgroup_minimums=tensor(found.subgroup_minimums, np.uint8, found.subgroup or 1),
        subgroup_size=found.subgroup,
        k_quant_zero=found.zero,
    )


def _check_finite(stored: StoredWeight, quantized: QuantizedWeight) -> None:
    for part in (quantized.scales, quantized.minimums):
        if part is not None and not np.isfinite(part.numpy()).all():
            raise ModelBuildError(
                f"tensor {stored.name!r} ({stored.kind}) has scales that are NaN, infinite or too large for float16; "
                "download the file again"
            )


def _round(stored: StoredWeight, spill: TensorSpill) -> KeptWeight:
    """Round a weight to 8 bits, some rows at a time."""
    n, k = stored.shape
    groups = -(-k // GROUP)
    q, scales = np.empty((k, n), np.int8), np.empty((groups, n), np.float16)
    squares = lost = 0.0
    for start in range(0, n, stored.rows_at_once):
        stop = min(n, start + stored.rows_at_once)
        part = np.zeros((stop - start, groups * GROUP), np.float32)
        part[:, :k] = stored.floats(start, stop)
        exact = part.reshape(stop - start, groups, GROUP)
        integers, found = _round_groups(exact, stored.name)
        q[:, start:stop] = integers.reshape(stop - start, -1)[:, :k].T
        scales[:, start:stop] = found.T
        difference = integers * found.astype(np.float32)[..., None] - exact
        squares += float(np.vdot(exact, exact))
        lost += float(np.vdot(difference, difference))
    rounded = QuantizedWeight(
        8,
        GROUP,
        spill.add(f"{stored.name}.q", q, ir.DataType.INT8),
        spill.add(f"{stored.name}.scales", scales, ir.DataType.FLOAT16),
    )
    return KeptWeight(stored, rounded, _relative(lost, squares))


def _relative(lost: float, squares: float) -> float:
    error = (lost / squares) ** 0.5 if squares else 0.0
    return error if error > _NEGLIGIBLE else 0.0


def _round_to(stored: StoredWeight, spill: TensorSpill, wanted: Quantization) -> KeptWeight:
    """Round a weight to 4, 5 or 6 bits, some rows at a time."""
    n, _ = stored.shape
    arrays: dict[str, np.ndarray] = {}
    squares = lost = 0.0
    for start in range(0, n, stored.rows_at_once):
        stop = min(n, start + stored.rows_at_once)
        floats = stored.floats(start, stop)
        if not np.isfinite(floats).all():
            raise ModelBuildError(f"tensor {stored.name!r} ({stored.kind}) holds NaN or infinity")
        matrix = np.ascontiguousarray(floats.T)
        rounded = round_mse(matrix, wanted) if wanted.k_quant_zero is None else round_to_q6_k(matrix)
        for name in ("q", "scales", "zero_points", "subgroup_scales"):
            if (part := getattr(rounded, name)) is not None:
                arrays.setdefault(name, np.empty((len(part), n), part.dtype))[:, start:stop] = part
        difference = dequantize(rounded, wanted.group_size, wanted.subgroup_size, wanted.k_quant_zero) - matrix
        squares += float(np.vdot(matrix, matrix))
        lost += float(np.vdot(difference, difference))
    tensors = {
        name: spill.add(f"{stored.name}.{name}", array, ir.DataType.from_numpy(array.dtype))
        for name, array in arrays.items()
    }
    kept = QuantizedWeight(
        wanted.bits,
        wanted.group_size,
        tensors["q"],
        tensors["scales"],
        tensors.get("zero_points"),
        subgroup_scales=tensors["subgroup_scales"],
        subgroup_size=wanted.subgroup_size,
        k_quant_zero=wanted.k_quant_zero,
    )
    return KeptWeight(stored, kept, _relative(lost, squares))


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
