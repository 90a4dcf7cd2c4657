"""State of a run for KV caches, and the prompt that becomes part of the model."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..measure.feeds import Feeds
from ..weights.cache_format import CacheFormat, CacheUse, ExactKeys
from .prompt import Prompt


@dataclass
class Caches:
    """KV caches of the model and how passes changed them."""

    # Caches of all attentions, replaced or not, by the name of the cache's input.
    uses: dict[str, CacheUse] = field(default_factory=dict)
    taken: set[str] = field(default_factory=set)  # key cache inputs of attention that pass compress_cache replaces
    formats: dict[str, CacheFormat] = field(default_factory=dict)  # formats of cache inputs that passes have changed
    exact_keys: dict[str, ExactKeys] = field(default_factory=dict)  # added inputs, missing in the original model
    outputs: set[str] = field(default_factory=set)  # cache outputs in the format of the inputs in `formats`
    # Expected relative error of attention that reads its keys and values from a cache, by its output.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    prompt_ids: np.ndarray | None = None  # int64 [1, tokens], given by the user
    prompt: Prompt | None = None  # set by pass cache_prompt

    def encode(self, feeds: Feeds) -> Feeds:
        """Convert feeds of the original model to feeds of the optimized model."""
        feeds = feeds if self.prompt is None else self.prompt.counted_in(feeds)
        encoded = {name: self.formats[name].encode(one) if name in self.formats else one for name, one in feeds.items()}
        return encoded | {name: keys.of(feeds[keys.cache]) for name, keys in self.exact_keys.items()}
