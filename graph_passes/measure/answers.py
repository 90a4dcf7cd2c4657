"""Bounds the memory of answers (outputs of a run): long feeds are cut, and large answers go to files."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ortolan.errors import OutputError

from .feeds import Feeds, Outputs

_MIN_BYTES, _MAX_BYTES = 48 * 2**20, 128 * 2**20  # bounds of max_answer_bytes
_IN_MEMORY = 8 * 2**20  # limit for the answers to one feed, in bytes; larger answers go to files
_SMALL = 4096  # arrays of at most this many bytes stay in memory
_PROBED = 8  # number of tokens in the run that measures the size of answers
_FEW_TOKENS = 64  # feeds with fewer tokens are never cut
_BY_TOKENS = frozenset(("input_ids", "position_ids", "token_type_ids"))


def keep(answers: Outputs, folder: Path) -> Outputs:
    """Copy answers, because the originals would keep the session's memory alive.

    Large answers are mapped from temporary files in `folder`. A file is deleted with its array.

    Raises:
        OutputError: A file cannot be written.
    """
    large = sum(answer.nbytes for answer in answers if answer is not None) > _IN_MEMORY
    return [
        None if answer is None else _to_file(answer, folder) if large and answer.nbytes > _SMALL else answer.copy()
        for answer in answers
    ]


def _to_file(array: np.ndarray, folder: Path) -> np.ndarray:
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            # tofile does not say why it failed, and arrays of bfloat16 have no buffer.
            file.write(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
            file.flush()
            return np.memmap(file, array.dtype, mode="r", shape=array.shape)
    except OSError as error:
        raise OutputError(
            f"cannot write a file for the model's answers in {str(folder)!r}: {error.strerror}"
        ) from error


def max_answer_bytes(model_bytes: int) -> int:
    """Return the byte limit for answers to one feed: a quarter of the model's size, within bounds."""
    return min(max(model_bytes // 4, _MIN_BYTES), _MAX_BYTES)


def shorten(feeds: Sequence[Feeds], open_session: Callable[[], Any], max_bytes: int) -> list[Feeds]:
    """Cut feeds to fewer tokens if their answers would take too much memory.

    Feeds that `cut` cannot cut, and feeds of models with a fixed length, are returned unchanged.

    Args:
        feeds: The model's inputs.
        open_session: Opens the model; called only if a feed is long, to run a few of its tokens.
        max_bytes: Limit for the answers to one feed.
    """
    candidates = [one for one in feeds if "input_ids" in one and one["input_ids"].size > _FEW_TOKENS]
    probe = cut(candidates[0], _PROBED) if candidates else None
    if probe is None:
        return list(feeds)
    try:
        answers = open_session().run(None, probe)
    except Exception:  # ONNX Runtime's exceptions share no base class
        return list(feeds)
    size = sum(answer.nbytes for answer in answers if isinstance(answer, np.ndarray))
    tokens = max(max_bytes * probe["input_ids"].size // max(size, 1), 1)  # limit for all sequences together
    shortened = []
    for one in feeds:
        ids = one.get("input_ids")
        long = ids is not None and ids.size > max(tokens, _FEW_TOKENS)
        shorter = cut(one, max(tokens // len(ids), 1)) if ids is not None and long else None
        shortened.append(shorter or one)
    return shortened


def cut(feeds: Feeds, tokens: int) -> Feeds | None:
    """Return the first tokens of each sequence, without leading columns of padding; None for unknown inputs."""
    ids = feeds.get("input_ids")
    if ids is None or ids.ndim != 2 or not ids.size:
        return None
    mask = feeds.get("attention_mask", np.ones_like(ids))
    past = mask.shape[1] - ids.shape[1] if mask.ndim == 2 else -1
    if past < 0:
        return None
    seen = np.flatnonzero(mask.any(axis=0))
    start = int(seen[0]) if len(seen) and not past else 0
    made: Feeds = {}
    for name, array in feeds.items():
        if name == "attention_mask":
            made[name] = array[:, start : past + start + tokens]
        elif name in _BY_TOKENS and array.shape[-1:] == ids.shape[1:]:
            made[name] = array[..., start : start + tokens]
        elif "past" in name and array.ndim == 4:
            made[name] = array
        else:
            return None
    return made
