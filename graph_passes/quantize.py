"""Rounds the weights of linear layers to whole numbers of 8 or 4 bits, except where no pass `replace` would gain.

Round to nearest, symmetric. W is [k, n]. A scale belongs to a column (int8), or to 32, 64 or 128 inputs of a column
(int4; the last group may be shorter). Zero stays zero, so no error comes from what was pruned:

    int8   scale = max(max |W| / 127, 2^-126)           q = rint(W / scale), in -127 … 127
    int4   scale = max(bf16(max |W| / 7), 2^-126)       q = rint(W / scale), in -7 … 7
    all W of a column or group zero: scale = 0, q = 0

Arithmetic is float32, bf16() rounds to nearest even. No q needs clipping: |W| / scale exceeds 127 by a rounding of
float32 at most, and 7 by 7 * 2^-8, for bf16() loses at most 2^-8 of the scale; so rint gives 127 and 7 at most.

    |W - scale q| <= scale / 2 (1 + 2^-16)

1/2 from rint, and |W| / scale * 2^-24 < 2^-17 from the division. 2^-126 is the smallest normal number: scales below it
are coarse themselves, which would break the bound, and arithmetic that flushes denormals would take them for zero.

The layer itself gets float(scale q) as a lazy weight of its own type, which rounds once more, and never to infinity.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, RecipeError

from .constants import lazy
from .linear import Linear
from .model_file import release_maps
from .options import Globs, PassOptions, takes
from .pipeline import PassContext, RecipePass
from .weights import WeightGroup, group_layers

# As kInt8Bitmap and kInt4Bitmap in ops/formats: the kernels keep sums over all inputs in int32.
MAX_INPUTS = 1 << 17

_GROUP_SIZES = (32, 64, 128)
_SMALLEST_SCALE = np.float32(2.0**-126)
_CHUNK = 1 << 22  # weights that are rounded at once


@dataclass(frozen=True)
class QuantizeOptions(PassOptions):
    method: str = field(default="rtn", metadata=takes("str", choices=("rtn",)))
    bits: int = field(default=8, metadata=takes("int", choices=(4, 8)))
    # Inputs that share a scale; None: 128 with 4 bits, and all of a column with 8 bits, which take no other.
    group_size: int | None = field(default=None, metadata=takes("int", choices=_GROUP_SIZES, none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.bits == 8 and self.group_size is not None:
            raise RecipeError(
                f"group_size is {self.group_size}, expected none with bits = 8, which has one scale a column; "
                "leave it out, or set bits = 4"
            )

    @property
    def quantization(self) -> Quantization:
        return Quantization(self.bits, None if self.bits == 8 else self.group_size or 128)


@dataclass(frozen=True)
class Quantization:
    """How a weight is stored: whole numbers of so many bits, and a scale a group of inputs (None: a column)."""

    bits: int
    group_size: int | None


@dataclass(frozen=True)
class QuantizedWeight(Quantization):
    """W = scales q, [k, n]. The numbers lie in a file; whoever reads them unmaps them again (release_maps)."""

    q: ir.ExternalTensor  # int8 [k, n], also for 4 bits
    scales: ir.ExternalTensor  # float32 [groups, n]; of int4 each is a bf16 number

    def matrix(self) -> np.ndarray:
        """scales q as float32 [k, n]; what would overflow is infinite."""
        q, scales = self.q.numpy(), self.scales.numpy()
        weights = np.empty(q.shape, np.float32)
        rows = self.group_size or len(q)
        with np.errstate(over="ignore"):
            for group, start in enumerate(range(0, len(q), rows)):
                np.multiply(q[start : start + rows], scales[group], out=weights[start : start + rows])
        del q, scales
        release_maps([self.q, self.scales])
        return weights


class QuantizePass(RecipePass):
    """Round to nearest, symmetric, in groups; see the top of this file."""

    options_type = QuantizeOptions
    options: QuantizeOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        context.quantizations.append(self._plan)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        options, context = self.options, self.context
        groups = group_layers(
            context, context.survey(model), options.select, options.exclude, "quantize", "quantization"
        )
        for number, group in enumerate(groups):
            context.progress("quantize", number, len(groups))
            self._quantize(model, group)
            context.release()
        context.progress("quantize", len(groups), len(groups))
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _plan(self, linear: Linear) -> Quantization | None:
        """How this pass is going to quantize a layer, if it does."""
        chosen = linear.matches(self.options.select) and not linear.matches(self.options.exclude)
        return self.options.quantization if chosen and linear.k <= MAX_INPUTS else None

    def _quantize(self, model: ir.Model, group: WeightGroup) -> None:
        """Quantizes one weight, or says in the report why not."""
        context, chosen = self.context, self.options.quantization
        group.linears = [linear for linear in group.linears if context.layer(linear).weight_bits is None]
        if not group.linears:  # an earlier pass of this kind has done it
            return
        first = group.linears[0]
        if first.k > MAX_INPUTS:
            reason = f"it has {first.k} inputs, and a sum of more than {MAX_INPUTS} quantized products may overflow"
            for linear in group.linears:
                context.layer(linear).reason = reason
            return
        if context.dry_run:
            for linear in group.linears:
                layer = context.layer(linear)
                layer.status, layer.bytes_after, layer.weight_bits = "quantized", group.weight.nbytes, chosen.bits
            return
        q, scales = round_to_nearest(first.matrix(), group.weight_name, chosen)
        stored = int(np.count_nonzero(q))
        group.linears = [linear for linear in group.linears if context.gains(linear, stored)]
        if not group.linears:
            return
        weight = QuantizedWeight(
            chosen.bits,
            chosen.group_size,
            context.spill.add(f"{group.weight_name}.q", q, ir.DataType.INT8),
            context.spill.add(f"{group.weight_name}.scales", scales, ir.DataType.FLOAT),
        )
        value = group.put(model, context, dequantized_tensor(weight, first.transposed, first.dtype), "quantized")
        context.quantized[dataclasses.replace(first, weight_value=value).weight_key] = weight
        for linear in group.linears:
            layer = context.layer(linear)
            layer.sparsity, layer.weight_bits = (q.size - stored) / q.size, chosen.bits


def round_to_nearest(matrix: np.ndarray, name: str, quantization: Quantization) -> tuple[np.ndarray, np.ndarray]:
    """q, int8 [k, n], and scales, float32 [groups, n], of W, float32 [k, n], as the top of this file says.

    Raises ModelError if a weight is not finite.
    """
    k, n = matrix.shape
    rows = quantization.group_size or k
    q = np.empty((k, n), np.int8)
    scales = np.empty((-(-k // rows), n), np.float32)
    for group, start in enumerate(range(0, k, rows)):
        part = matrix[start : start + rows]
        largest = np.maximum(part.max(axis=0), -part.min(axis=0))
        if not np.isfinite(largest).all():
            raise ModelError(
                f"weight {name!r} holds NaN or infinity, so it cannot be quantized; export the model again, or "
                "exclude this layer"
            )
        scale = largest / np.float32(2 ** (quantization.bits - 1) - 1)
        if quantization.bits == 4:
            scale = scale.astype(ir.DataType.BFLOAT16.numpy()).astype(np.float32)
        scales[group] = np.where(largest > 0, np.maximum(scale, _SMALLEST_SCALE), 0)
        divisors = np.where(largest > 0, scales[group], 1)
        step = max(1, _CHUNK // n)
        for first in range(0, len(part), step):
            quotients = part[first : first + step] / divisors
            q[start + first : start + first + len(quotients)] = np.rint(quotients, out=quotients)
    return q, scales


def dequantized_tensor(weight: QuantizedWeight, transposed: bool, dtype: ir.DataType) -> ir.LazyTensor:
    """The layer's weight, [k, n] or transposed, computed when it is asked for; beyond the type's range its largest."""

    def compute() -> np.ndarray:
        matrix = weight.matrix()
        largest = np.float32(dtype.max)
        np.clip(matrix, -largest, largest, out=matrix)
        return (matrix.T if transposed else matrix).astype(dtype.numpy(), copy=False)

    shape = weight.q.shape.numpy()
    return lazy(compute, dtype, ir.Shape(shape[::-1] if transposed else shape))
