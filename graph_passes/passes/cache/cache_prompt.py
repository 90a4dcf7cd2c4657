"""Make a prompt part of a decoder: its keys and values are computed once, pruned, and read by every call.

Keys and values are pruned by magnitude, for each token and head, or for a whole layer (SparAMX, section 6). A later
pass compress_cache puts them into the graph. The cache holds the tokens after the prompt. Masks, positions and lengths
count the prompt's tokens as if they were in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, ModelError, RecipeError, listing, one_line
from ortolan.progress import Stage

from ...find.cached_attention import CachedAttention, find_cached_attentions
from ...measure.feeds import prompt_feeds
from ...options import PassOptions, takes
from ...report.figures import human_bytes
from ..context import RecipePass
from ..normalize import require_normalized
from ..prompt import Prompt, prune_prompt

_COUNTED = ("input_ids", "attention_mask", "position_ids")  # inputs that the prompt's tokens can extend


@dataclass(frozen=True)
class CachePromptOptions(PassOptions):
    """Options of pass `cache_prompt`."""

    # Fraction of keys and of values that become zero; 0 stores them dense, without bitmaps.
    keys_sparsity: float = field(default=0.3, metadata=takes("float", low=0.0, below=1.0))
    values_sparsity: float = field(default=0.5, metadata=takes("float", low=0.0, below=1.0))
    # Prune the smallest elements of each head of each token, or of the whole layer.
    scope: str = field(default="token", metadata=takes("str", choices=("token", "layer")))


class CachePromptPass(RecipePass):
    """Compute the prompt's keys and values with the model as earlier passes left it."""

    options_type = CachePromptOptions
    options: CachePromptOptions

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "cache_prompt")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Run the model on the prompt, and keep the pruned keys and values for pass compress_cache."""
        context = self.context
        if not context.plan.takes_prompt:
            raise RecipeError(
                "pass 'cache_prompt' needs a later pass 'compress_cache', which puts the prompt into the graph; add "
                'it to the recipe (keys and values "float32" leave the cache uncompressed)'
            )
        if context.caches.prompt_ids is None and not context.dry_run:
            raise RecipeError(
                "pass 'cache_prompt' needs a prompt; give prompt=… (--prompt), token ids as an array or an .npy file"
            )
        if context.caches.prompt_ids is None:
            context.note("pass 'cache_prompt' needs a prompt (prompt=…): without it, a run fails")
        elif not context.dry_run:
            self._compute(model, context.caches.prompt_ids)
        return ir.passes.PassResult(model, modified=False)

    def _compute(self, model: ir.Model, ids: np.ndarray) -> None:
        context = self.context
        matches = [match for match in find_cached_attentions(model.graph) if isinstance(match, CachedAttention)]
        if not matches:
            raise ModelError("a prompt was given, but the model has no attention with a cache that can hold it")
        presents: dict[str, str] = {}
        for match in matches:
            presents[match.past_key.name or ""] = match.present_key.name or ""
            presents[match.past_value.name or ""] = match.present_value.name or ""
        feeds = prompt_feeds(ids, model)
        unknown = feeds.keys() - {*_COUNTED, *presents}
        if unknown:
            raise ModelError(
                f"a prompt was given, but the model has inputs {listing(unknown)}; expected only input_ids, "
                "attention_mask, position_ids and cache, for which the effect of the prompt's tokens is known"
            )
        context.progress(Stage.CACHE_PROMPT, 0, len(matches) + 1)
        with context.evidence.open(model, library=True) as session:
            try:
                outputs = dict(zip(presents, session.run(list(presents.values()), feeds), strict=True))
            except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
                raise CalibrationError(
                    f"the model does not run on the prompt of {ids.shape[1]} tokens: {one_line(error)}"
                ) from error
        caches = {}
        for done, match in enumerate(matches, 1):
            context.progress(Stage.CACHE_PROMPT, done, len(matches) + 1)
            keys, values = (outputs.pop(past.name or "")[0] for past in (match.past_key, match.past_value))
            caches[match.past_key.name or ""] = prune_prompt(
                keys, values, self.options.keys_sparsity, self.options.values_sparsity, self.options.scope
            )
        context.progress(Stage.CACHE_PROMPT, len(matches) + 1, len(matches) + 1)
        values_of = {match.past_key.name or "": match.past_value.name or "" for match in matches}
        context.caches.prompt = Prompt(feeds, caches, values_of, presents)
        elements = sum(2 * cache.keys.size for cache in caches.values())
        context.note(
            f"a prompt of {ids.shape[1]} tokens is part of the model: keys {self.options.keys_sparsity:.0%} and values "
            f"{self.options.values_sparsity:.0%} sparse, {human_bytes(4 * elements)} as floats; masks and positions "
            "include its tokens, the cache does not"
        )
