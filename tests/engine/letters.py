"""A tokenizer for the small model: one character for each token."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models

from .small_model import VOCABULARY


def letters() -> Tokenizer:
    tokenizer = Tokenizer(
        models.WordLevel({chr(ord("A") + token): token for token in range(VOCABULARY)}, unk_token="A")
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer
