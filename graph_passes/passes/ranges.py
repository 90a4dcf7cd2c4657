"""Record inputs and outputs of linear layers, to choose fixed ranges of activations (static quantization).

The pass runs the model as earlier passes left it (pruned, with rounded weights), on all feeds. Pass `replace` chooses
the ranges from the recorded values (quantizers/fixed_range.py).
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
    """Options of pass `ranges`."""

    max_values: int = field(default=1 << 18, metadata=takes("int", low=16))  # elements sampled from each value


@dataclass(frozen=True, eq=False)
class _Value:
    x: ir.Value
    k: int
    dtype: ir.DataType


class RangesPass(RecipePass):
    """Fill `context.layers.activations`. The model is not changed."""

    options_type = RangesOptions
    options: RangesOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the model on the feeds and record a sample of each layer's input and output."""
        context = self.context
        linears = context.survey(model)
        if context.dry_run and context.evidence.made_up:
            context.note("pass 'ranges' needs calibration inputs (calibration=…): without them, a run fails")
        if context.dry_run or not linears:
            return ir.passes.PassResult(model, modified=False)
        if context.evidence.made_up:
            raise CalibrationError(
                "pass 'ranges' needs calibration inputs: ranges of synthetic inputs would clip real ones; give "
                "calibration=… with typical inputs (an .npz file, a dict of arrays, or a list of such dicts), or use a "
                "recipe without this pass, which computes ranges at run time"
            )
        watched = {linear.x: _Value(linear.x, linear.k, linear.dtype) for linear in linears}
        watched |= {linear.output: _Value(linear.output, linear.n, linear.dtype) for linear in linears}
        with context.evidence.recording(model, list(watched.values())) as recorder:
            samples = recorder.samples(
                recorder.names,
                self.options.max_values,
                context.telling(Stage.RANGES),
            )
        idle = []
        for name in recorder.names:
            if name not in samples:
                raise CalibrationError(
                    f"value {name!r} is empty on the calibration feeds, so it has no range; give feeds that contain "
                    "tokens"
                )
            if not np.isfinite(samples[name]).all():
                raise CalibrationError(
                    f"value {name!r} holds NaN or infinity on the calibration feeds, so it has no range; give other "
                    "feeds, look for NaN in the model's own constants, or use a recipe without pass 'ranges', which "
                    "computes ranges at run time"
                )
            if not samples[name].any():
                idle.append(name)
        if idle:
            raise CalibrationError(
                f"{len(idle)} values, such as {idle[0]!r}, are zero on all calibration feeds, so any other value would "
                "be clipped; give typical feeds"
            )
        context.layers.activations = samples
        return ir.passes.PassResult(model, modified=False)
