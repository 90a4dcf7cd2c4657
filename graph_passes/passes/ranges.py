"""Records what linear layers take in and put out, for fixed ranges of quantized activations (static quantization).

It runs the model as the passes before have left it (pruned, with rounded weights), on all feeds. Pass `replace` chooses
the ranges from what is recorded (quantizers/fixed_range.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError
from ortolan.progress import Stage

from ..options import PassOptions, takes
from .context import RecipePass


@dataclass(frozen=True)
class RangesOptions(PassOptions):
    max_values: int = field(default=1 << 18, metadata=takes("int", low=16))  # kept of each value


@dataclass(frozen=True, eq=False)
class _Value:
    x: ir.Value
    k: int
    dtype: ir.DataType


class RangesPass(RecipePass):
    """Fills context.layers.activations; changes nothing."""

    options_type = RangesOptions
    options: RangesOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        linears = context.survey(model)
        if context.dry_run and context.evidence.made_up:
            context.note("pass 'ranges' needs calibration inputs (calibration=…): without them, a run is refused")
        if context.dry_run or not linears:
            return ir.passes.PassResult(model, modified=False)
        if context.evidence.made_up:
            raise CalibrationError(
                "pass 'ranges' needs calibration inputs: ranges of made-up ones would cut off real ones; give "
                "calibration=… with typical inputs (an .npz file, a dict of arrays, or a list of such dicts), or use a "
                "recipe without this pass, which finds ranges when the model runs"
            )
        watched = {linear.x: _Value(linear.x, linear.k, linear.dtype) for linear in linears}
        watched |= {linear.output: _Value(linear.output, linear.n, linear.dtype) for linear in linears}
        with context.evidence.recording(model, list(watched.values())) as recorder:
            numbers = recorder.samples(
                recorder.names,
                self.options.max_values,
                context.telling(Stage.RANGES),
            )
        idle = []
        for name in recorder.names:
            if name not in numbers:
                raise CalibrationError(
                    f"value {name!r} is empty on the calibration feeds, so it has no range; give feeds with tokens in "
                    "them"
                )
            if not np.isfinite(numbers[name]).all():
                raise CalibrationError(
                    f"value {name!r} holds NaN or infinity on the calibration feeds, so it has no range; give other "
                    "feeds, look for NaN in the model's own constants, or use a recipe without pass 'ranges', which "
                    "finds ranges when the model runs"
                )
            if not numbers[name].any():
                idle.append(name)
        if idle:
            raise CalibrationError(
                f"{len(idle)} values, such as {idle[0]!r}, are zero throughout the calibration feeds, so whatever else "
                "they are later would be cut off; give typical feeds"
            )
        context.layers.activations = numbers
        return ir.passes.PassResult(model, modified=False)
