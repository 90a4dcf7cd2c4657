"""What the passes of one run share, and how a recipe is run."""

from __future__ import annotations

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, OrtolanError

from .constants import stored_bytes
from .linear import Linear, find_linears
from .model_file import ModelFile, external_tensors, release_maps
from .options import PassOptions
from .report import LayerReport, OptimizationReport
from .spill import TensorSpill

if TYPE_CHECKING:
    from .recipe import Recipe

Progress = Callable[[str, int, int], None]
Feeds = dict[str, np.ndarray]


@dataclass
class OriginalWeight:
    """The weight of a layer before any pass changed it. Lazy: the numbers stay in the model's file."""

    tensor: ir.TensorProtocol
    transposed: bool

    def matrix(self) -> np.ndarray:
        """[k, n] as float32, perhaps a view of a mapped file."""
        array = np.asarray(self.tensor.numpy()).astype(np.float32, copy=False)
        return array.T if self.transposed else array


@dataclass
class PassContext:
    """Everything the passes of one optimize_onnx call share, apart from the model itself.

    Layers are identified by the name of their node's output, which, unlike the node's name, is always unique.
    """

    source: ModelFile
    report: OptimizationReport
    workdir: Path  # removed at the end, on the output's disk
    candidate: Path  # where in it the optimized model is written
    spill: TensorSpill
    feeds: list[Feeds] | None = None  # given by the user, or made up by the first pass that needs some
    portable: bool = True
    dry_run: bool = False
    progress: Progress = lambda stage, done, total: None
    layers: dict[str, LayerReport] = field(default_factory=dict)
    originals: dict[str, OriginalWeight] = field(default_factory=dict)
    captured: dict[str, np.ndarray] = field(default_factory=dict)  # rows of inputs to each layer: [rows, k]
    _mapped: list[ir.ExternalTensor] = field(default_factory=list)
    _names: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._mapped = list(external_tensors(self.source.model))

    def survey(self, model: ir.Model) -> list[Linear]:
        """The model's linear layers. The first call starts the report and remembers the original weights."""
        found = find_linears(model)
        if not self.layers:
            for item in found:
                key = item.node.outputs[0].name or item.name
                if isinstance(item, Linear):
                    self.originals[key] = OriginalWeight(item.weight, item.transposed)
                    self.layers[key] = LayerReport(
                        item.name, item.op, k=item.k, n=item.n, bytes_before=stored_bytes(item.weight_value)
                    )
                else:
                    op = f"{item.node.domain}::{item.node.op_type}" if item.node.domain else item.node.op_type
                    self.layers[key] = LayerReport(item.name, op, reason=item.reason)
            self.report.layers = list(self.layers.values())
        return [item for item in found if isinstance(item, Linear)]

    def layer(self, linear: Linear) -> LayerReport:
        return self.layers[layer_key(linear)]

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

    def release(self) -> None:
        """Unmaps the input's data; the next access maps it again."""
        release_maps(self._mapped)


def layer_key(linear: Linear) -> str:
    return linear.node.outputs[0].name or linear.name


class RecipePass(ir.passes.InPlacePass, abc.ABC):
    """A pass that a recipe may name. Its options are a PassOptions dataclass."""

    options_type: ClassVar[type[PassOptions]] = PassOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__()
        self.options = options
        self.context = context


def run_recipe(recipe: Recipe, model: ir.Model, context: PassContext) -> None:
    """Runs the passes in order. The onnx-ir pass manager wraps errors; what reaches the caller is an OrtolanError."""
    from .registry import PASSES

    passes = [PASSES[step.name](step.options, context) for step in recipe.passes]
    try:
        ir.passes.PassManager(passes, steps=1)(model)
    except (ir.passes.PassError, ir.passes.InvariantError) as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, OrtolanError):
            last, cause = cause, cause.__cause__
        if cause is not None:
            raise cause from cause.__cause__
        if isinstance(last, MemoryError | OSError):
            raise last from None
        raise ModelError(f"{context.source.name} could not be optimized: {type(last).__name__}: {last}") from error
