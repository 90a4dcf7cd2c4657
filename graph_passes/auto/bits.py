"""Mixed bits: which layers of an int4 model need 5, 6 or 8 bits, within a budget of error or of bytes.

    error   ||XW - Y|| / ||XW|| of each layer with each number of bits, measured in one run of a recipe for each, times
            the sensitivity of the outputs to that layer (sensitivity.py)
    path    steps from 8 bits everywhere to 4 bits everywhere; layers with the same input change together. Steps are
            ordered by bytes saved per squared error, because errors of layers add up in squares; bit widths that are
            worse than mixing two other widths are left out (path.convex). Layers that lose no accuracy with 4 bits,
            such as those with weights on a 4-bit grid, come first and always change
    budget  error budget: 4 bits in all layers are tried first, before any layer is measured. If that exceeds the
            budget, bisection finds the furthest point of the path at which the whole model is within it
            byte budget: the path is followed until the files are small enough. Output heads take part, unless they
            share their weight with a word embedding: the table would then be stored once more

Groups without subgroups (group_size 64 and 128) have only 4 and 8 bits. The result is an ordinary recipe: that of the
int4 format, with some layers in more bits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import VerificationError
from ortolan.progress import Progress

from ..find.constants import float_array
from ..find.embedding import find_embeddings
from ..find.linear import linears_in
from ..forms import Form
from ..measure.evidence import Evidence
from ..measure.feeds import Feeds
from ..options import HEADS
from ..recipe import Recipe
from ..report.search import AutoReport, LayerChoice, PathPoint
from .budget import Limit
from .candidates import HELD_OUT, ROWS, Candidate, escape
from .layer_study import LayerStudy
from .layer_times import LayerTimes
from .path import Step, convex, estimate
from .trials import Made, Trials

_FEEDS = 16  # limit of the feeds on which the whole model is evaluated
_ROWS_TO_COMPARE = 16  # rows of a word embedding that are compared with a head's columns
_FINEST = 32  # bisection stops at 1/32 of the path
FOUR, FIVE, SIX = (Candidate(name, "W4A8MatMul") for name in ("int4", "int5", "int6"))
EIGHT = Candidate("int8", "W8A8MatMul")
_OF_BITS = {4: FOUR, 5: FIVE, 6: SIX, 8: EIGHT}
_BITS = {candidate.name: bits for bits, candidate in _OF_BITS.items()}


@dataclass(frozen=True)
class BitSettings:
    """Settings of a search for the bits of each layer.

    Attributes:
        form: A dense int4 format.
        limit: The limit on error or bytes.
        reproducible: As for `Recipe.reproducing`.
        default_ignore: The user did not choose `form.ignore`, so a budget of bytes may include heads.
    """

    form: Form
    limit: Limit
    reproducible: str | None = None
    default_ignore: bool = True

    def limit_for(self, evidence: Evidence) -> Limit:
        """Return the limit; on synthetic inputs, "divergence" from the original replaces "perplexity"."""
        return self.limit.of_own_tokens() if evidence.made_up else self.limit


class BitSearch:
    """The search for one model. Temporary files go to `evidence.folder`.

    Attributes:
        report: The measurements.
    """

    def __init__(self, evidence: Evidence, settings: BitSettings, name: str, progress: Progress) -> None:
        """Prepare the search; `name` is the file name of the result."""
        self._evidence, self._form, self._name, self._progress = evidence, settings.form, name, progress
        self._able: list[str] = []  # layers with a choice
        self._total = 0  # bytes of their weights in 8 bits
        self._reproducible = settings.reproducible
        settings.limit.check_model(evidence.source.model)
        evidence.feeds()
        self._limit = settings.limit_for(evidence)
        if self._limit.is_size and settings.default_ignore and not has_tied_head(evidence.source.model):
            self._form = dataclasses.replace(self._form, ignore=())
        self.report = AutoReport(str(self._limit), [], saves="bytes")

    def run(self) -> Made:
        """Return the smallest model within a budget of error, or the most accurate one within a budget of bytes.

        Raises:
            VerificationError: No model is within the budget.
        """
        evidence, report = self._evidence, self.report
        evidence.hold_out(HELD_OUT)
        judged = evidence.feeds_to_judge(len(evidence.held_out) or None)[:_FEEDS]
        if not self._limit.is_size:
            first = self._four_bits(judged)
            if first is not None:
                self._conclude(first)
                return first
        study = LayerStudy(evidence, report, LayerTimes(), self._progress)
        recipes = {_OF_BITS[bits].name: self._recipe({bits: ("*",)}, None) for bits in self._form.bit_widths}
        inputs = study.measure_errors_of(recipes, judged, self._limit)
        path = self._path(inputs)
        trials = self._trials(judged)
        trials.report[:0] = report.trials
        report.trials = trials.report
        free = sum(_cost(steps) <= 0 for steps in path)
        best = self._fewest_steps(path, free, trials) if self._limit.is_size else _most_steps(path, free, trials)
        if best is None:
            if self._limit.is_size:
                bits, advice = "4", "give group_size=128"
            else:
                bits, advice = "8", "give method='gptq' and calibration data"
            fewer = ", ".join(map(str, self._form.bit_widths[:-1]))
            raise VerificationError(
                f"no choice of {fewer} and 8 bits is within the budget ({report.budget}): {bits} bits in all "
                f"layers give {trials.report[-1].found}; relax the budget, or {advice}"
            )
        self._conclude(best)
        return best

    def _trials(self, judged: Sequence[Feeds]) -> Trials:
        of_choice, where = self._recipe_of_choice, self._reproducible
        return Trials(self._evidence, self._limit, judged, self._name, self._progress, of_choice, where)

    def _four_bits(self, judged: Sequence[Feeds]) -> Made | None:
        """Return the model with 4 bits in all layers if it is within the budget, so that no layer needs measuring."""
        trials = self._trials(judged)
        made = trials.make([], False)
        for trial in trials.report:
            trial.time = trial.error = None
        self.report.trials = trials.report
        return made

    def _path(self, inputs: Mapping[str, str]) -> list[list[Step]]:
        """Return the path; each step changes all layers with the same input.

        inputs: Maps the name of a layer to the name of its input.
        """
        report = self.report
        names = {_OF_BITS[bits].name for bits in self._form.bit_widths}
        groups: dict[str, list[LayerChoice]] = {}
        for layer in report.layers:
            if names <= layer.forms.keys():
                groups.setdefault(inputs[layer.name], []).append(layer)
        self._total = sum(layer.forms[EIGHT.name].bytes or 0 for group in groups.values() for layer in group)
        path = [steps for group in groups.values() for steps in _steps(group, self._total)]
        path.sort(key=_order)  # stable: the steps of a group stay in order
        steps = list(chain(*path))
        report.path = [
            PathPoint(step.layer, step.candidate.name, *estimate(steps[: number + 1]))
            for number, step in enumerate(steps)
        ]
        self._able = list(dict.fromkeys(step.layer for step in steps))
        return path

    def _recipe_of_choice(self, choice: Mapping[str, Candidate], attention: bool, verify: Mapping[str, Any]) -> Recipe:
        chosen: dict[int, list[str]] = {}
        for name in self._able:
            chosen.setdefault(_BITS[choice.get(name, EIGHT).name], []).append(escape(name))
        return self._recipe(chosen, verify)

    def _recipe(self, chosen: Mapping[int, Sequence[str]], verify: Mapping[str, Any] | None) -> Recipe:
        """Return the int4 recipe, with other bits for layers that match a pattern.

        chosen: Patterns by bits. verify: Options of pass verify; None: the recipe has no such pass.
        """
        others = {bits: names for bits, names in sorted(chosen.items()) if bits != 4}
        steps = self._form.passes(others)[:-1]
        calibrate = {"name": "calibrate", "held_out": HELD_OUT, "max_rows": ROWS}
        steps = [calibrate if step["name"] == "calibrate" else step for step in steps]
        if others or verify is None:  # a mixture has the same bits in all experts, so they stay separate layers
            steps = [{**step, "join": False} if step["name"] == "experts" else step for step in steps]
        steps += [] if verify is None else [{"name": "verify", **verify}]
        description = f"{self._form.describe()}; bits of each layer chosen by measurement"
        return Recipe.from_dict({"name": "int4, mixed bits", "description": description, "pass": steps})

    def _fewest_steps(self, path: Sequence[list[Step]], free: int, trials: Trials) -> Made | None:
        """Return the first model along the path that is small enough; the `free` first steps are always taken."""
        smallest = trials.make([*chain(*path)], False)
        if smallest is None:
            return None
        room = self._limit.number - (smallest.trial.bytes or 0)
        wanted = len(path)
        while wanted > free:
            room -= sum(step.saved for step in path[wanted - 1]) * self._total
            if room < 0:
                break
            wanted -= 1
        # The estimate counts only weights, so further steps may be needed.
        further = 1
        while wanted < len(path):
            made = trials.make([*chain(*path[:wanted])], False)
            if made is not None:
                trials.drop(smallest)
                return made
            wanted, further = wanted + further, 2 * further
        return smallest

    def _conclude(self, best: Made) -> None:
        report = self.report
        best.trial.chosen = report.changed = True
        for layer in report.layers:
            if layer.name in self._able:
                form = best.choice.get(layer.name, EIGHT)
                layer.chosen, layer.error = form.name, layer.forms[form.name].error
                layer.reason = "bits chosen by bytes saved per squared error"
        counts = {
            bits: sum(best.choice.get(name, EIGHT).name == _OF_BITS[bits].name for name in self._able)
            for bits in self._form.bit_widths[1:]
        }
        others = "".join(f", {bits} in {count}" for bits, count in counts.items() if count or bits == 8)
        report.outcome = f"4 bits in {best.trial.layers} layers{others}; {best.trial.found}; budget: {report.budget}"


def has_tied_head(model: ir.Model) -> bool:
    """Return True if an output head shares its weight with a word embedding, as one tensor or as two equal ones."""
    heads = [linear for linear in linears_in(model) if linear.matches((HEADS,))]
    return any(
        (head.n, head.k) == (table.rows, table.width)
        and np.array_equal(float_array(table.tensor)[:_ROWS_TO_COMPARE], head.matrix()[:, :_ROWS_TO_COMPARE].T)
        for table in (find_embeddings(model.graph) if heads else ())
        for head in heads
    )


def _steps(group: Sequence[LayerChoice], total: int) -> Iterator[list[Step]]:
    """Yield the steps of layers that change together, from 8 bits on; each step has one entry per layer."""

    def measured(layer: LayerChoice, name: str) -> tuple[float, float]:
        """Return the bytes saved, as a fraction of `total`, and the squared error added, against 8 bits."""
        form, eight = layer.forms[name], layer.forms[EIGHT.name]
        sensitivity = 1.0 if layer.sensitivity is None else layer.sensitivity
        cost = ((form.error or 0.0) ** 2 - (eight.error or 0.0) ** 2) * sensitivity**2
        return ((eight.bytes or 0) - (form.bytes or 0)) / max(total, 1), cost

    names = [name for name in group[0].forms if name != EIGHT.name]
    whole = {name: np.sum([measured(layer, name) for layer in group], axis=0) for name in names}
    before = EIGHT.name
    for name, _, _ in convex({name: (float(saved), float(cost)) for name, (saved, cost) in whole.items()}):
        steps = []
        for layer in group:
            (saved, cost), (old_saved, old_cost) = measured(layer, name), measured(layer, before)
            steps.append(Step(layer.name, _OF_BITS[_BITS[name]], saved - old_saved, cost - old_cost))
        yield steps
        before = name


def _cost(steps: Sequence[Step]) -> float:
    return sum(step.cost for step in steps)


def _order(steps: Sequence[Step]) -> tuple[bool, float]:
    """Return the sort key: steps without cost first, then by bytes saved per cost."""
    cost = _cost(steps)
    return cost > 0, -sum(one.saved for one in steps) / max(cost, 1e-12)


def _most_steps(path: Sequence[list[Step]], free: int, trials: Trials) -> Made | None:
    """Return the model furthest along the path within the budget; the end of the path exceeds it.

    The first `free` steps lose no accuracy.
    """
    low, high = free, len(path)
    best = trials.make([*chain(*path[:free])], False)
    if best is None and free:
        return trials.make([], False)
    while best is not None and high - low > max(1, len(path) // _FINEST):
        middle = (low + high) // 2
        made = trials.make([*chain(*path[:middle])], False)
        if made is None:
            high = middle
        else:
            trials.drop(best)
            low, best = middle, made
    return best
