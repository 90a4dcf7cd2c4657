"""Whole models of a search: create, evaluate and time them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import NothingToReplaceError, VerificationError
from ortolan.progress import Progress, Stage

from ..files.mapped_pages import pages_stay
from ..files.model_file import data_path, load_model
from ..files.spill import TensorSpill
from ..measure.evidence import Evidence, load_again
from ..measure.feeds import Feeds
from ..measure.sessions import open_quietly, open_to_time
from ..measure.timing import interleave
from ..passes.context import PassContext
from ..recipe import Recipe
from ..report.figures import Timing
from ..report.optimization import OptimizationReport
from ..report.search import Saves, Trial
from ..run import Steps, plan, transform, verify, write
from .budget import Limit, Run
from .candidates import ROWS, Candidate, make_recipe
from .path import Step, estimate

# Arguments: the format of each layer, whether attention is fused, options of pass verify.
RecipeOf = Callable[[Mapping[str, Candidate], bool, Mapping[str, Any]], Recipe]
_SECONDS = 0.8  # time spent on timing one model at one shape, in seconds


@dataclass(frozen=True)
class Made:
    """A model within the budget.

    Attributes:
        context: The context of the run that made and verified it.
        choice: The format of each changed layer.
        trial: Its entry in the report.
    """

    recipe: Recipe
    context: PassContext
    choice: Mapping[str, Candidate]
    attention: bool
    trial: Trial

    @property
    def path(self) -> Path:
        """Its file."""
        return self.context.candidate

    def delete(self) -> None:
        """Delete the model's files, which can be as large as the original's."""
        for file in _files(self.context):
            file.unlink()


class Trials:
    """Creates models from the first steps of a path, each once and in its own folder.

    Attributes:
        report: The entries of all models.
    """

    def __init__(
        self,
        evidence: Evidence,
        limit: Limit,
        judged: Sequence[Feeds],
        name: str,
        progress: Progress,
        recipe_of: RecipeOf | None = None,
        reproducible: str | None = None,
    ) -> None:
        """Prepare trials.

        judged: Feeds on which models are evaluated. name: The file name of models. recipe_of: Returns the recipe of a
        choice; an empty choice also changes the model. None: layers that are not in the choice stay unchanged.
        reproducible: As for `Recipe.reproducing`.
        """
        self._evidence, self._limit, self._judged = evidence, limit, judged
        self._name, self._progress = name, progress
        self._recipe_of, self._always_changes = recipe_of or _recipe_of, recipe_of is not None
        self._reproducible = reproducible
        self._saves: Saves = "time" if recipe_of is None else "bytes"
        self._made: dict[tuple[int, bool], Made | None] = {}
        self._tried: dict[tuple[int, bool], Trial] = {}
        self.report: list[Trial] = []

    def expected(self, path: Sequence[Step]) -> int:
        """Return the number of steps that the errors of layers predict to be within the budget, at least 1.

        All steps, if the budget does not limit errors.
        """
        most = self._limit.error
        within = [number for number in range(1, len(path) + 1) if estimate(path[:number])[1] <= most]
        return max(within, default=1)

    def make(self, steps: Sequence[Step], attention: bool) -> Made | None:
        """Return the model with these steps, or None if it exceeds the budget."""
        key = (len(steps), attention)
        if key not in self._made:
            changes = bool(steps) or attention or self._always_changes
            self._made[key] = self._make(steps, attention) if changes else None
        return self._made[key]

    def drop(self, *beaten: Made | None) -> None:
        """Delete the files of models that are not needed; `make` would create them again."""
        for made in beaten:
            if made is None:
                continue
            self._made = {key: one for key, one in self._made.items() if one is not made}
            made.delete()

    def _make(self, steps: Sequence[Step], attention: bool) -> Made | None:
        self._progress(Stage.TRY_MODELS, len(self.report), 0)
        choice = {step.layer: step.candidate for step in steps}
        feeds = {"feeds": len(self._judged)}
        # Only models within the budget are timed, and the portable version is checked only for the best.
        trial_recipe, recipe = (
            self._recipe_of(choice, attention, verify)
            for verify in ({"seconds": 0.0, "portable": False, **feeds}, feeds)
        )
        if recipe.replaces_attention:  # if not, the model has no attention
            trial_recipe, recipe = (one.reproducing(self._reproducible) for one in (trial_recipe, recipe))
        with new_context(self._evidence, self._name, self._evidence.portable) as context:
            context.reproducible = self._reproducible is not None
            try:
                within, found = self._run(replace(plan(trial_recipe, context), recipe=recipe), context)
            except (NothingToReplaceError, VerificationError) as error:
                within, found = False, str(error)
        count = len(choice)
        if self._always_changes:
            replaced = [layer for layer in context.report.layers if layer.status == "replaced"]
            count = sum(layer.weight_bits == 4 for layer in replaced)
        trial = Trial(count, attention, within, found, *estimate(steps), saves=self._saves)
        trial.cosine = min((error.cosine for error in context.report.output_error), default=None)
        files = _files(context)
        trial.bytes = sum(file.stat().st_size for file in files) or None
        again = self._tried.get((len(steps), attention))  # a dropped model that is made again keeps one entry
        self.report[:] = [*(one for one in self.report if one is not again), trial]
        self._tried[len(steps), attention] = trial
        if not within:
            for file in files:
                file.unlink()
            return None
        return Made(recipe, context, choice, attention, trial)

    def _run(self, steps: Steps, context: PassContext) -> tuple[bool, str]:
        """Create the model; return whether it is within the budget, and the result as text."""
        transform(steps, context)
        write(steps, context)
        verify(steps, context)
        if self._limit.is_size:
            return self._limit.judge_size(sum(file.stat().st_size for file in _files(context)))
        before = after = None
        if self._limit.needs_runs:
            before, after = self._original, _runs(open_quietly(context.candidate, context.source, library=True))
        return self._limit.judge(context.report.output_error, self._judged, before, after)

    def _original(self, feeds: Feeds) -> dict[str, np.ndarray]:
        names = [value.name or "" for value in self._evidence.source.model.graph.outputs]
        answers = zip(names, self._evidence.answers([feeds])[0], strict=True)
        return {name: answer for name, answer in answers if answer is not None}


def _recipe_of(choice: Mapping[str, Candidate], attention: bool, verify: Mapping[str, Any]) -> Recipe:
    layers: dict[Candidate, list[str]] = {}
    for name, candidate in choice.items():
        layers.setdefault(candidate, []).append(name)
    return make_recipe(layers, attention=attention, embeddings=True, rows=ROWS, verify=verify)


def _files(context: PassContext) -> list[Path]:
    return [file for file in (context.candidate, data_path(context.candidate)) if file.exists()]


@contextmanager
def new_context(evidence: Evidence, name: str, portable: bool) -> Iterator[PassContext]:
    """Yield a context for a run from the original to a file in a new folder; delete its packed weights at the end."""
    folder = evidence.new_folder()
    try:
        with TensorSpill(folder) as spill:
            source = load_again(evidence.source)
            yield PassContext(evidence, source, OptimizationReport(recipe={}), folder / name, spill, portable=portable)
    finally:
        (folder / "packed.bin").unlink(missing_ok=True)


def gain(before: Sequence[Timing], after: Sequence[Timing]) -> float:
    """Return the speed-up, the geometric mean over the shapes; 0 if the model is slower at any shape."""
    ratios = [(old.min_ms / new.min_ms, old.median_ms / new.median_ms) for old, new in zip(before, after, strict=True)]
    if any(min(ratio) < 1 for ratio in ratios):
        return 0.0
    return float(np.exp(np.mean(np.log([min(ratio) for ratio in ratios]))))


def time_models(
    original: Any, paths: Sequence[Path], feeds: Sequence[Feeds]
) -> tuple[list[Timing], list[list[Timing]]]:
    """Time the original and each optimized model in turn, on each of the feeds."""
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


def finish(made: Made, context: PassContext) -> PassContext:
    """Turn a model of the search into the result of a run: move its files to context.candidate, and verify it fully.

    Returns:
        The context of the run that made it, with the report of `context`.
    """
    for old, new in ((made.path, context.candidate), (data_path(made.path), data_path(context.candidate))):
        if old.exists():
            os.replace(old, new)
    report = context.report
    report.layers = made.context.report.layers
    for text in made.context.report.notes:
        context.note(text)
    # The model's file has the packed weights.
    source = replace(context.source, model=load_model(context.candidate).model)
    result = replace(made.context, source=source, report=report, candidate=context.candidate, progress=context.progress)
    verify(plan(made.recipe, result), result)
    return result
