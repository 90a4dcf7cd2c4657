"""Recipe "auto": the search for the recipe of a model.

    time    each form that a layer can have, and the original, alone, for each kind of layer (layer_times.py)
    error   ||XW - Y|| / ||XW|| of each form that is faster than the original at all shapes, and than all more exact
            ones: in one run of a recipe for each form. Nothing was fitted to the inputs X: a quarter of the feeds is
            kept for judging. Y is the operator's own answer, so what it rounds of its inputs counts, too. Times how
            much errors of that layer matter for the outputs (sensitivity.py)
    path    of the forms of a layer, those that save more time for more error; of all layers, the steps from one form to
            the next in the order of the time saved for each square of error, as errors of layers add up in squares
    budget  how far along the path the whole model stays within the budget, on the feeds that were kept: all of it, else
            by bisection
    time    the whole model against the original, at each shape, and with fused attention. Where it is no faster, the
            first half of the path is tried, and so on; if nothing is left, the model stays as it is.

What comes out is an ordinary recipe.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, NothingToReplaceError, RecipeError, VerificationError, one_line
from ortolan.progress import Progress, Stage

from ..files.mapped_pages import pages_stay
from ..files.model_file import ModelFile, data_path, load_model, write_model
from ..files.spill import TensorSpill
from ..find.attention import Attention, find_attentions
from ..find.linear import Linear
from ..measure.feeds import Feeds, Sizes, hold_out, model_inputs, synthetic_feeds
from ..measure.sessions import int8_products_saturate, open_quietly, open_to_time
from ..measure.timing import interleave
from ..passes.calibrate import InputRecorder, feeds_for, open_original
from ..passes.context import PassContext, run_recipe
from ..passes.fitted import FittedWeights
from ..recipe import Recipe
from ..report.figures import Timing
from ..report.optimization import OptimizationReport
from ..report.search import AutoReport, Form, LayerChoice, PathPoint, Trial
from .budget import Limit, Run
from .candidates import HELD_OUT, NAME, ORIGINAL, Candidate, candidates_for, make_recipe
from .layer_times import LayerTimes, case_of
from .sensitivity import measure_sensitivities

ENCODER_SHAPES = ((1, 128), (1, 16))
DECODER_SHAPES = ((1, 1),)  # one token behind a cache
_PAST = 128  # tokens in that cache
_ROWS = 256  # of inputs to each layer, on which its error is measured
_FEEDS = 16  # on which the whole model is judged
_FINEST = 16  # bisection stops at steps of the path's length divided by this
_GAIN = 1.02  # a model that is less than this much faster, in the mean over the shapes, is not worth an error
_NOISE = 0.02  # of a layer's time: forms that differ by less are as fast as each other
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.DOUBLE)
_SECONDS = 1.5  # for timing the whole model, at each shape

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class AutoSettings:
    limit: Limit
    shapes: tuple[tuple[int, int], ...] | None = None
    sparsity: float | None = None

    @classmethod
    def read(cls, budget: Any, shapes: Any, sparsity: Any) -> AutoSettings:
        """Raises RecipeError."""
        if sparsity is not None and not (isinstance(sparsity, int | float) and 0 < sparsity < 1):
            raise RecipeError(f"sparsity is {sparsity!r}, expected a number above 0 and below 1")
        return cls(Limit.read(budget), None if shapes is None else _read_shapes(shapes), sparsity)


def _read_shapes(shapes: Any) -> tuple[tuple[int, int], ...]:
    found: list[tuple[int, int]] = []
    for shape in shapes if isinstance(shapes, list | tuple) else [None]:
        numbers = shape if isinstance(shape, list | tuple) and len(shape) == 2 else (0, 0)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            found.clear()
            break
        found.append((int(numbers[0]), int(numbers[1])))
    if not found:
        raise RecipeError(f"shapes is {shapes!r}, expected (batch, tokens) pairs such as [(1, 128), (1, 16)]")
    return tuple(dict.fromkeys(found))


@dataclass(frozen=True)
class Step:
    """A step of the path: the layer takes this form instead of the one before."""

    layer: str
    candidate: Candidate
    saved: float  # share of the time of all layers
    cost: float  # square of its error, less that of the form before


@dataclass(frozen=True)
class Made:
    """A whole model of the search."""

    recipe: Recipe
    path: Path
    choice: Mapping[str, Candidate]
    attention: bool
    trial: Trial


class Search:
    """Of one model. All files go into a folder of the caller's."""

    def __init__(
        self,
        model: Any,
        settings: AutoSettings,
        folder: Path,
        *,
        feeds: list[Feeds] | None,
        portable: bool,
        progress: Progress,
        fitted: FittedWeights | None = None,
        times: LayerTimes | None = None,
    ) -> None:
        """model: as given to optimize_onnx. fitted: for weights that are fitted once for the whole search."""
        self._model = model
        self._settings = settings
        self._folder = folder
        self._portable = portable
        self._progress = progress
        self._fitted = fitted
        self._times = LayerTimes() if times is None else times
        self._count = 0
        self._made: dict[tuple[int, bool], Made | None] = {}
        self._calibrated = feeds is not None
        self._feeds = feeds
        self.report = AutoReport(str(settings.limit), [])

    def run(self) -> Recipe | None:
        """The recipe, or None where nothing is faster within the budget. self.report tells more."""
        report = self.report
        with TensorSpill(self._folder) as spill:
            context = self._context(self._folder / "auto", spill, OptimizationReport(recipe={}))
            source = context.source
            run_recipe(Recipe.from_dict({"name": NAME, "pass": [{"name": "normalize"}]}), source.model, context)
            linears = context.survey(source.model)
            self._original = open_original(context, timed=True)
            self._feeds = feeds_for(context, self._original)[:]
            held_out = hold_out(self._feeds, HELD_OUT)[1]
            self._judged = (held_out or self._feeds)[:_FEEDS]
            if self._calibrated and not held_out:
                report.budget += f", on the feeds that weights are fitted to: give {HELD_OUT} or more, or more texts"
            self._shape_feeds = self._find_shapes(source)
            self._has_attention = any(isinstance(one, Attention) for one in find_attentions(source.model.graph))
            able = self._able(source.model, linears)
            rows = self._count_rows(source.model, context, able)
            forms = candidates_for(self._calibrated, self._settings.sparsity)
            self._time_layers(context, able, rows, forms)
            self._measure_sensitivities(context, [linear for linear in able if linear.name in rows])
        self._measure_errors(forms)
        path = self._path()
        best = self._fastest(self._within(path), path) if path or self._has_attention else None
        report.measured = self._times.measured
        self._conclude(path, best)
        return None if best is None else best.recipe

    # ---- layers ------------------------------------------------------------------------------------------------------

    def _able(self, model: ir.Model, linears: Sequence[Linear]) -> list[Linear]:
        """Layers that can be chosen for; of the others the report says why not."""
        names = Counter(name for linear in linears for name in {linear.name, *linear.weight_names})
        able = []
        for linear in linears:
            reason = None
            if linear.int4 is not None or linear.int8 is not None:
                reason = "stores a quantized weight, which recipe adopt takes over"
            elif linear.dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
                reason = f"computes on {linear.dtype.name}, expected FLOAT or FLOAT16"
            elif names[linear.name] > 1:
                reason = f"{names[linear.name]} layers or weights are called {linear.name!r}, so none can be selected"
            elif any(names[name] > 1 for name in linear.weight_names):
                reason = "shares its weight with another layer"
            elif linear.node.graph is not model.graph:
                reason = "lies in a subgraph, so it is not measured"
            if reason is None:
                able.append(linear)
            else:
                self.report.layers.append(LayerChoice(linear.name, reason))
        return able

    def _find_shapes(self, source: ModelFile) -> list[Feeds]:
        """Made-up feeds of the shapes, on which the original runs."""
        decoder = any("past" in (value.name or "") for value in model_inputs(source.model))
        chosen = self._settings.shapes or (DECODER_SHAPES if decoder else ENCODER_SHAPES)
        found: list[Feeds] = []
        for batch, tokens in chosen:
            feeds = synthetic_feeds(source.model, Sizes(batch, tokens, _PAST))
            sizes = {name: array.shape for name, array in feeds.items()}
            if any(sizes == {name: array.shape for name, array in other.items()} for other in found):
                continue  # the model has fixed dimensions
            try:
                self._original.run(None, feeds)
            except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
                raise CalibrationError(
                    f"the original model does not run at shape {batch} x {tokens} (batch x tokens): "
                    f"{one_line(error)}; give shapes=… that it takes"
                ) from error
            found.append(feeds)
            self.report.shapes.append((batch, tokens))
        return found

    def _count_rows(self, model: ir.Model, context: PassContext, linears: Sequence[Linear]) -> dict[str, list[int]]:
        """By layer, how many rows go in at each shape; those in subgraphs are left out."""
        counts: dict[str, list[int]] = {}
        with self._copies(model, context) as open_copy:
            recorder = InputRecorder(model, linears, self._shape_feeds, open_copy)
            recorder.record(
                recorder.names, lambda name, x: counts.setdefault(name, []).append(len(x)), lambda done, total: None
            )
        return {linear.name: counts[linear.x.name] for linear in linears if linear.x.name in counts}

    def _time_layers(
        self,
        context: PassContext,
        linears: Sequence[Linear],
        rows: Mapping[str, Sequence[int]],
        forms: Sequence[Candidate],
    ) -> None:
        weights = sum(linear.k * linear.n for linear in linears)
        for number, linear in enumerate(linears):
            self._progress(Stage.TIME_LAYERS, number, len(linears))
            choice = LayerChoice(linear.name, "the original is faster here")
            self.report.layers.append(choice)
            if linear.name not in rows:
                choice.reason = "takes what a subgraph makes, so it is not measured"
                continue
            matrix = linear.matrix()
            bias = linear.bias_value is not None
            cases = [case_of(matrix, count, linear.dtype, bias, weights) for count in rows[linear.name]]
            times = [self._times.of(case, linear.matrix, forms) for case in cases]
            choice.before_ms = [of_shape[ORIGINAL] for of_shape in times]
            for form in forms:
                if all(form.timing in of_shape for of_shape in times):
                    choice.forms[form.name] = Form([of_shape[form.timing] for of_shape in times])
            del matrix
            context.release()
        self._progress(Stage.TIME_LAYERS, len(linears), len(linears))

    def _measure_sensitivities(self, context: PassContext, linears: Sequence[Linear]) -> None:
        """Changes the context's model."""
        model = context.source.model
        with self._copies(model, context) as open_copy:
            found = measure_sensitivities(
                model,
                linears,
                self._judged,
                self._settings.limit.outputs(
                    [value.name or "" for value in model.graph.outputs if value.dtype in _FLOATS]
                ),
                lambda wanted: context.new_name(model, wanted),
                open_copy,
                lambda done, total: self._progress(Stage.SENSITIVITIES, done, total),
            )
        for layer in self.report.layers:
            layer.sensitivity = found.get(layer.name)

    def _measure_errors(self, forms: Sequence[Candidate]) -> None:
        """Of the forms of layers that are fast enough."""
        worth = {layer.name: _worth(layer) for layer in self.report.layers}
        layers = {layer.name: layer for layer in self.report.layers}
        for number, form in enumerate(forms):
            self._progress(Stage.LAYER_ERRORS, number, len(forms))
            names = [name for name, found in worth.items() if form.name in found]
            if not names:
                continue
            report = OptimizationReport(recipe={})
            place = self._new_place()
            with self._spill(place) as spill:
                context = self._context(place / "model.onnx", spill, report, portable=False)
                with suppress(NothingToReplaceError):
                    run_recipe(make_recipe({form: names}, rows=_ROWS), context.source.model, context)
            for layer in report.layers:
                if layer.status == "replaced" and layer.name in names:
                    layers[layer.name].forms[form.name].error = layer.output_error
        self._progress(Stage.LAYER_ERRORS, len(forms), len(forms))

    # ---- the path ----------------------------------------------------------------------------------------------------

    def _path(self) -> list[Step]:
        known = {form.name: form for form in candidates_for(self._calibrated, self._settings.sparsity)}
        timed = [layer for layer in self.report.layers if layer.before_ms]
        totals = [sum(column) for column in zip(*(layer.before_ms for layer in timed), strict=True)]
        steps: list[Step] = []
        for layer in timed:
            weight = [old / total for old, total in zip(layer.before_ms, totals, strict=True)]
            forms = {
                name: (
                    float(np.dot(weight, _saved(layer, form))) / len(totals),
                    (form.error * (1.0 if layer.sensitivity is None else layer.sensitivity)) ** 2,
                )
                for name, form in layer.forms.items()
                if form.error is not None
            }
            if forms:
                layer.reason = "a step too far for the budget"
            steps += [Step(layer.name, known[name], gained, cost) for name, gained, cost in convex(forms)]
        # Sorted is stable, and the steps of a layer lie in this order.
        steps.sort(key=lambda step: -step.saved / max(step.cost, 1e-12))
        self.report.path = [
            PathPoint(step.layer, step.candidate.name, *estimate(steps[: number + 1]))
            for number, step in enumerate(steps)
        ]
        return steps

    def _within(self, path: Sequence[Step]) -> int:
        """How many steps of the path the budget allows."""
        if not path or self._make(path, False) is not None:
            return len(path)
        low, high = 0, len(path)
        while high - low > max(1, len(path) // _FINEST):
            middle = (low + high) // 2
            low, high = (middle, high) if self._make(path[:middle], False) is not None else (low, middle)
        return low

    def _fastest(self, steps: int, path: Sequence[Step]) -> Made | None:
        """Of the models within the budget, with fused attention and without, the fastest; None: the original."""
        while True:
            tried = [
                self._make(path[:steps], attention) for attention in ([False, True] if self._has_attention else [False])
            ]
            made = [one for one in tried if one is not None]
            if made:
                self._progress(Stage.TIME_MODELS, 0, 1)
                originals, times = time_models(self._original, [one.path for one in made], self._shape_feeds)
                self._progress(Stage.TIME_MODELS, 1, 1)
                gains = [gain(originals, after) for after in times]
                best = max(range(len(made)), key=gains.__getitem__)
                self.report.before, self.report.after = originals, times[best]
                if gains[best] >= _GAIN:
                    return made[best]
            if not steps:
                return None
            steps //= 2

    # ---- whole models ------------------------------------------------------------------------------------------------

    def _make(self, steps: Sequence[Step], attention: bool) -> Made | None:
        """The model with these first steps of the path, if it is within the budget."""
        key = (len(steps), attention)
        if key not in self._made:
            self._made[key] = self._make_model(steps, attention)
        return self._made[key]

    def _make_model(self, steps: Sequence[Step], attention: bool) -> Made | None:
        choice = {step.layer: step.candidate for step in steps}
        if not choice and not attention:
            return None
        self._progress(Stage.TRY_MODELS, len(self.report.trials), 0)
        layers: dict[Candidate, list[str]] = {}
        for name, candidate in choice.items():
            layers.setdefault(candidate, []).append(name)
        verify = {"feeds": len(self._judged)}
        recipe = make_recipe(layers, attention=attention, verify={"seconds": 0.0, **verify})
        place = self._new_place()
        path = place / "model.onnx"
        report = OptimizationReport(recipe=recipe.to_dict())
        try:
            with self._spill(place) as spill:
                context = self._context(path, spill, report, portable=self._portable)
                run_recipe(recipe, context.source.model, context)
                context.release()
            before = after = None
            if self._settings.limit.needs_runs:
                # The one that is timed need not be right.
                original = open_original(context) if int8_products_saturate() else self._original
                before, after = _runs(original), _runs(open_quietly(path, library=True))
            within, found = self._settings.limit.judge(report.output_error, self._judged, before, after)
        except (NothingToReplaceError, VerificationError) as error:
            within, found = False, str(error)
        trial = Trial(len(choice), attention, within, found, *estimate(steps))
        trial.cosine = min((error.cosine for error in report.output_error), default=None)
        trial.bytes = sum(file.stat().st_size for file in (path, data_path(path)) if file.exists()) or None
        self.report.trials.append(trial)
        if not within:
            _remove(path)
            return None
        recipe = make_recipe(layers, attention=attention, verify=verify)
        return Made(recipe, path, choice, attention, trial)

    def _context(
        self, candidate: Path, spill: TensorSpill, report: OptimizationReport, portable: bool = True
    ) -> PassContext:
        """For a run of the model from its beginning."""
        source = load_model(self._model)
        return PassContext(source, report, candidate, spill, feeds=self._feeds, portable=portable, fitted=self._fitted)

    @contextmanager
    def _copies(self, model: ir.Model, context: PassContext) -> Iterator[Callable[[], Any]]:
        """A function that opens the model as it is when it is called."""
        path = self._folder / "copy.onnx"

        def open_copy() -> Any:
            write_model(model, path, lambda done, total: None)
            context.release()
            return open_quietly(path)

        try:
            yield open_copy
        finally:
            _remove(path)

    @contextmanager
    def _spill(self, folder: Path) -> Iterator[TensorSpill]:
        """Packed weights, which go away after: the model's file holds them, too."""
        with TensorSpill(folder) as spill:
            yield spill
        (folder / "packed.bin").unlink(missing_ok=True)

    def _new_place(self) -> Path:
        self._count += 1
        place = self._folder / f"auto-{self._count}"
        place.mkdir()
        return place

    def _conclude(self, path: Sequence[Step], best: Made | None) -> None:
        report = self.report
        if not self._calibrated:
            report.budget += ", on made-up inputs: give calibration=…"
        if best is None:
            if not path and not self._has_attention:
                why = "no layer has a form that is faster than the original"
            elif not any(trial.within for trial in report.trials):
                why = "nothing that is faster is within the budget"
            else:
                why = "no model within the budget is faster than the original at all shapes"
            report.outcome = f"the model stays as it is: {why} ({report.budget})"
            report.after = list(report.before)
            return
        report.changed, report.attention, best.trial.chosen = True, best.attention, True
        for layer in report.layers:
            candidate = best.choice.get(layer.name)
            if candidate is not None:
                form = layer.forms[candidate.name]
                layer.chosen, layer.error, layer.after_ms = candidate.name, form.error, form.milliseconds
                layer.reason = "saves the most time for its error within the budget"
        times = f"{gain(report.before, report.after):.2f}x"
        faster = f"{times} faster in the mean over the shapes (by minimum or median, whichever is less)"
        report.outcome = f"{faster}; {best.trial.found}; budget: {report.budget}"


def estimate(steps: Sequence[Step]) -> tuple[float, float]:
    """What models of these steps take, as a share of the time of all layers, and the error: layers' add up in
    squares."""
    return 1 - sum(step.saved for step in steps), math.sqrt(sum(step.cost for step in steps))


def _saved(layer: LayerChoice, form: Form) -> list[float]:
    """By shape, the share of the original's time."""
    return [1 - new / old for old, new in zip(layer.before_ms, form.milliseconds, strict=True)]


def _worth(layer: LayerChoice) -> list[str]:
    """The forms that are faster than the original at all shapes, and than all forms before them."""
    found, best = [], 0.0
    for name, form in layer.forms.items():
        saved = _saved(layer, form)
        mean = sum(saved) / len(saved)
        if min(saved) > 0 and mean > best + _NOISE:
            found.append(name)
            best = mean
    return found


def convex(forms: Mapping[str, tuple[float, float]]) -> list[tuple[str, float, float]]:
    """(name, time saved, cost), each compared with the one before, of the forms that saved and cost more and more, at
    less and less saved for the cost. forms: name -> (time saved, cost) against the original."""
    found: list[tuple[str, float, float]] = []
    saved = cost = 0.0
    left = dict(forms)
    while left := {
        name: form for name, form in left.items() if form[0] > saved and name not in {one[0] for one in found}
    }:
        name = max(left, key=lambda name: (left[name][0] - saved) / max(left[name][1] - cost, 1e-12))
        more_saved, more_cost = left[name][0] - saved, max(left[name][1] - cost, 0.0)
        found.append((name, more_saved, more_cost))
        saved, cost = saved + more_saved, cost + more_cost
    return found


def gain(before: Sequence[Timing], after: Sequence[Timing]) -> float:
    """How much faster, as the geometric mean over the shapes; 0 if it is slower at one of them."""
    ratios = [(old.min_ms / new.min_ms, old.median_ms / new.median_ms) for old, new in zip(before, after, strict=True)]
    if any(min(ratio) < 1 for ratio in ratios):
        return 0.0
    return float(np.exp(np.mean(np.log([min(ratio) for ratio in ratios]))))


def time_models(
    original: Any, paths: Sequence[Path], feeds: Sequence[Feeds]
) -> tuple[list[Timing], list[list[Timing]]]:
    """Of the original and of each optimized model, the times at each of the feeds, in turn."""
    sessions = [original, *(open_to_time(path, library=True) for path in paths)]
    by_shape = []
    for one in feeds:
        calls: dict[str, Callable[[], object]] = {
            str(number): lambda session=session, one=one: session.run(None, one)  # type: ignore[misc]
            for number, session in enumerate(sessions)
        }
        with pages_stay():
            timings = interleave(calls, seconds=_SECONDS * len(calls), min_rounds=3)
        by_shape.append([timings[str(number)] for number in range(len(sessions))])
    columns = [list(column) for column in zip(*by_shape, strict=True)]
    return columns[0], columns[1:]


def _runs(session: Any) -> Run:
    names = [output.name for output in session.get_outputs()]
    return lambda feeds: dict(zip(names, session.run(names, dict(feeds)), strict=True))


def _remove(path: Path) -> None:
    for file in (path, data_path(path)):
        file.unlink(missing_ok=True)
