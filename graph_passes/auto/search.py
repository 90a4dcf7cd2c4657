"""Recipe "auto": the search for the fastest recipe of a model.

    time    of the original and of each format, for each distinct layer alone (layer_times.py)
    error   ||XW - Y|| / ||XW|| of each format that is faster than the original and than all more accurate formats,
            measured in one run of a recipe for each format. The inputs X are held out from fitting weights. Y is the
            operator's output, so that its rounding counts too. It is multiplied by the sensitivity of the outputs to
            that layer (sensitivity.py)
    path    each layer has steps to faster formats with more error. The path has the steps of all layers, ordered by
            time saved per squared error, because errors of layers add up in squares (path.py)
    budget  bisection finds the furthest point of the path at which the whole model is within the budget on the
            held-out feeds; it starts where the errors of layers predict that point
    time    of the whole model and the original, at each shape, with and without fused attention. If the model is not
            faster, the first half of the steps is tried, and so on; if no step remains, the model is unchanged

A decoder's speed with one token per step is limited by the bytes of its weights, so mixed bits are tried first
(bits.py). The search above follows if no such model is within the budget and faster.

The result is an ordinary recipe.
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
_FEW_TOKENS = 16  # shorter default shapes are used only for models that do not accept 16 tokens
DECODER_SHAPES = ((1, 1),)  # one new token after _PAST cached tokens
_PAST = 128  # number of cached tokens for DECODER_SHAPES
_FEEDS = 16  # limit of the feeds on which the whole model is evaluated
_FINEST = 16  # bisection stops at 1/16 of the path
_FUSED_GAIN = 1.05  # bonus factor for fused attention, which gains most with padding; feeds for timing have no padding
_GAIN = 1.05  # least mean speed-up over the shapes that justifies an error
_PRODUCTS = frozenset(("MatMul", "Gemm", "Einsum", "Attention", "MatMulInteger", "QLinearMatMul"))

Shapes = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class AutoSettings:
    """Settings of a search.

    Attributes:
        limit: None: `default_limit`.
        shapes: The (batch, tokens) pairs to optimize for; None: `default_shapes`.
        sparsity: Also try formats that are pruned to this fraction of zeros.
        reproducible: As for `Recipe.reproducing`.
    """

    limit: Limit | None
    shapes: tuple[tuple[int, int], ...] | None = None
    sparsity: float | None = None
    reproducible: str | None = None

    @classmethod
    def read(
        cls,
        budget: Any = None,
        shapes: Any = None,
        sparsity: Any = None,
        max_perplexity_increase: Any = None,
        reproducible: str | None = None,
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
        return cls(limit, None if shapes is None else _read_shapes(shapes), sparsity, reproducible)


def _read_shapes(shapes: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(shapes, list | tuple):
        raise wrong_type("shapes", shapes, "a list of (batch, tokens) pairs such as [(1, 128), (1, 16)]")
    found: list[tuple[int, int]] = []
    for shape in shapes:
        sizes = shape if isinstance(shape, list | tuple) and len(shape) == 2 else (0, 0)
        if not all(isinstance(size, int) and size > 0 for size in sizes):
            found.clear()
            break
        found.append((int(sizes[0]), int(sizes[1])))
    if not found:
        raise RecipeError(f"shapes is {shapes!r}, expected (batch, tokens) pairs such as [(1, 128), (1, 16)]")
    return tuple(dict.fromkeys(found))


def default_shapes(model: ir.Model) -> list[tuple[int, int]]:
    """Return the default (batch, tokens) pairs, followed by shorter ones for models that need them."""
    return [*DECODER_SHAPES] if has_past(model) else [*ENCODER_SHAPES, (1, 8), (1, 4), (1, 1)]


class Search:
    """The search for one model. Temporary files go to `evidence.folder`.

    Attributes:
        report: The measurements.
    """

    def __init__(
        self,
        evidence: Evidence,
        settings: AutoSettings,
        name: str,
        *,
        progress: Progress,
        times: LayerTimes | None = None,
    ) -> None:
        """Prepare the search.

        name: The file name of the result. times: Times of layers; None: those of the cache folder.
        """
        if settings.limit is not None:
            settings.limit.check_model(evidence.source.model)
        self._evidence, self._settings, self._name = evidence, settings, name
        self._progress = progress
        self._times = LayerTimes() if times is None else times
        self._calibrated = not evidence.made_up
        self.report = AutoReport("", [])

    def run(self) -> Made | None:
        """Return the fastest model within the budget; None if no model is faster than the original."""
        evidence, report = self._evidence, self.report
        if not _may_hold_products(evidence.source.model):
            report.outcome = "the model is unchanged: it has no matrix products"
            return None
        self._original = evidence.open_original(timed=True)
        evidence.feeds(self._original)
        evidence.hold_out(HELD_OUT)
        judged = evidence.feeds_to_judge(len(evidence.held_out) or None, self._original)[:_FEEDS]
        limit = self._settings.limit or default_limit(evidence.source.model, self._calibrated)
        report.budget = str(limit)
        if evidence.sampled:
            report.budget += ", on text sampled from the model; typical texts give a better result (--calibration)"
        elif not self._calibrated:
            report.budget += ", on synthetic inputs; typical texts give a better result (--calibration)"
        elif not evidence.held_out:
            report.budget += (
                f", on the feeds that weights are fitted to; {HELD_OUT} or more feeds or texts give a better estimate"
            )
        self._shape_feeds = self._find_shapes(evidence.source)
        if (
            self._settings.sparsity is None
            and has_past(evidence.source.model)
            and {*report.shapes} == {*DECODER_SHAPES}
        ):
            by_bits = self._by_bits(limit)
            if by_bits is not None:
                return by_bits
        forms = candidates_for(self._calibrated, self._settings.sparsity, self._settings.reproducible)
        study = LayerStudy(evidence, report, self._times, self._progress)
        study.measure(self._shape_feeds, judged, limit, forms)
        self._has_attention = study.has_attention
        path = make_path(report, forms)
        where = self._settings.reproducible
        trials = Trials(evidence, limit, judged, self._name, self._progress, reproducible=where)
        report.trials = trials.report
        best = self._fastest(self._within(path, trials), path, trials) if path or self._has_attention else None
        report.measured = self._times.measured
        self._conclude(path, best)
        return best

    def _find_shapes(self, source: ModelFile) -> list[Feeds]:
        """Return random feeds of the shapes.

        Default shapes that the model does not accept are skipped; the shorter ones are used only if it accepts no
        other.

        Raises:
            CalibrationError: The original does not run at a shape.
        """
        found: list[Feeds] = []
        problem = ""
        for batch, tokens in self._settings.shapes or default_shapes(source.model):
            feeds = synthetic_feeds(source.model, Sizes(batch, tokens, _PAST))
            sizes = {name: array.shape for name, array in feeds.items()}
            if any(sizes == {name: array.shape for name, array in other.items()} for other in found):
                continue  # the model has fixed dimensions, so several shapes give the same feeds
            if self._settings.shapes is None and tokens < _FEW_TOKENS and found:
                break
            try:
                self._original.run(None, feeds)
            except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
                problem = f"the original model does not run at shape {batch} x {tokens} (batch x tokens): "
                problem += f"{one_line(error)}; give ortolan.search shapes=… that it supports"
                if self._settings.shapes is not None:
                    raise CalibrationError(problem) from error
                continue
            found.append(feeds)
            ids = feeds.get("input_ids")  # another shape if the model has fixed dimensions
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
        """Return a model with mixed 4 and 8 bits; None if it is not within the budget or not faster."""
        settings = BitSettings(Form(weights="int4"), limit, self._settings.reproducible)
        search = BitSearch(self._evidence, settings, self._name, self._progress)
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
        found.outcome = f"{gained:.2f}x faster (smaller of minimum and median); {found.outcome}"
        self.report = found
        return made

    def _within(self, path: Sequence[Step], trials: Trials) -> int:
        """Return the number of steps of the path that the budget allows."""
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
            # If the prediction was right, try a longer path first.
            further = min(len(path), low + max(1, len(path) // 4))
            middle = further if high > len(path) else (low + high) // 2
        return low

    def _fastest(self, steps: int, path: Sequence[Step], trials: Trials) -> Made | None:
        """Return the fastest model within the budget, with or without fused attention; None: the original."""
        while True:
            tried = [trials.make(path[:steps], attention) for attention in self._fusions()]
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

    def _fusions(self) -> list[bool]:
        """Return whether to try models without and with fused attention. ONNX Runtime's bits depend on the CPU."""
        if not self._has_attention:
            return [False]
        return [True] if self._settings.reproducible is not None else [False, True]

    def _conclude(self, path: Sequence[Step], best: Made | None) -> None:
        report = self.report
        if best is None:
            if not path and not self._has_attention:
                why = "no layer has a format that is faster than the original at all shapes"
            elif not any(trial.within for trial in report.trials):
                why = "none of the models tried is within the budget"
            else:
                why = (
                    f"no model within the budget is {_GAIN:g}x as fast as the original in the mean over the shapes "
                    "without being slower at any shape"
                )
            report.outcome = f"the model is unchanged: {why} ({report.budget})"
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
        faster = f"{report.gain:.2f}x faster in the mean over the shapes (smaller of minimum and median)"
        report.outcome = f"{faster}; {best.trial.found}; budget: {report.budget}"


def _may_hold_products(model: ir.Model) -> bool:
    """Return True if the model has matrix products, or may have some in functions or operators of other domains."""
    nodes = list(model.graph.all_nodes())
    return bool(model.functions) or any(
        node.domain not in DEFAULT_DOMAINS or node.op_type in _PRODUCTS for node in nodes
    )


def best_of(gains: Sequence[float], fused: Sequence[bool]) -> int:
    """Return the index of the best model with a speed-up of at least _GAIN, or of all models if none has it.

    gains: The speed-up of each model. fused: True for models with fused attention, which get a bonus (_FUSED_GAIN).
    """
    enough = [index for index, one in enumerate(gains) if one >= _GAIN] or range(len(gains))
    return max(enough, key=lambda index: gains[index] * (_FUSED_GAIN if fused[index] else 1.0))
