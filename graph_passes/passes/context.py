"""What the passes of one run share, and how a recipe is run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from ortolan.progress import Progress, Stage, no_progress

from ..files.model_file import ModelFile, external_tensors, release_maps
from ..files.spill import TensorSpill
from ..find.linear import Linear, find_linears, layer_key, op_name
from ..measure.evidence import Evidence
from ..measure.feeds import Feeds, Outputs
from ..options import PassOptions
from ..report.optimization import LayerReport, OptimizationReport
from .plan import Plan
from .replace_rule import LayerState

if TYPE_CHECKING:
    from ..find.quantized_weight import QuantizedWeight
    from ..measure.decoding import Decoded
    from ..weights.cache_format import CacheFormat, CacheUse, ExactKeys
    from .prompt import Prompt


@dataclass
class PassContext:
    """Everything the passes of one optimize_onnx call share, apart from the model itself.

    Layers are identified by the output of their node (layer_key), not by a name: those of nodes need not be unique, and
    those of values may be the same in both branches of an If.
    """

    evidence: Evidence  # of the model as it was given, and the feeds
    source: ModelFile  # what the passes change
    report: OptimizationReport
    candidate: Path  # where the optimized model is written: in a folder on the output's disk, removed at the end
    spill: TensorSpill
    portable: bool = True
    dry_run: bool = False
    progress: Progress = no_progress
    layers: dict[ir.Value, LayerReport] = field(default_factory=dict)
    # Each layer's weight [k, n] before any pass changed it. The numbers stay in the model's file until it is called.
    originals: dict[ir.Value, Callable[[], np.ndarray]] = field(default_factory=dict)
    captured: dict[ir.Value, np.ndarray] = field(default_factory=dict)  # rows of inputs to each layer: [rows, k]
    plan: Plan = field(default_factory=Plan)  # what the recipe is going to do
    # Numbers of values that a pass ranges has recorded, by name.
    activations: dict[str, np.ndarray] = field(default_factory=dict)
    # Below which magnitude a layer's inputs count as zero, or why there is none, by layer_key; see activations.py.
    thresholds: dict[ir.Value, float | str] = field(default_factory=dict)
    names_of_layers: list[str] = field(default_factory=list)  # and of their weights, before any pass changed them
    # For each replaced layer: ||Y - XW|| / ||XW|| with the weight W that was packed.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    # The same for attention that reads its keys and values from a cache, by the output.
    cache_rounding: dict[ir.Value, float] = field(default_factory=dict)
    packed_weights: int = 0  # in all matrices that were packed so far
    unified: list[ir.Node] = field(default_factory=list)  # products of int8 layers in another form (quantized_forms.py)
    quantized: dict[Hashable, QuantizedWeight] = field(default_factory=dict)  # by Linear.weight_key
    # On the feeds of pass verify: the answers of the pruned model before any layer was replaced.
    reference: list[Outputs] | None = None
    decoded_reference: Decoded | None = None  # what that model answered to calls that read its cache
    # Of all attention with a cache, whether or not it is replaced, by the input.
    caches: dict[str, CacheUse] = field(default_factory=dict)
    past_formats: dict[str, CacheFormat] = field(default_factory=dict)  # of inputs that no longer hold floats
    exact_keys: dict[str, ExactKeys] = field(default_factory=dict)  # inputs that the original has not
    prompt_ids: np.ndarray | None = None  # int64 [1, tokens], given by the user
    prompt: Prompt | None = None  # made by a pass cache_prompt
    compressed_outputs: set[str] = field(default_factory=set)  # and the outputs that hold the same a token later
    _mapped: list[ir.ExternalTensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._mapped = list(external_tensors(self.source.model))

    def survey(self, model: ir.Model) -> list[Linear]:
        """The model's linear layers. The first call starts the report and remembers the original weights."""
        found = find_linears(model)
        if not self.layers:
            for item in found:
                self.names_of_layers += [item.name, *(item.weight_names if isinstance(item, Linear) else ())]
                key = layer_key(item)
                if isinstance(item, Linear):
                    self.originals[key] = item.matrix_as_it_is()
                    self.layers[key] = LayerReport(
                        item.name, item.op, k=item.k, n=item.n, bytes_before=item.stored_bytes
                    )
                else:
                    self.layers[key] = LayerReport(item.name, op_name(item.node), reason=item.reason)
            self.report.layers = list(self.layers.values())
        return [item for item in found if isinstance(item, Linear)]

    def layer(self, linear: Linear) -> LayerReport:
        return self.layers[layer_key(linear)]

    @property
    def changed_weights(self) -> bool:
        """Whether there are layers that are pruned or quantized, and not replaced so far."""
        return any(layer.status in ("pruned", "quantized") for layer in self.layers.values())

    @property
    def masks_inputs(self) -> bool:
        """Whether inputs of some layer count as zero that are not."""
        return any(threshold for threshold in self.thresholds.values() if isinstance(threshold, float))

    def gains(self, linear: Linear, stored: int) -> bool:
        """Whether a layer is worth pruning to so many weights: some pass replaces it then, or the recipe has none."""
        return self.plan.gains(linear, stored, self.state(linear))

    def state(self, linear: Linear) -> LayerState:
        """What the passes so far have made of the layer."""
        threshold = self.thresholds.get(layer_key(linear))
        before = self.layer(linear).bytes_before or 0
        return LayerState(before, self.quantized.get(linear.weight_key), threshold)

    def telling(self, stage: Stage) -> Callable[[int, int], None]:
        """What long work calls with (done, total)."""
        return lambda done, total: self.progress(stage, done, total)

    def note(self, text: str) -> None:
        if text not in self.report.notes:
            self.report.notes.append(text)

    def new_name(self, model: ir.Model, wanted: str) -> str:
        """A name that no value of the model has, subgraphs included."""
        if not self._names:
            for graph in model.graphs():
                self._names.update(graph.initializers)
                self._names.update(value.name or "" for value in graph.inputs)
            for node in model.graph.all_nodes():
                self._names.update(value.name or "" for value in node.outputs)
        name, number = wanted, 1
        while name in self._names:
            name, number = f"{wanted}_{number}", number + 1
        self._names.add(name)
        return name

    def encoded(self, feeds: Feeds) -> Feeds:
        """The original model's feeds as the optimized one takes them."""
        formats = self.past_formats
        feeds = feeds if self.prompt is None else self.prompt.counted_in(feeds)
        encoded = {name: formats[name].encode(one) if name in formats else one for name, one in feeds.items()}
        return encoded | {name: keys.of(feeds[keys.cache]) for name, keys in self.exact_keys.items()}

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
