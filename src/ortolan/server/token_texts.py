"""Texts and bytes of single tokens, for log probabilities."""

from __future__ import annotations

import re
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"  # of SentencePiece


class TokenTexts:
    """The bytes of each token of a vocabulary."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Wrap a tokenizer."""
        self._tokenizer = tokenizer

    @cached_property
    def _added(self) -> dict[int, str]:
        return {index: token.content for index, token in self._tokenizer.get_added_tokens_decoder().items()}

    @cached_property
    def _by_bytes(self) -> bool:
        """The vocabulary writes each byte as a character, as GPT-2 does."""
        return "ByteLevel" in repr(self._tokenizer.decoder)

    def bytes(self, token: int) -> bytes:
        """Return the bytes of a token; a character may need several tokens."""
        if token in self._added:
            return self._added[token].encode()
        name = self._tokenizer.id_to_token(token) or ""
        if self._by_bytes:
            known = _byte_of_character()
            return b"".join(
                bytes([known[character]]) if character in known else character.encode() for character in name
            )
        if found := _BYTE.fullmatch(name):
            return bytes([int(found[1], 16)])
        return name.replace(_WORD_START, " ").encode()

    def text(self, token: int) -> str:
        """Return the text of a token; incomplete characters become U+FFFD."""
        return self.bytes(token).decode(errors="replace")


@lru_cache
def _byte_of_character() -> dict[str, int]:
    """Return GPT-2's table: printable bytes are their own characters, the others have characters from U+0100 on."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in printable]
    table.update({chr(256 + index): byte for index, byte in enumerate(others)})
    return table
