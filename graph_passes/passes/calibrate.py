"""Records what goes into the linear layers of the original, to measure the errors of their new forms."""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from ortolan.progress import Stage

from ..options import PassOptions, takes
from .context import RecipePass


@dataclass(frozen=True)
class CalibrateOptions(PassOptions):
    max_rows: int = field(default=64, metadata=takes("int", low=1))  # inputs (tokens) kept for each layer
    # Every so-manieth of the feeds is kept from what fits weights to inputs, and errors of layers and of the whole
    # model are measured on these. 0, or more than there are feeds: none.
    held_out: int = field(default=0, metadata=takes("int", low=0))


class CalibratePass(RecipePass):
    """Records inputs of the linear layers; changes nothing."""

    options_type = CalibrateOptions
    options: CalibrateOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
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
