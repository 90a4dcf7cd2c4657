"""What the passes of a run know of caches of keys and values, and of the prompt that becomes part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..measure.feeds import Feeds
from ..weights.cache_format import CacheFormat, CacheUse, ExactKeys
from .prompt import Prompt


@dataclass
class Caches:
    # Of all attention with a cache, whether or not it is replaced, by the input.
    uses: dict[str, CacheUse] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # inputs of attention that pass compress_cache replaces
    formats: dict[str, CacheFormat] = field(default_factory=dict)  # of inputs that no longer hold floats
    exact_keys: dict[str, ExactKeys] = field(default_factory=dict)  # inputs that the original has not
    outputs: set[str] = field(default_factory=set)  # that hold the same as the inputs of `formats` a token later
    # ||Y - Z|| / ||Z|| of attention that reads its keys and values from a cache, by the output.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    prompt_ids: np.ndarray | None = None  # int64 [1, tokens], given by the user
    prompt: Prompt | None = None  # made by a pass cache_prompt

    def encode(self, feeds: Feeds) -> Feeds:
        """The original model's feeds as the optimized one takes them."""
        feeds = feeds if self.prompt is None else self.prompt.counted_in(feeds)
        encoded = {name: self.formats[name].encode(one) if name in self.formats else one for name, one in feeds.items()}
        return encoded | {name: keys.of(feeds[keys.cache]) for name, keys in self.exact_keys.items()}
