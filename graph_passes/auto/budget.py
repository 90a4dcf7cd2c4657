"""How much worse than the original a model that the search finds may be."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, RecipeError

from ..measure.feeds import Feeds, has_past
from ..report.optimization import OutputDeviation

DEFAULT_COSINE = 0.99
# Of made-up inputs: of real ones it may be less. docs/auto.md.
MADE_UP_COSINE = 0.9925
DEFAULT_PERPLEXITY = 0.01
_LARGEST = 700.0  # of which exp is a number
Run = Callable[[Feeds], dict[str, np.ndarray]]  # run(feeds) gives a model's outputs by name
Budget = float | str | Mapping[str, float] | Callable[[Run, Run], bool]

_COSINE, _PERPLEXITY, _DIVERGENCE, _BYTES = "cosine", "perplexity", "divergence", "bytes"
_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SIZE = re.compile(r"([0-9.]+(?:e[0-9]+)?) ?([KMG]?B|)", re.IGNORECASE)
_LOGITS = "logits"
_EXPECTED = (
    "a cosine of outputs such as 0.99; perplexity:0.02, by what share a decoder's perplexity may rise; or a function "
    "(run of the original, run of the optimized model) -> bool"
)


@dataclass(frozen=True)
class Limit:
    """The smallest cosine of an output, the largest rise of perplexity, the size of the files, or what the user's
    function accepts."""

    kind: str
    number: float = 0.0
    accepts: Callable[[Run, Run], bool] | None = None

    @classmethod
    def read(cls, budget: Budget, sizes: bool = False) -> Limit:
        """sizes: whether it may be one of bytes. Raises RecipeError."""
        if callable(budget):
            return cls("function", accepts=budget)
        kind, number = _COSINE, budget
        if isinstance(budget, str):
            name, colon, text = budget.rpartition(":")
            kind = name if colon else _COSINE
            if kind == _BYTES and sizes:
                kind, number = _BYTES, _read_bytes(text)
            else:
                try:
                    number = float(text)
                except ValueError:
                    number = math.nan
        elif isinstance(budget, Mapping) and len(budget) == 1:
            kind, number = next(iter(budget.items()))
        if isinstance(number, int | float) and not isinstance(number, bool):
            if kind == _COSINE and 0 < number <= 1:
                return cls(kind, float(number))
            if kind == _PERPLEXITY and 0 <= number < math.inf:
                return cls(kind, float(number))
            if kind == _BYTES and sizes and 0 < number < math.inf:
                return cls(kind, float(number))
        also = "; or bytes:100MB, the size of the files" if sizes else ""
        raise RecipeError(f"budget is {budget!r}, expected {_EXPECTED}{also}")

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
        """About the relative error of outputs that is still within; infinity where that is not known."""
        return math.sqrt(2 * (1 - self.number)) if self.kind == _COSINE else math.inf

    @property
    def needs_runs(self) -> bool:
        return self.kind not in (_COSINE, _BYTES)

    @property
    def is_size(self) -> bool:
        return self.kind == _BYTES

    def of_own_tokens(self) -> Limit:
        """For inputs of which no next token is right: a limit of perplexity becomes one of the tokens that the original
        would choose."""
        return replace(self, kind=_DIVERGENCE) if self.kind == _PERPLEXITY else self

    def judge_size(self, size: int) -> tuple[bool, str]:
        """Whether files of so many bytes are within a limit of bytes, and what was found."""
        return size <= self.number, f"{size / 1e6:.1f} MB"

    def outputs(self, names: Sequence[str]) -> list[str]:
        """Those that count."""
        logits_count = self.kind in (_PERPLEXITY, _DIVERGENCE) and _LOGITS in names
        return [name for name in names if name == _LOGITS or not logits_count]

    def judge(
        self, errors: Sequence[OutputDeviation], feeds: Sequence[Feeds], before: Run | None, after: Run | None
    ) -> tuple[bool, str]:
        """Whether a model is within the budget, and what was found.

        errors: of its outputs against the original's. before, after: run the models; needed if needs_runs.
        """
        if self.kind == _COSINE:
            worst = min(errors, key=lambda error: -math.inf if math.isnan(error.cosine) else error.cosine, default=None)
            if worst is None:
                return False, "no output that can be compared"
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


def _read_bytes(text: str) -> float:
    """ "100MB" or "1e8"; NaN for what is neither."""
    found = _SIZE.fullmatch(text.strip())
    return float(found[1]) * _UNITS[found[2].upper()] if found else math.nan


def default_limit(model: ir.Model, calibrated: bool) -> Limit:
    """For a decoder its perplexity, for any other model the cosine of its outputs. calibrated: whether feeds are given:
    of made-up ones no next token is right, so what counts are the probabilities of all of them (kind "divergence"), and
    a cosine keeps a distance."""
    if has_past(model) and _LOGITS in {value.name for value in model.graph.outputs}:
        return Limit(_PERPLEXITY if calibrated else _DIVERGENCE, DEFAULT_PERPLEXITY)
    return Limit(_COSINE, DEFAULT_COSINE if calibrated else MADE_UP_COSINE)


def perplexity(run: Run, feeds: Sequence[Feeds]) -> float:
    """exp of the mean cross-entropy of each token but the first, over all feeds. Raises CalibrationError."""
    return math.exp(_cross_entropies(run, feeds).mean())


def perplexity_rise(before: Run, after: Run, feeds: Sequence[Feeds]) -> tuple[float, float]:
    """By what share perplexity is higher, and the standard error of that, from the differences token by token: of few
    tokens it says little. Raises CalibrationError."""
    differences = _cross_entropies(after, feeds) - _cross_entropies(before, feeds)
    rise = _exp(float(differences.mean()))
    error = float(differences.std(ddof=1)) / math.sqrt(len(differences)) if len(differences) > 1 else math.inf
    return rise - 1, rise * error


def divergence_rise(before: Run, after: Run, feeds: Sequence[Feeds]) -> float:
    """By what share perplexity is higher of next tokens as the model before would choose them, over all tokens of the
    feeds: exp of the mean Kullback-Leibler divergence, less 1."""
    total, count = 0.0, 0
    for one in feeds:
        answers = [run(one)[_LOGITS] for run in (before, after)]
        for rows in zip(*answers, strict=True):  # one sequence at a time: vocabularies are large
            exact, found = map(_log_probabilities, rows)
            with np.errstate(invalid="ignore"):  # of tokens that are out of the question for both
                terms = np.where(exact > -np.inf, np.exp(exact) * (exact - found), 0.0)
            total, count = total + float(terms.sum()), count + terms[..., 0].size
    return _exp(total / count) - 1


def _exp(number: float) -> float:
    """Infinity where it is too large."""
    return math.exp(number) if number < _LARGEST else math.inf


def _log_probabilities(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    found: np.ndarray = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return found


def _cross_entropies(run: Run, feeds: Sequence[Feeds]) -> np.ndarray:
    """Of each token but the first, float64."""
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
    """of_one_token: the shapes of logits and of input_ids, where logits are those of one token."""
    if of_one_token is not None:
        logits, ids = map(list, of_one_token)
        return CalibrationError(
            f"the budget limits perplexity, but to input_ids {ids} the model answers with logits {logits}, those of "
            f"one token; expected those of all, {[*ids, logits[-1]]}; optimize the model as it was before "
            "keep_last_logits, then keep the last logits of the result; or give a budget of cosine"
        )
    return CalibrationError(
        "the budget limits perplexity, but no calibration feed has input_ids of two tokens or more to which the "
        "model answers with logits [batch, tokens, vocabulary]; give texts and a decoder, or a budget of cosine"
    )
