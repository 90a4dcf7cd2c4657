"""The budget of a search: how much worse than the original the optimized model may be, or how large."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, RecipeError, wrong_type

from ..measure.feeds import Feeds, has_past
from ..report.optimization import OutputDeviation

DEFAULT_COSINE = 0.99
# Default cosine for synthetic inputs; stricter, because the cosine on real inputs may be lower (docs/auto.md).
MADE_UP_COSINE = 0.9925
DEFAULT_PERPLEXITY = 0.01
_LARGEST = 700.0  # exp of a larger value overflows
Run = Callable[[Feeds], dict[str, np.ndarray]]  # run(feeds) returns a model's outputs by name
Budget = float | Callable[[Run, Run], bool]

_COSINE, _PERPLEXITY, _DIVERGENCE, _BYTES = "cosine", "perplexity", "divergence", "bytes"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?) ?([KMG]?B|)", re.IGNORECASE)
_LOGITS = "logits"
_BUDGET = "a cosine of outputs, above 0 and at most 1, or a function (run_original, run_optimized) -> bool"
_INCREASE = "a number of at least 0, such as 0.01 for 1 %"
_BYTE_COUNT = "a number of bytes above 0, or a string such as '100MB'"
# The argument that sets each kind of limit.
_ARGUMENTS = {_PERPLEXITY: "max_perplexity_increase", _DIVERGENCE: "max_perplexity_increase", _BYTES: "max_bytes"}


@dataclass(frozen=True)
class Limit:
    """A checked budget.

    Attributes:
        kind: "cosine", "perplexity", "divergence" (perplexity of the original's own next tokens), "bytes", "function".
        number: The limit: the least cosine similarity to the original, the largest relative increase of perplexity, or
        the largest number of bytes.
        accepts: The user's function, for kind "function".
    """

    kind: str
    number: float = 0.0
    accepts: Callable[[Run, Run], bool] | None = None

    @property
    def argument(self) -> str:
        """The argument of `optimize_onnx` and `search` that sets this limit."""
        return _ARGUMENTS.get(self.kind, "budget")

    def __str__(self) -> str:
        if self.kind == _COSINE:
            return f"cosine of each output at least {self.number:g}"
        if self.kind == _PERPLEXITY:
            return f"perplexity up by at most {100 * self.number:g} %"
        if self.kind == _DIVERGENCE:
            return f"perplexity of its own next tokens up by at most {100 * self.number:g} %"
        if self.is_size:
            return f"files of at most {self.number / 1e6:g} MB"
        return "accepted by the given function"

    @property
    def error(self) -> float:
        """The approximate largest relative error of outputs within the limit; infinity if unknown."""
        return math.sqrt(2 * (1 - self.number)) if self.kind == _COSINE else math.inf

    @property
    def needs_runs(self) -> bool:
        """True if judging needs runs of the models besides the comparison of outputs."""
        return self.kind not in (_COSINE, _BYTES)

    @property
    def is_size(self) -> bool:
        """True for a limit on bytes."""
        return self.kind == _BYTES

    def check_model(self, model: ir.Model) -> None:
        """Refuse a limit on perplexity for a model without logits.

        Raises:
            RecipeError: The model has no output "logits".
        """
        names = [value.name or "" for value in model.graph.outputs]
        if self.kind in (_PERPLEXITY, _DIVERGENCE) and _LOGITS not in names:
            raise RecipeError(
                f"max_perplexity_increase needs a decoder with an output {_LOGITS!r}; the model's outputs are "
                f"{', '.join(names)}; give budget=0.99 instead"
            )

    def of_own_tokens(self) -> Limit:
        """Return the limit for random inputs, which have no correct next token: "divergence" for "perplexity"."""
        return replace(self, kind=_DIVERGENCE) if self.kind == _PERPLEXITY else self

    def judge_size(self, size: int) -> tuple[bool, str]:
        """Return whether `size` bytes are within the limit, and the size as text."""
        return size <= self.number, f"{size / 1e6:.1f} MB"

    def outputs(self, names: Sequence[str]) -> list[str]:
        """Return the names of the outputs that are judged."""
        logits_count = self.kind in (_PERPLEXITY, _DIVERGENCE) and _LOGITS in names
        return [name for name in names if name == _LOGITS or not logits_count]

    def judge(
        self, errors: Sequence[OutputDeviation], feeds: Sequence[Feeds], before: Run | None, after: Run | None
    ) -> tuple[bool, str]:
        """Return whether a model is within the limit, and the result as text.

        errors: Deviations from the original's outputs. before, after: Run the original and the optimized model;
        required if `needs_runs`.
        """
        if self.kind == _COSINE:
            worst = min(errors, key=lambda error: -math.inf if math.isnan(error.cosine) else error.cosine, default=None)
            if worst is None:
                return False, "no comparable output"
            return worst.cosine >= self.number, f"cosine {worst.cosine:.5f} ({worst.name})"
        assert before is not None and after is not None
        if self.accepts is not None:
            accepted = bool(self.accepts(before, after))
            return accepted, f"{'accepted' if accepted else 'refused'} by the given function"
        if self.kind == _DIVERGENCE:
            rise = divergence_rise(before, after, feeds)
            return rise <= self.number, f"perplexity of its own next tokens {100 * rise:+.2f} %"
        rise, error = perplexity_rise(before, after, feeds)
        return rise + error <= self.number, f"perplexity {100 * rise:+.2f} ± {100 * error:.2f} %"


def read_limit(budget: Any, max_perplexity_increase: Any = None, max_bytes: Any = None) -> Limit | None:
    """Return the limit that one of the three arguments sets; None if all of them are None.

    Raises:
        ArgumentTypeError: An argument has the wrong type.
        RecipeError: An argument is out of range.
    """
    if max_bytes is not None:
        return Limit(_BYTES, _read_bytes(max_bytes))
    if max_perplexity_increase is not None:
        increase = _read_number("max_perplexity_increase", max_perplexity_increase, _INCREASE)
        if not 0 <= increase < math.inf:
            raise RecipeError(f"max_perplexity_increase is {max_perplexity_increase!r}, expected {_INCREASE}")
        return Limit(_PERPLEXITY, increase)
    if budget is None:
        return None
    if callable(budget):
        return Limit("function", accepts=budget)
    cosine = _read_number("budget", budget, _BUDGET)
    if not 0 < cosine <= 1:
        raise RecipeError(f"budget is {budget!r}, expected {_BUDGET}")
    return Limit(_COSINE, cosine)


def _read_number(name: str, value: Any, expected: str) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise wrong_type(name, value, expected)
    return float(value)


def _read_bytes(value: Any) -> float:
    """Return the bytes of 100_000_000, "100MB" or "1e8"."""
    number = math.nan
    if isinstance(value, str):
        if found := _SIZE.fullmatch(value.strip()):
            number = float(found[1]) * _UNITS[found[2].upper()]
    elif isinstance(value, Integral) and not isinstance(value, bool):
        number = float(value)
    else:
        raise wrong_type("max_bytes", value, _BYTE_COUNT)
    if not 0 < number < math.inf:
        raise RecipeError(f"max_bytes is {value!r}, expected {_BYTE_COUNT}")
    return number


def default_limit(model: ir.Model, calibrated: bool) -> Limit:
    """Return the limit if no budget was given: perplexity for decoders, else the cosine of the outputs.

    Without calibration data, inputs are random and have no correct next token. Then decoders get kind "divergence",
    which compares all probabilities, and other models a stricter cosine.
    """
    if has_past(model) and _LOGITS in {value.name for value in model.graph.outputs}:
        return Limit(_PERPLEXITY if calibrated else _DIVERGENCE, DEFAULT_PERPLEXITY)
    return Limit(_COSINE, DEFAULT_COSINE if calibrated else MADE_UP_COSINE)


def perplexity(run: Run, feeds: Sequence[Feeds]) -> float:
    """Return exp of the mean cross-entropy of all tokens but the first of each sequence.

    Raises:
        CalibrationError: No feed has two tokens or more with logits.
    """
    return math.exp(_cross_entropies(run, feeds).mean())


def perplexity_rise(before: Run, after: Run, feeds: Sequence[Feeds]) -> tuple[float, float]:
    """Return the relative increase of perplexity, and its standard error (from the differences per token).

    Raises:
        CalibrationError: No feed has two tokens or more with logits.
    """
    differences = _cross_entropies(after, feeds) - _cross_entropies(before, feeds)
    rise = _exp(float(differences.mean()))
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return rise - 1, rise * error


def divergence_rise(before: Run, after: Run, feeds: Sequence[Feeds]) -> float:
    """Return the relative increase of perplexity if next tokens are drawn from the original's distribution.

    This is exp of the mean Kullback-Leibler divergence over all tokens of the feeds, minus 1.
    """
    total, count = 0.0, 0
    for one in feeds:
        answers = [run(one)[_LOGITS] for run in (before, after)]
        for rows in zip(*answers, strict=True):  # one sequence at a time: vocabularies are large
            exact, found = map(_log_probabilities, rows)
            with np.errstate(invalid="ignore"):  # tokens with probability 0 in both models
                terms = np.where(exact > -np.inf, np.exp(exact) * (exact - found), 0.0)
            total, count = total + float(terms.sum()), count + terms[..., 0].size
    return _exp(total / count) - 1


def _exp(number: float) -> float:
    return math.exp(number) if number < _LARGEST else math.inf


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _cross_entropies(run: Run, feeds: Sequence[Feeds]) -> np.ndarray:
    """Return the cross-entropy of each token but the first of a sequence, float64 [tokens]."""
    found: list[np.ndarray] = []
    of_one_token = None
    for one in feeds:
        ids = one.get("input_ids")
        logits = run(one).get(_LOGITS) if ids is not None and ids.ndim == 2 and ids.shape[1] > 1 else None
        if ids is None or logits is None or logits.shape[:2] != ids.shape:
            if ids is not None and logits is not None and logits.ndim == 3 and logits.shape[:2] == (len(ids), 1):
                of_one_token = logits.shape, ids.shape
            continue
        mask = one.get("attention_mask", np.ones_like(ids))[:, -ids.shape[1] :]
        seen = (mask[:, 1:] != 0) & (mask[:, :-1] != 0)
        rows = logits[:, :-1][seen].astype(np.float64)
        wanted = ids[:, 1:][seen]
        rows -= rows.max(axis=1, keepdims=True)
        chosen = rows[np.arange(len(wanted)), wanted]
        found.append(np.log(np.exp(rows).sum(axis=1)) - chosen)
    if not sum(map(len, found)):
        raise _no_entropies(of_one_token)
    return np.concatenate(found)


def _no_entropies(of_one_token: tuple[tuple[int, ...], tuple[int, ...]] | None) -> CalibrationError:
    """Return the error. of_one_token: shapes of logits and input_ids if the model returns only the last logits."""
    if of_one_token is not None:
        logits, ids = map(list, of_one_token)
        return CalibrationError(
            f"logits have shape {logits} for input_ids {ids}, those of one token, but a limit on perplexity needs "
            f"all, {[*ids, logits[-1]]}; optimize the model before keep_last_logits, then call keep_last_logits on the "
            "result; or give a cosine as budget"
        )
    return CalibrationError(
        "a limit on perplexity needs calibration data with input_ids of two tokens or more, and a model with logits "
        "[batch, tokens, vocabulary]; give texts and a decoder, or a cosine as budget"
    )
