"""Replace attention with a float cache by NoMADAttention; the cache stays float.

This is pass compress_cache with float32 keys and values, for attention that compress_cache does not replace.
"""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from ortolan.progress import Stage

from ...find.attention import NotAttention
from ...find.cached_attention import CachedAttention
from ...measure.feeds import has_past
from ...report.lines import count
from ..attention.rewrite import AttentionOptions, Refused
from ..context import PassContext
from .compress_cache import CompressCacheOptions, CompressCachePass


class FuseCachedAttentionPass(CompressCachePass):
    """Replace attention with a cache, unless that would make a portable model depend on Ortolan's library."""

    pass_name = "fuse_cached_attention"
    stage = Stage.FUSE_CACHED_ATTENTION
    refusal = "attention with a cache not replaced"
    options_type = AttentionOptions

    def __init__(self, options: AttentionOptions, context: PassContext) -> None:
        floats = CompressCacheOptions(
            options.select, options.exclude, options.precision, options.reproducible, keys="float32", values="float32"
        )
        super().__init__(floats, context)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace attention with a cache, in a model that has one."""
        if not has_past(model):
            return ir.passes.PassResult(model, modified=False)
        return super().call(model)

    def find(self, model: ir.Model) -> Sequence[CachedAttention | NotAttention]:
        """Return the attentions with a cache that pass compress_cache does not replace."""
        found, taken = super().find(model), self.context.caches.taken
        return [
            match
            for match in found
            if (match.cached if isinstance(match, NotAttention) else match.past_key.name not in taken)
        ]

    def why_none(self, model: ir.Model, chosen: Sequence[CachedAttention]) -> str | None:
        """Explain why no attention can be replaced; None if they can."""
        if not self.context.portable or (not self.context.caches.taken and self.has_function(model, chosen)):
            return None
        return "one ONNX function cannot serve it and the model's other attention; portable=False needs no function"

    def announce(self, chosen: Sequence[CachedAttention], refused: Refused) -> None:
        """Note the number of replaced attentions, and the refused ones."""
        if chosen:
            self.context.note(f"{count(len(chosen), 'attention')} with a cache {self.verb} one NoMADAttention each")
        self.note_refused(refused)
