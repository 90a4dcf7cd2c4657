"""What the passes of one run share."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from ortolan.progress import Progress, Stage, no_progress

from ..files.model_file import ModelFile, external_tensors, release_maps
from ..files.spill import TensorSpill
from ..find.linear import Linear, find_linears, layer_key
from ..find.quantized_weight import QuantizedWeight
from ..measure.decoding import Decoded
from ..measure.evidence import Evidence
from ..measure.feeds import Outputs
from ..operators.nodes import NewNames
from ..operators.replacement import Stored
from ..options import PassOptions
from ..report.optimization import LayerReport, OptimizationReport
from .caches import Caches
from .layers import Layers
from .plan.plan import LEAST, Plan


@dataclass(frozen=True)
class Reference:
    """Answers of the pruned and quantized model before any layer was replaced, on the feeds of pass verify."""

    answers: list[Outputs]
    decoded: Decoded | None  # to calls that read its cache
    in_float: bool = False  # of the original's dequantized weights in float, where the original rounds activations


@dataclass
class PassContext:
    """Everything the passes of one run share, apart from the model itself."""

    evidence: Evidence  # of the model as it was given, and the feeds
    source: ModelFile  # what the passes change
    report: OptimizationReport
    candidate: Path  # where the optimized model is written: in a folder on the output's disk, removed at the end
    spill: TensorSpill
    portable: bool = True
    dry_run: bool = False
    may_differ: bool = False  # whether a model that differs much is saved with a warning: verify_difference.py
    least_cosine: float | None = None  # of each output; None: a search judges by its budget
    optional_may_fail: bool = True  # whether a pass that the user did not name is left out where it fails
    progress: Progress = no_progress
    plan: Plan = field(default_factory=Plan)  # what the recipe is going to do
    layers: Layers = field(default_factory=Layers)
    caches: Caches = field(default_factory=Caches)
    # Numbers of weights that are known before any pass runs, by the weight's name: the graph holds what they stand for,
    # and pass replace packs them.
    given: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    reference: Reference | None = None  # kept for pass verify
    _mapped: list[ir.ExternalTensor] = field(default_factory=list)
    _names: NewNames | None = None

    def __post_init__(self) -> None:
        self._mapped = list(external_tensors(self.source.model))

    def survey(self, model: ir.Model) -> list[Linear]:
        """The model's linear layers. The first call starts the report and remembers the original weights."""
        found = find_linears(model)
        if not self.layers.reports:
            for layer in found:
                self.layers.add(layer)
                if isinstance(layer, Linear) and layer.weight_names[-1] in self.given:
                    self.layers.take(layer, self.given[layer.weight_names[-1]])
            self.report.layers = list(self.layers.reports.values())
        return [item for item in found if isinstance(item, Linear)]

    def layer(self, linear: Linear) -> LayerReport:
        return self.layers.reports[layer_key(linear)]

    def gains(self, linear: Linear, stored: Stored) -> bool:
        """Whether a layer is worth changing so that this is stored: some pass replaces it then, or the recipe has
        none."""
        return self.plan.gains(linear, stored, self.layers.state(linear))

    def why_not_quantized(self, linear: Linear, stored: Stored | None = None) -> str | None:
        """Why no pass replaces a layer that a pass quantizes, so that this is stored; None: one does."""
        state = self.layers.state(linear)
        return self.plan.why_not_quantized(linear, LEAST if stored is None else stored, state)

    def leave(self, linear: Linear, reason: str) -> None:
        """Puts into the report why a layer is not quantized, for good."""
        self.layer(linear).reason = self.layers.left[layer_key(linear)] = reason

    def telling(self, stage: Stage) -> Callable[[int, int], None]:
        """What long work calls with (done, total)."""
        return lambda done, total: self.progress(stage, done, total)

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def new_name(self, model: ir.Model, wanted: str) -> str:
        """A name that no value of the model has, subgraphs included."""
        self._names = self._names or NewNames(model)
        return self._names(wanted)

    def release(self) -> None:
        """Unmaps the input's data; the next access maps it again."""
        release_maps(self._mapped)


class RecipePass(ir.passes.InPlacePass, abc.ABC):
    """A pass that a recipe may name. Its options are a PassOptions dataclass."""

    options_type: ClassVar[type[PassOptions]] = PassOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__()
        self.options = options
        self.context = context
