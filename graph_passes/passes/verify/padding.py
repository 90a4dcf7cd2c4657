"""Check that a sequence has the same answers alone and padded in a batch, which pass `unpad` guarantees."""

from __future__ import annotations

from typing import Any

import numpy as np

from ortolan.errors import VerificationError

from ...measure.feeds import Feeds, Outputs
from ...measure.sessions import run_session
from ..context import PassContext

_INPUTS = frozenset(("input_ids", "attention_mask", "token_type_ids", "position_ids"))
# Largest relative error. Only the order of float sums can differ: bf16 layers use another order for few rows.
_TOLERANCE = 1e-2


def verify_padding(context: PassContext, optimized: Any, feeds: Feeds, names: list[str]) -> None:
    """Compare a shortened sequence run alone with the same sequence padded in a batch with a full sequence.

    Models with other inputs, or with fixed batch sizes, are not checked.

    Raises:
        VerificationError: an output differs.
    """
    ids = feeds.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.shape[1] < 2 or not ids.shape[0] or not set(feeds) <= _INPUTS:
        return
    if any(array.shape != ids.shape for array in feeds.values()):
        return
    if not np.all(feeds["attention_mask"]) or any(isinstance(size, int) for size in _sizes(optimized)):
        return
    whole = {name: array[:1] for name, array in feeds.items()}
    tokens = max(ids.shape[1] * 2 // 3, 1)
    short = {name: array[:, :tokens] for name, array in whole.items()}
    behind = [(0, 0), (0, ids.shape[1] - tokens)]
    filled = {name: np.pad(array, behind) for name, array in short.items()}
    filled["input_ids"][:, tokens:] = context.layers.pad_token_id or 0
    both = {name: np.concatenate([array, filled[name]]) for name, array in whole.items()}
    alone, together = (run_session(optimized, one, "the optimized model", VerificationError) for one in (short, both))
    errors = _errors(alone, together, tokens, both["input_ids"].shape)
    for name, error in zip(names, errors, strict=True):
        if not error <= _TOLERANCE:
            raise VerificationError(
                f"output {name!r} of a sequence of {tokens} tokens, padded in a batch, has relative error {error:.3g} "
                f"against the sequence alone, expected at most {_TOLERANCE}; nothing was saved; leave pass 'unpad' "
                "out, and please report this"
            )
    largest = max(errors, default=0.0)
    result = "give equal bits" if largest == 0 else f"differ by relative error {largest:.2g}"
    context.note(f"padding check: {tokens} tokens alone and padded in a batch {result}")


def _sizes(session: Any) -> list[int | str | None]:
    return [size for value in session.get_inputs() for size in value.shape[:2]]


def _errors(alone: Outputs, together: Outputs, tokens: int, shape: tuple[int, ...]) -> list[float]:
    """Return each output's relative error. The short sequence is the last of a batch with input_ids of `shape`."""
    errors = []
    for one, other in zip(alone, together, strict=True):
        if one is None or other is None or one.dtype.kind != "f" or not other.ndim:
            errors.append(0.0)
            continue
        row = other[1:, :tokens] if other.ndim >= 2 and other.shape[:2] == shape else other[1:]
        if row.shape != one.shape:  # not one answer per sequence, such as a weight that is an output
            errors.append(0.0)
            continue
        same = np.array_equal(one, row, equal_nan=True)
        norm = float(np.linalg.norm(one.astype(np.float64)))
        errors.append(0.0 if same else float(np.linalg.norm(one.astype(np.float64) - row)) / norm if norm else np.inf)
    return errors
