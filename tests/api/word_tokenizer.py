"""A tokenizer with one token for each word."""

from __future__ import annotations

from pathlib import Path

import pytest


def write_tokenizer(path: Path) -> Path:
    """Write a tokenizer.json with one token per word, and a special token before each text."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"[PAD]": 0, "[CLS]": 1, "[UNK]": 2, "one": 3, "two": 4, "three": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A", special_tokens=[("[CLS]", 1)]
    )
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(2)
    tokenizer.save(str(path))
    return path
