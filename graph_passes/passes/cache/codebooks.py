"""Learn the codebooks of compressed caches from the keys that the model computes on the calibration feeds."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError
from ortolan.progress import Stage

from ...find.cached_attention import CachedAttention
from ...measure.cached_keys import collect_keys
from ...weights.cache_format import spread_of
from ...weights.quantizers.codebooks import CENTROIDS, learn_codebook
from ..context import PassContext

_FEW_TOKENS = 1024


def learn_codebooks(
    model: ir.Model, context: PassContext, matches: Sequence[CachedAttention], d_sub: int, max_tokens: int
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Return the codebooks and the spreads (`spread_of`) of keys, each by the name of the keys' cache output.

    Codebooks are float32 [kv_heads, head_dim / d_sub, 16, d_sub]. The model is run as earlier passes left it, on up to
    `max_tokens` tokens.

    Raises:
        CalibrationError: the feeds are synthetic, or contain too few tokens.
    """
    feeds = context.evidence.feeds()
    if context.evidence.made_up:
        raise CalibrationError(
            "pass 'compress_cache' needs calibration inputs: codebooks learned from synthetic inputs do not fit real "
            "ones; give calibration=… with typical inputs (an .npz file, a dict of arrays, or a list of such dicts), "
            'or set keys = "float32" and values = "float32"'
        )
    books: dict[str, np.ndarray] = {}
    spreads: dict[str, np.ndarray] = {}
    names = [match.present_key.name or "" for match in matches]
    sizes = [match.kv_heads * match.head_dim for match in matches]
    with context.evidence.open(model, library=True) as session:
        found = collect_keys(
            session,
            names,
            sizes,
            feeds,
            max_tokens,
            context.telling(Stage.COLLECT_KEYS),
        )
        for number, keys in found:
            _check_count(context, keys.shape[1])
            books[names[number]] = np.stack([learn_codebook(head, d_sub) for head in keys])
            spreads[names[number]] = spread_of(keys)
            context.progress(Stage.CODEBOOKS, len(books), len(matches))
    return books, spreads


def _check_count(context: PassContext, tokens: int) -> None:
    if tokens < CENTROIDS:
        raise CalibrationError(
            f"the calibration feeds hold {tokens} tokens, expected at least {CENTROIDS}; give more text (good "
            "codebooks need a few thousand tokens)"
        )
    if tokens < _FEW_TOKENS:
        context.note(
            f"codebooks were learned from only {tokens} tokens, so they may not fit other text; give a few thousand "
            "tokens of typical text"
        )
