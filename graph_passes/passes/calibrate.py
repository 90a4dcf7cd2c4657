"""Record inputs of the original model's linear layers, to measure the errors of their new formats."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ortolan.progress import Stage

from ..options import PassOptions, takes
from .context import RecipePass


@dataclass(frozen=True)
class CalibrateOptions(PassOptions):
    """Options of pass `calibrate`."""

    max_rows: int = field(default=64, metadata=takes("int", low=1))  # inputs (tokens) kept for each layer
    # Hold out every n-th feed from calibration, and measure errors of layers and of the model on these feeds; 0
    # disables.
    held_out: int = field(default=0, metadata=takes("int", low=0))


class CalibratePass(RecipePass):
    """Record inputs of the linear layers. The model is not changed."""

    options_type = CalibrateOptions
    options: CalibrateOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the model on the feeds and keep up to `max_rows` input rows for each layer."""
        context = self.context
        linears = context.survey(model)
        if not context.dry_run and linears:
            evidence = context.evidence
            evidence.hold_out(self.options.held_out)
            context.layers.captured |= evidence.rows(
                model,
                linears,
                self.options.max_rows,
                context.telling(Stage.CALIBRATE),
            )
            context.release()
        return ir.passes.PassResult(model, modified=False)
