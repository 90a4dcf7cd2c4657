"""Records the range of what linear layers take in and put out, for static quantization of activations.

It runs the model as the passes before have left it (pruned and with rounded weights), on all feeds: what a range leaves
out is cut off later, so feeds should be typical.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from ortolan.errors import CalibrationError
from ortolan.session import open_session

from .calibrate import InputRecorder, feeds_for, quiet_options
from .model_file import data_path, write_model
from .pipeline import RecipePass


@dataclass(frozen=True, eq=False)
class _Value:
    x: ir.Value
    k: int
    dtype: ir.DataType


class RangesPass(RecipePass):
    """Fills context.ranges; changes nothing."""

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        linears = context.survey(model)
        if context.dry_run or not linears:
            return ir.passes.PassResult(model, modified=False)
        feeds = feeds_for(context)
        if context.feeds_made_up:
            context.note(
                "activations are quantized by ranges of made-up inputs, which tell little of real ones; give "
                "calibration=… with typical inputs"
            )
        path = context.candidate.with_name("ranges.onnx")
        watched = {linear.x: _Value(linear.x, linear.k, linear.dtype) for linear in linears}
        watched |= {linear.output: _Value(linear.output, linear.n, linear.dtype) for linear in linears}

        def open_copy() -> object:
            write_model(model, path, lambda done, total: None)
            context.release()
            return open_session(path, quiet_options())

        try:
            recorder = InputRecorder(model, list(watched.values()), feeds, open_copy)
            found = recorder.ranges(recorder.names, lambda done, total: context.progress("ranges", done, total))
        finally:
            for file in (path, data_path(path)):
                file.unlink(missing_ok=True)
        for value in watched:
            low, high = found.get(value.name or "", (0.0, 0.0))
            if not (abs(low) < float("inf") and abs(high) < float("inf")):
                raise CalibrationError(
                    f"value {value.name!r} holds NaN or infinity on the calibration feeds, so it has no range; give other "
                    "feeds, or quantize activations when the model runs (leave pass 'ranges' out)"
                )
            if value.name in found:
                context.ranges[value] = (low, high)
        return ir.passes.PassResult(model, modified=False)
