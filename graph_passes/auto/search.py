"""Recipe "auto": the search for the recipe of a model.

    time    each form that a layer can have, and the original, alone, for each kind of layer (layer_times.py)
    error   ||XW - Y|| / ||XW|| of each form that is faster than the original at all shapes, and than all more exact
            ones: in one run of a recipe for each form. Nothing was fitted to the inputs X: a quarter of the feeds is
            kept for judging. Y is the operator's own answer, so what it rounds of its inputs counts, too. Times how
            much errors of that layer matter for the outputs (sensitivity.py)
    path    of the forms of a layer, those that save more time for more error; of all layers, the steps from one form to
            the next in the order of the time saved for each square of error, as errors of layers add up in squares
    budget  how far along the path the whole model stays within the budget, on the feeds that were kept: by bisection,
            from where the errors of the layers let it be expected
    time    the whole model against the original, at each shape, and with fused attention. Where it is no faster, the
            first half of the path is tried, and so on; if nothing is left, the model stays as it is.

A decoder that answers one token a step is limited by the bytes of its weights, so mixed bits come first (bits.py): 4
bits in all layers, else 8 where errors matter. Only where no such model is within the budget and faster, what is above.

What comes out is an ordinary recipe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortolan.errors import CalibrationError, NothingToReplaceError, RecipeError, VerificationError, one_line, wrong_type
from ortolan.progress import Progress, Stage

from ..files.model_file import ModelFile
from ..find.constants import DEFAULT_DOMAINS
from ..forms import Form
from ..measure.evidence import Evidence
from ..measure.feeds import Feeds, Sizes, has_past, synthetic_feeds
from ..report.search import AutoReport
from .bits import BitSearch, BitSettings
from .budget import Limit, default_limit, read_limit
from .candidates import HELD_OUT, candidates_for
from .layer_study import LayerStudy
from .layer_times import LayerTimes
from .path import Step, make_path
from .trials import Made, Trials, gain, time_models

ENCODER_SHAPES = ((1, 128), (1, 16))
_FEW_TOKENS = 16  # shorter ones are for models that take no more
DECODER_SHAPES = ((1, 1),)  # one token behind a cache
_PAST = 128  # tokens in that cache
_FEEDS = 16  # on which the whole model is judged
_FINEST = 16  # bisection stops at steps of the path's length divided by this
_FUSED_GAIN = 1.05  # times as fast as it was measured: what a model with fused attention counts as
_GAIN = 1.05  # a model that is less than this much faster, in the mean over the shapes, is not worth an error
_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum", "Attention", "MatMulInteger", "QLinearMatMul"))

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class AutoSettings:
    limit: Limit | None  # None: that of budget.default_limit
    shapes: tuple[tuple[int, int], ...] | None = None
    sparsity: float | None = None

    @classmethod
    def read(
        cls, budget: Any = None, shapes: Any = None, sparsity: Any = None, max_perplexity_increase: Any = None
    ) -> AutoSettings:
        """Return checked settings.

        Raises:
            ArgumentTypeError: An argument has the wrong type.
            RecipeError: An argument is out of range.
        """
        if sparsity is not None:
            if not isinstance(sparsity, int | float) or isinstance(sparsity, bool):
                raise wrong_type("sparsity", sparsity, "a number above 0 and below 1")
            if not 0 < sparsity < 1:
                raise RecipeError(f"sparsity is {sparsity!r}, expected a number above 0 and below 1")
        limit = read_limit(budget, max_perplexity_increase)
        return cls(limit, None if shapes is None else _read_shapes(shapes), sparsity)


def _read_shapes(shapes: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(shapes, list | tuple):
        raise wrong_type("shapes", shapes, "a list of (batch, tokens) pairs such as [(1, 128), (1, 16)]")
    found: list[tuple[int, int]] = []
    for shape in shapes:
        numbers = shape if isinstance(shape, list | tuple) and len(shape) == 2 else (0, 0)
        if not all(isinstance(number, int) and number > 0 for number in numbers):
            found.clear()
            break
        found.append((int(numbers[0]), int(numbers[1])))
    if not found:
        raise RecipeError(f"shapes is {shapes!r}, expected (batch, tokens) pairs such as [(1, 128), (1, 16)]")
    return tuple(dict.fromkeys(found))


def default_shapes(model: ir.Model) -> list[tuple[int, int]]:
    """(batch, tokens); shorter ones behind those to be fast at."""
    return [*DECODER_SHAPES] if has_past(model) else [*ENCODER_SHAPES, (1, 8), (1, 4), (1, 1)]


class Search:
    """Of one model. All files go into the folder of its evidence."""

    def __init__(
        self,
        evidence: Evidence,
        settings: AutoSettings,
        name: str,
        *,
        progress: Progress,
        times: LayerTimes | None = None,
    ) -> None:
        """name: of the model's file, as it is to be in the end."""
        self._evidence, self._settings, self._name = evidence, settings, name
        self._progress = progress
        self._times = LayerTimes() if times is None else times
        self._calibrated = not evidence.made_up
        self.report = AutoReport("", [])

    def run(self) -> Made | None:
        """The fastest model within the budget, or None where nothing is faster. self.report tells more."""
        evidence, report = self._evidence, self.report
        if not _may_hold_products(evidence.source.model):
            report.outcome = "the model stays as it is: it holds no matrix products"
            return None
        self._original = evidence.open_original(timed=True)
        evidence.feeds(self._original)
        evidence.hold_out(HELD_OUT)
        judged = evidence.feeds_to_judge(len(evidence.held_out) or None, self._original)[:_FEEDS]
        limit = self._settings.limit or default_limit(evidence.source.model, self._calibrated)
        report.budget = str(limit)
        if evidence.sampled:
            report.budget += ", on text sampled from the model itself: calibration=… takes texts of yours"
        elif not self._calibrated:
            report.budget += ", on made-up inputs: give calibration=…"
        elif not evidence.held_out:
            report.budget += f", on the feeds that weights are fitted to: give {HELD_OUT} or more, or more texts"
        self._shape_feeds = self._find_shapes(evidence.source)
        if (
            self._settings.sparsity is None
            and has_past(evidence.source.model)
            and {*report.shapes} == {*DECODER_SHAPES}
        ):
            by_bits = self._by_bits(limit)
            if by_bits is not None:
                return by_bits
        forms = candidates_for(self._calibrated, self._settings.sparsity)
        study = LayerStudy(evidence, report, self._times, self._progress)
        study.measure(self._shape_feeds, judged, limit, forms)
        self._has_attention = study.has_attention
        path = make_path(report, forms)
        trials = Trials(evidence, limit, judged, self._name, self._progress)
        report.trials = trials.report
        best = self._fastest(self._within(path, trials), path, trials) if path or self._has_attention else None
        report.measured = self._times.measured
        self._conclude(path, best)
        return best

    def _find_shapes(self, source: ModelFile) -> list[Feeds]:
        """Made-up feeds of the shapes, on which the original runs. Of the default ones, those that it takes; of fewer
        tokens, where it takes none."""
        found: list[Feeds] = []
        problem = ""
        for batch, tokens in self._settings.shapes or default_shapes(source.model):
            feeds = synthetic_feeds(source.model, Sizes(batch, tokens, _PAST))
            sizes = {name: array.shape for name, array in feeds.items()}
            if any(sizes == {name: array.shape for name, array in other.items()} for other in found):
                continue  # the model has fixed dimensions
            if self._settings.shapes is None and tokens < _FEW_TOKENS and found:
                break
            try:
                self._original.run(None, feeds)
            except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
                problem = f"the original model does not run at shape {batch} x {tokens} (batch x tokens): "
                problem += f"{one_line(error)}; give ortolan.search shapes=… that it takes"
                if self._settings.shapes is not None:
                    raise CalibrationError(problem) from error
                continue
            found.append(feeds)
            ids = feeds.get("input_ids")  # of another shape where the model fixes one
            self.report.shapes.append((batch, tokens) if ids is None or ids.ndim != 2 else ids.shape)
        if not found and self._settings.shapes is None:  # the model runs at one shape only: that of its feeds
            for feeds in self._evidence.feeds()[:1]:
                ids = feeds.get("input_ids", next(iter(feeds.values())))
                found.append(feeds)
                self.report.shapes.append((*ids.shape, 1, 1)[:2])
        if not found:
            raise CalibrationError(problem)
        return found

    def _by_bits(self, limit: Limit) -> Made | None:
        """Return the model with 4 bits in all layers, or in as many as the budget allows; None where it is over the
        budget or no faster than the original. A step of one token takes as long as reading its weights."""
        search = BitSearch(self._evidence, BitSettings(Form(weights="int4"), limit), self._name, self._progress)
        found, shapes = search.report, self.report.shapes
        found.budget = self.report.budget
        try:
            made = search.run()
        except (NothingToReplaceError, VerificationError):
            return None
        self._progress(Stage.TIME_MODELS, 0, 1)
        before, (after,) = time_models(self._original, [made.path], self._shape_feeds)
        self._progress(Stage.TIME_MODELS, 1, 1)
        gained = gain(before, after)
        if gained < _GAIN:
            made.delete()
            return None
        found.shapes, found.before, found.after = shapes, before, after
        found.outcome = f"{gained:.2f}x faster (by minimum or median, whichever is less); {found.outcome}"
        self.report = found
        return made

    def _within(self, path: Sequence[Step], trials: Trials) -> int:
        """How many steps of the path the budget allows."""
        low, high = 0, len(path) + 1
        middle = trials.expected(path)
        best: Made | None = None
        while high - low > max(1, len(path) // _FINEST):
            made = trials.make(path[:middle], False)
            if made is None:
                high = middle
            else:
                trials.drop(best)
                low, best = middle, made
            # Further, where the expectation held.
            further = min(len(path), low + max(1, len(path) // 4))
            middle = further if high > len(path) else (low + high) // 2
        return low

    def _fastest(self, steps: int, path: Sequence[Step], trials: Trials) -> Made | None:
        """Of the models within the budget, with fused attention and without, the fastest; None: the original."""
        while True:
            tried = [
                trials.make(path[:steps], attention)
                for attention in ([False, True] if self._has_attention else [False])
            ]
            made = [one for one in tried if one is not None]
            if made:
                self._progress(Stage.TIME_MODELS, 0, 1)
                originals, times = time_models(self._original, [one.path for one in made], self._shape_feeds)
                self._progress(Stage.TIME_MODELS, 1, 1)
                gains = [gain(originals, after) for after in times]
                best = best_of(gains, [one.attention for one in made])
                self.report.before, self.report.after = originals, times[best]
                fast = gains[best] >= _GAIN
                trials.drop(*(one for number, one in enumerate(made) if number != best or not fast))
                if fast:
                    return made[best]
            if not steps:
                return None
            steps //= 2

    def _conclude(self, path: Sequence[Step], best: Made | None) -> None:
        report = self.report
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
        report.gain = gain(report.before, report.after)
        faster = f"{report.gain:.2f}x faster in the mean over the shapes (by minimum or median, whichever is less)"
        report.outcome = f"{faster}; {best.trial.found}; budget: {report.budget}"


def _may_hold_products(model: ir.Model) -> bool:
    """Whether there is anything to measure. Functions, and operators of other domains, may hold products."""
    nodes = list(model.graph.all_nodes())
    return bool(model.functions) or any(
        node.domain not in DEFAULT_DOMAINS or node.op_type in _PRODUCTS for node in nodes
    )


def best_of(gains: Sequence[float], fused: Sequence[bool]) -> int:
    """The index of the model to take, of those that gain enough if there are some. fused: whether it has fused
    attention: nearly as fast is good enough then, as no shape that is timed has padding, where it gains most."""
    enough = [index for index, one in enumerate(gains) if one >= _GAIN] or range(len(gains))
    return max(enough, key=lambda index: gains[index] * (_FUSED_GAIN if fused[index] else 1.0))
