"""What the passes of one run share, and how a recipe is run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, OrtolanError
from ortolan.progress import Progress, no_progress

from ..files.model_file import ModelFile, external_tensors, release_maps
from ..files.spill import TensorSpill
from ..find.linear import Linear, find_linears, layer_key, op_name
from ..measure.feeds import Feeds
from ..options import WORDS, Globs, PassOptions, any_matches
from ..report.figures import human_bytes
from ..report.optimization import LayerReport, OptimizationReport

if TYPE_CHECKING:
    from ..find.quantized_weight import QuantizedWeight
    from ..measure.decoding import Decoded
    from ..recipe import Recipe
    from ..weights.cache_format import CacheFormat, CacheUse, ExactKeys
    from ..weights.quantizers.grid import Quantization
    from .fitted import FittedWeights
    from .prompt import Prompt

Outputs = list[np.ndarray | None]  # of one run; None: not a tensor of numbers, which is not compared


@dataclass
class PassContext:
    """Everything the passes of one optimize_onnx call share, apart from the model itself.

    Layers are identified by the output of their node (layer_key), not by a name: those of nodes need not be unique, and
    those of values may be the same in both branches of an If.
    """

    source: ModelFile
    report: OptimizationReport
    candidate: Path  # where the optimized model is written: in a folder on the output's disk, removed at the end
    spill: TensorSpill
    feeds: list[Feeds] | None = None  # given by the user, or made up by the first pass that needs some
    feeds_made_up: bool = False
    fits_weights: bool = False  # whether some pass fits weights to the feeds
    held_out: list[Feeds] = field(default_factory=list)  # those of the user's to which nothing is fitted
    portable: bool = True
    dry_run: bool = False
    progress: Progress = no_progress
    layers: dict[ir.Value, LayerReport] = field(default_factory=dict)
    # Each layer's weight [k, n] before any pass changed it. The numbers stay in the model's file until it is called.
    originals: dict[ir.Value, Callable[[], np.ndarray]] = field(default_factory=dict)
    captured: dict[ir.Value, np.ndarray] = field(default_factory=dict)  # rows of inputs to each layer: [rows, k]
    # Whether a pass ranges prepares fixed ranges for activations, and numbers of values that it has recorded, by name.
    fixes_ranges: bool = False
    activations: dict[str, np.ndarray] = field(default_factory=dict)
    # Below which magnitude a layer's inputs count as zero, or why there is none, by layer_key; see activations.py. One
    # for each pass of that kind: whether it chooses one for a layer. And whether a pass replace applies them.
    thresholds: dict[ir.Value, float | str] = field(default_factory=dict)
    threshold_plans: list[Callable[[Linear], bool]] = field(default_factory=list)
    applies_thresholds: bool = False
    names_of_layers: list[str] = field(default_factory=list)  # and of their weights, before any pass changed them
    # For each replaced layer: ||Y - XW|| / ||XW|| with the weight W that was packed.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    # The same for attention that reads its keys and values from a cache, by the output.
    cache_rounding: dict[ir.Value, float] = field(default_factory=dict)
    packed_weights: int = 0  # in all matrices that were packed so far
    # One for each pass replace: why it would leave a layer with so many non-zero weights, or None.
    why_not_replace: list[Callable[[Linear, int], str | None]] = field(default_factory=list)
    # One for each pass replace: whether it takes over the numbers that the model stores for a layer.
    adopts: list[Callable[[Linear], bool]] = field(default_factory=list)
    unified: list[ir.Node] = field(default_factory=list)  # products of int8 layers in another form (quantized_forms.py)
    # One for each pass quantize: how it is going to quantize a layer, or None. Known before any pass runs.
    quantizations: list[Callable[[Linear], Quantization | None]] = field(default_factory=list)
    quantized: dict[Hashable, QuantizedWeight] = field(default_factory=dict)  # what came of it, by Linear.weight_key
    feeds_to_verify: int = 0  # on how many feeds a pass verify will run the model
    reference: list[Outputs] | None = None  # on these: the answers of the pruned model before any layer was replaced
    decoded_reference: Decoded | None = None  # what that model answered to calls that read its cache
    # Of all attention with a cache, whether or not it is replaced, by the input.
    caches: dict[str, CacheUse] = field(default_factory=dict)
    past_formats: dict[str, CacheFormat] = field(default_factory=dict)  # of inputs that no longer hold floats
    exact_keys: dict[str, ExactKeys] = field(default_factory=dict)  # inputs that the original has not
    fitted: FittedWeights | None = None  # of other runs on the same model and feeds, and of this one
    prompt_ids: np.ndarray | None = None  # int64 [1, tokens], given by the user
    takes_prompt: bool = False  # whether a pass compress_cache puts the prompt into the graph
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
        return not self.why_not_replace or any(why_not(linear, stored) is None for why_not in self.why_not_replace)

    def keeps_numbers(self, linear: Linear) -> bool:
        """Whether some pass replace takes over the numbers of 4 or 8 bits that the model stores for this layer."""
        return any(adopts(linear) for adopts in self.adopts)

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


def run_recipe(recipe: Recipe, model: ir.Model, context: PassContext) -> None:
    """Runs the passes in order. The onnx-ir pass manager wraps errors; what reaches the caller is an OrtolanError."""
    from ..registry import PASSES

    passes = [PASSES[step.name](step.options, context) for step in recipe.passes]
    try:
        ir.passes.PassManager(passes, steps=1)(model)
    except (ir.passes.PassError, ir.passes.InvariantError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OrtolanError):
            last, cause = cause, cause.__cause__
        if cause is not None:
            raise cause from cause.__cause__
        if isinstance(last, MemoryError):
            raise last from None
        raise ModelError(f"{context.source.name} could not be optimized: {type(last).__name__}: {last}") from error
    _note_unmatched(recipe, context)
    layers = context.layers.values()
    grown = [layer for layer in layers if layer.status in ("pruned", "quantized") and layer.growth > 0]
    if grown:
        context.note(
            f"{len(grown)} {grown[0].status} layers, such as {grown[0].name!r}, now store their weights "
            f"dense and take {human_bytes(sum(layer.growth for layer in grown))} more than before; exclude them "
            "(prune.exclude, quantize.exclude)"
        )
    rounded = [layer for layer in layers if layer.status == "quantized"]
    if rounded:
        context.note(
            f"{len(rounded)} layers, such as {rounded[0].name!r}, are quantized but not replaced: their weights are "
            "rounded, yet still stored as floats, so nothing is gained in size or speed; add pass 'replace'"
        )


def _note_unmatched(recipe: Recipe, context: PassContext) -> None:
    """Names the patterns that match no layer; a word such as "heads" may match none."""
    for option, glob in _patterns(recipe):
        used = glob in WORDS or any_matches(context.names_of_layers, (glob,))
        if context.layers and not used:
            context.note(f"pattern {glob!r} of {option} matches no layer; `ortolan inspect` lists their names")


def _patterns(recipe: Recipe) -> Iterator[tuple[str, str]]:
    for step in recipe.passes:
        for option in ("select", "exclude"):
            globs: Globs = getattr(step.options, option, ())
            yield from ((f"{step.name}.{option}", glob) for glob in globs)
