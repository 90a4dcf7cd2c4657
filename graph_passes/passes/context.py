"""State that the passes of one run share."""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import onnx_ir as ir

from ortolan.progress import Progress, Stage, no_progress

from ..files.model_file import ModelFile, data_path, external_tensors, load_model, release_maps, write_model
from ..files.spill import TensorSpill
from ..find.experts import GivenExperts, router_layers
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
from .plan.plan import SMALLEST, Plan


@dataclass(frozen=True)
class Reference:
    """Answers of the pruned and quantized model on the feeds of pass verify, before any layer is replaced."""

    answers: list[Outputs]
    decoded: Decoded | None  # answers to calls that read the cache
    in_float: bool = False  # True: float layers with dequantized weights; used if the original rounds activations


@dataclass
class PassContext:
    """Everything that the passes of one run share, except the model."""

    evidence: Evidence  # the feeds, and sessions of the original model
    source: ModelFile  # the model that the passes change
    report: OptimizationReport
    candidate: Path  # temporary path of the optimized model, on the disk of the output
    spill: TensorSpill
    portable: bool = True
    dry_run: bool = False
    may_differ: bool = False  # if outputs differ much, save the model with a warning (verify/difference.py)
    min_cosine: float | None = None  # limit of the outputs' cosine; None: no limit, or a search checks it
    reproducible: bool = False  # the bytes must not depend on the CPU, even if the recipe replaces no attention
    optional_may_fail: bool = True  # if an optional pass fails (run.py), skip it instead of raising an error
    progress: Progress = no_progress
    plan: Plan = field(default_factory=Plan)  # decisions that follow from the recipe's options
    layers: Layers = field(default_factory=Layers)
    caches: Caches = field(default_factory=Caches)
    # Quantized weights given with the model, by the weight's name. The graph holds their dequantized values; pass
    # replace packs the integers.
    given: Mapping[str, QuantizedWeight] = field(default_factory=dict)
    given_experts: Mapping[str, GivenExperts] = field(default_factory=dict)  # the same for pass experts
    reference: Reference | None = None  # kept for pass verify
    _mapped: list[ir.ExternalTensor] = field(default_factory=list)
    _names: NewNames | None = None

    def __post_init__(self) -> None:
        self._mapped = list(external_tensors(self.source.model))

    def survey(self, model: ir.Model) -> list[Linear]:
        """Return the model's linear layers, except routers of experts, which stay float.

        The first call starts the report and remembers the original weights.
        """
        found = find_linears(model)
        if not self.layers.reports:
            for layer in found:
                self.layers.add(layer)
                if isinstance(layer, Linear) and layer.weight_names[-1] in self.given:
                    self.layers.take(layer, self.given[layer.weight_names[-1]])
            self.report.layers = list(self.layers.reports.values())
            if self.plan.replaces_experts:
                self._keep_routers(model, [item for item in found if isinstance(item, Linear)])
        return [item for item in found if isinstance(item, Linear) and layer_key(item) not in self.layers.routers]

    def _keep_routers(self, model: ir.Model, linears: Sequence[Linear]) -> None:
        """Keep routers float: a rounded router selects other experts."""
        for linear in router_layers(model, linears):
            key = layer_key(linear)
            if self.layers.reports[key].weight_bits is None:  # no weight is given
                self.layers.routers.add(key)
                self.leave(linear, "it routes tokens to experts, and stays float")

    def layer(self, linear: Linear) -> LayerReport:
        """Return the report of a layer."""
        return self.layers.reports[layer_key(linear)]

    def gains(self, linear: Linear, stored: Stored) -> bool:
        """Return True if a pass would replace the layer once its weight is `stored`, or if no pass replaces layers."""
        return self.plan.gains(linear, stored, self.layers.state(linear))

    def why_not_quantized(self, linear: Linear, stored: Stored | None = None) -> str | None:
        """Explain why no pass would replace the layer after it is quantized; None if one would.

        stored: the quantized weight; None: not known yet.
        """
        state = self.layers.state(linear)
        return self.plan.why_not_quantized(linear, SMALLEST if stored is None else stored, state)

    def leave(self, linear: Linear, reason: str) -> None:
        """Report why a layer is not quantized. Later passes do not change this reason."""
        self.layer(linear).reason = self.layers.left[layer_key(linear)] = reason

    def telling(self, stage: Stage) -> Callable[[int, int], None]:
        """Return a callback (done, total) that reports the progress of a stage."""
        return lambda done, total: self.progress(stage, done, total)

    def note(self, text: str) -> None:
        """Add a note to the report, once."""
        if text not in self.report.notes:
            self.report.notes.append(text)

    def new_name(self, model: ir.Model, wanted: str) -> str:
        """Return a name that no value of the model or its subgraphs has."""
        self._names = self._names or NewNames(model)
        return self._names(wanted)

    def release(self) -> None:
        """Unmap the input model's data; the next access maps it again."""
        release_maps(self._mapped)

    def write_again(self, embed_limit: int | None = None) -> None:
        """Write the model, changed after `candidate` was written, to `candidate`, and load it from there.

        embed_limit: As for `write_model`.
        """
        # Write to another folder, because the weights may be in the file that is replaced.
        written = self.evidence.new_folder() / self.candidate.name
        write_model(self.source.model, written, self.telling(Stage.WRITE), embed_limit)
        self.release()
        for new, old in ((written, self.candidate), (data_path(written), data_path(self.candidate))):
            old.unlink(missing_ok=True)
            if new.exists():
                os.replace(new, old)
        self.source.model = load_model(self.candidate).model


class RecipePass(ir.passes.InPlacePass, abc.ABC):
    """A pass that a recipe can name. Its options are a PassOptions dataclass."""

    options_type: ClassVar[type[PassOptions]] = PassOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__()
        self.options = options
        self.context = context
