"""A small tokenizer.json like BERT's: lower case, without accents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789αβγабвгд"
WORDS = ("the", "cat", "sleep", "##ing", "un", "##aff", "##able", "中", "文", ",", ".", "!", "-", "’")


def write_wordpiece(
    path: Path,
    lowercase: bool = True,
    specials: Sequence[str] = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"),
    truncation: int | None = 16,
) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    words = [*specials, *LETTERS, *(f"##{letter}" for letter in LETTERS), *WORDS]
    if not lowercase:
        words += [*LETTERS[:26].upper(), *(f"##{letter}" for letter in LETTERS[:26].upper()), "é", "##é"]
    vocabulary = {word: number for number, word in enumerate(words)}
    pad, unknown, begin, end, _ = specials
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocabulary, unk_token=unknown))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{begin} $A {end}", special_tokens=[(begin, vocabulary[begin]), (end, vocabulary[end])]
    )
    tokenizer.add_special_tokens(list(specials))
    tokenizer.enable_padding(pad_id=vocabulary[pad], pad_token=pad)
    if truncation is not None:
        tokenizer.enable_truncation(truncation)
    tokenizer.save(str(path))
    return path
