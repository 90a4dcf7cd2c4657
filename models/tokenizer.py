"""Text to token ids and back, for every decoder of the catalogue."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from ortolan.graph_passes.text.llama2c import Llama2cTokenizer

from ..errors import OrtolanError


class TextTokenizer(Protocol):
    """start: the control token that a text begins with, in training at least. stop: the tokens that end one."""

    start: int
    stop: frozenset[int]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens left out."""
        ...


class JsonTokenizer:
    """A Hugging Face tokenizer.json. Control tokens may stand in the text; none is added.

    start is the control token with the lowest id (<|endoftext|>, <s>), stop holds all of them.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Raises OrtolanError when the package `tokenizers` is missing, or the file has no control tokens."""
        try:
            from tokenizers import Tokenizer
        except ImportError as error:
            raise OrtolanError(
                "text in and out needs the package 'tokenizers'; install it with: pip install 'ortolan[decoder]'"
            ) from error
        self._tokenizer = Tokenizer.from_file(os.fspath(path))
        added = self._tokenizer.get_added_tokens_decoder()
        self.stop = frozenset(index for index, token in added.items() if token.special)
        if not self.stop:
            raise OrtolanError(f"{path} has no control tokens; expected one that ends a text, like <|endoftext|>")
        self.start = min(self.stop)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._tokenizer.decode(list(ids)))


def load_tokenizer(path: str | os.PathLike[str]) -> TextTokenizer:
    """The tokenizer in a file: tokenizer.json, or tokenizer.bin of llama2.c."""
    return Llama2cTokenizer(path) if Path(path).suffix == ".bin" else JsonTokenizer(path)
