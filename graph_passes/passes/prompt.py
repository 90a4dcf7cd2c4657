"""A prompt that becomes part of a model: its pruned keys and values, and the effect on feeds and answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError

from ..measure.feeds import Feeds
from ..operators.prompt_cache import PromptCache
from .magnitude import find_threshold, pruned_tensor


@dataclass(frozen=True, eq=False)
class Prompt:
    """A prompt that becomes part of a model. Names of cache inputs are those of the original model."""

    feeds: Feeds  # feeds of the original model: the prompt's tokens, with an empty cache
    caches: dict[str, PromptCache]  # pruned keys and values, by the name of the key cache input
    values_of: dict[str, str]  # maps the name of each key cache input to the value cache input
    presents: dict[str, str]  # maps the name of each cache input to the cache output

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return int(self.feeds["input_ids"].shape[1])

    def pruned_past(self) -> Feeds:
        """Return the packed keys and values as cache inputs [1, kv_heads, tokens, head_dim]."""
        keys = {name: cache.keys[None] for name, cache in self.caches.items()}
        return keys | {self.values_of[name]: cache.values[None] for name, cache in self.caches.items()}

    def exact_past(self, session: Any) -> Feeds:
        """Return the prompt's keys and values as the original model computes them in this session."""
        outputs = session.run(list(self.presents.values()), self.feeds)
        return dict(zip(self.presents, outputs, strict=True))

    def in_front_of(self, feeds: Feeds, past: Feeds) -> Feeds:
        """Return feeds of the original model with the prompt in the past of every sequence."""
        batch = len(feeds["input_ids"])
        joined = {
            name: np.concatenate([np.repeat(rows, batch, axis=0), feeds[name]], axis=2) for name, rows in past.items()
        }
        return self.counted_in(feeds) | joined

    def counted_in(self, feeds: Feeds) -> Feeds:
        """Return feeds for a model that contains the prompt: masks and positions include its tokens, caches do not."""
        counted = dict(feeds)
        if (mask := feeds.get("attention_mask")) is not None:
            counted["attention_mask"] = np.concatenate([np.ones((len(mask), self.tokens), mask.dtype), mask], axis=1)
        if (positions := feeds.get("position_ids")) is not None:
            counted["position_ids"] = positions + positions.dtype.type(self.tokens)
        return counted

    def cut_from(self, names: Sequence[str], answers: Sequence[np.ndarray | None]) -> list[np.ndarray | None]:
        """Return the outputs `names` of the original model without the prompt's tokens in the caches."""
        presents = set(self.presents.values())
        return [
            one[:, :, self.tokens :] if one is not None and name in presents else one
            for name, one in zip(names, answers, strict=True)
        ]


def prune_prompt(
    keys: np.ndarray, values: np.ndarray, keys_sparsity: float, values_sparsity: float, scope: str = "token"
) -> PromptCache:
    """Set the smallest keys and values of a layer, float32 [kv_heads, tokens, head_dim], to zero.

    Sparsity 0 stores them dense. scope: prune each head of each token ("token"), or the whole layer ("layer").

    Raises:
        ModelError: a key or value is NaN or infinity.
    """
    prune = {"token": _pruned_rows, "layer": _pruned_layer}[scope]
    return PromptCache(
        _to_bfloat16(prune(keys, keys_sparsity, "prompt's keys")),
        _to_bfloat16(prune(values, values_sparsity, "prompt's values")),
        dense_keys=keys_sparsity == 0,
        dense_values=values_sparsity == 0,
    )


def _to_bfloat16(array: np.ndarray) -> np.ndarray:
    return array.astype(ml_dtypes.bfloat16).astype(np.float32)


def _pruned_layer(array: np.ndarray, sparsity: float, name: str) -> np.ndarray:
    tensor = ir.tensor(np.ascontiguousarray(array, np.float32))
    threshold = find_threshold([tensor], [name], round(sparsity * array.size))
    return pruned_tensor(tensor, threshold).numpy()


def _pruned_rows(array: np.ndarray, sparsity: float, name: str) -> np.ndarray:
    if not np.isfinite(array).all():
        raise ModelError(f"the {name} hold NaN or infinity, so they cannot be pruned; give another prompt")
    pruned = array.astype(np.float32)
    smallest = np.argsort(np.abs(pruned), axis=-1, kind="stable")[..., : round(sparsity * array.shape[-1])]
    np.put_along_axis(pruned, smallest, 0, axis=-1)
    return pruned
