"""Runs a decoder on feeds and yields the keys in its cache, to learn codebooks from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ortolan.errors import CalibrationError, one_line

from .feeds import Feeds
from .recorder import OnRun

_GROUP_BYTES = 256 * 1024**2  # limit for the keys that are held at once, in bytes


def collect_keys(
    session: Any, names: Sequence[str], sizes: Sequence[int], feeds: Sequence[Feeds], max_tokens: int, on_run: OnRun
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the keys of each cache output, sampled evenly over all feeds and positions.

    The model runs once for each group of outputs that fits into _GROUP_BYTES. Tokens that attention_mask marks as
    padding are left out.

    Args:
        session: The decoder.
        names: Names of the cache outputs with keys, each [batch, kv_heads, tokens, head_dim].
        sizes: kv_heads * head_dim of each output.
        feeds: Calibration feeds.
        max_tokens: Largest number of keys per head.
        on_run: Progress callback.

    Yields:
        The index of the output and its keys, float32 [kv_heads, n, head_dim].

    Raises:
        CalibrationError: The model does not run, or keys are empty or not finite.
    """
    quota = -(-max_tokens // len(feeds))
    groups: list[list[int]] = []
    left = 0
    for number, size in enumerate(sizes):
        left -= 4 * max_tokens * size
        if left < 0:
            groups.append([])
            left = _GROUP_BYTES - 4 * max_tokens * size
        groups[-1].append(number)
    done, total = 0, len(groups) * len(feeds)
    for group in groups:
        kept: dict[int, list[np.ndarray]] = {number: [] for number in group}
        for one in feeds:
            on_run(done, total)
            try:
                caches = session.run([names[number] for number in group], one)
            except Exception as error:  # ONNX Runtime's exceptions share no base class
                raise CalibrationError(
                    f"the model does not run on the calibration feeds: {one_line(error)}; check their shapes and types"
                ) from error
            rows = _some_tokens(one, caches[0].shape, quota)
            for number, cache in zip(group, caches, strict=True):
                kept[number].append(cache.transpose(1, 0, 2, 3)[:, rows[0], rows[1]].astype(np.float32))
            done += 1
        for number in group:
            keys = np.concatenate(kept.pop(number), axis=1)[:, :max_tokens]
            if not keys.size or not np.isfinite(keys).all():
                raise CalibrationError(
                    f"the keys {names[number]!r} {'hold NaN or infinity' if keys.size else 'are empty'} on the "
                    "calibration feeds; give other feeds"
                )
            yield number, keys
    on_run(total, total)


def _some_tokens(feeds: Feeds, shape: tuple[int, ...], count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return (sequences, positions) of up to `count` tokens of a cache with this shape."""
    mask = feeds.get("attention_mask")
    here = np.ones((shape[0], shape[2]), bool)
    if mask is not None and mask.shape == here.shape:
        here = mask != 0
    sequence, position = np.nonzero(here)
    if len(position) > count:
        some = np.linspace(0, len(position) - 1, count).astype(int)
        sequence, position = sequence[some], position[some]
    return sequence, position
