"""Puts NoMADAttention in the place of attention with a cache, which stays what it is: floats, inputs and outputs of the
graph. As compress_cache does with keys and values of float32; of what that pass takes, nothing is left for this one."""

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
    """Replaces attention with a cache where there is some, and where the model stays portable if it is to be."""

    pass_name = "fuse_cached_attention"
    stage = Stage.FUSE_CACHED_ATTENTION
    refusal = "attention with a cache left as it is"
    options_type = AttentionOptions

    def __init__(self, options: AttentionOptions, context: PassContext) -> None:
        floats = CompressCacheOptions(
            options.select, options.exclude, options.precision, keys="float32", values="float32"
        )
        super().__init__(floats, context)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        if not has_past(model):
            return ir.passes.PassResult(model, modified=False)
        return super().call(model)

    def find(self, model: ir.Model) -> Sequence[CachedAttention | NotAttention]:
        found, taken = super().find(model), self.context.caches.taken
        return [
            match
            for match in found
            if (match.cached if isinstance(match, NotAttention) else match.past_key.name not in taken)
        ]

    def why_none(self, model: ir.Model, chosen: Sequence[CachedAttention]) -> str | None:
        if not self.context.portable or (not self.context.caches.taken and self.has_function(model, chosen)):
            return None
        return "no ONNX function serves it beside the model's other attention; portable=False does without one"

    def announce(self, chosen: Sequence[CachedAttention], refused: Refused) -> None:
        if chosen:
            self.context.note(f"{count(len(chosen), 'attention')} with a cache {self.verb} one operator each")
        self.note_refused(refused)
