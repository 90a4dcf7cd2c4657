"""The tokenizer of llama2.c, as used by the stories15m model."""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path

from ortolan.errors import OrtolanError

BOS = 1
EOS = 2
_FIRST_BYTE_TOKEN = 3
_FIRST_TEXT_TOKEN = _FIRST_BYTE_TOKEN + 256
_GONE = -1


class TokenizerError(OrtolanError):
    """A tokenizer file that cannot be read."""


class Llama2cTokenizer:
    """The byte-pair tokenizer of llama2.c (tokenizer.bin): 3 control tokens, 256 byte tokens, then text tokens."""

    prefix: tuple[int, ...] = (BOS,)
    start = BOS
    stop = frozenset({BOS, EOS})

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Read a tokenizer.bin.

        Raises:
            TokenizerError: The file is missing, cut short or too small.
        """
        try:
            data = Path(path).read_bytes()
        except OSError as error:
            raise TokenizerError(f"tokenizer file {os.fspath(path)!r} cannot be read: {error.strerror}") from error
        self.pieces: list[bytes] = []
        self.scores: list[float] = []
        position = 4  # the first 4 bytes hold the length of the longest piece
        while position < len(data):
            if position + 8 > len(data):
                raise TokenizerError(f"{path} ends inside token {len(self.pieces)}; the file is cut short")
            score, length = struct.unpack_from("<fi", data, position)
            position += 8
            if not 0 <= length <= len(data) - position:
                raise TokenizerError(f"{path}: token {len(self.pieces)} has length {length}; not a tokenizer.bin?")
            self.pieces.append(data[position : position + length])
            self.scores.append(score)
            position += length
        if len(self.pieces) < _FIRST_TEXT_TOKEN:
            raise TokenizerError(f"{path} holds {len(self.pieces)} tokens, expected at least {_FIRST_TEXT_TOKEN}")
        # Byte tokens are left out: some files spell them like a character, and then the character's own token must be
        # found.
        self._ids = {piece: index for index, piece in enumerate(self.pieces) if index >= _FIRST_TEXT_TOKEN}

    def encode(self, text: str) -> list[int]:
        """Return token ids starting with BOS, merged greedily by score as in llama2.c."""
        ids: list[int] = []
        # SentencePiece puts a space before the text.
        for character in " " + text if text else "":
            raw = character.encode()
            known = self._ids.get(raw)
            ids += [known] if known is not None else [byte + _FIRST_BYTE_TOKEN for byte in raw]
        return [BOS, *self._merge(ids)]

    def _merge(self, ids: list[int]) -> list[int]:
        """Merge the pair with the best score (of equal scores, the leftmost pair) until no pair can be merged."""
        following = [*range(1, len(ids)), -1]
        preceding = list(range(-1, len(ids) - 1))
        # Entries are (-score, position, left id, right id, merged id). An entry is stale if the ids at its position
        # changed.
        heap: list[tuple[float, int, int, int, int]] = []

        def push(left: int) -> None:
            if left < 0 or (right := following[left]) < 0:
                return
            merged = self._ids.get(self.pieces[ids[left]] + self.pieces[ids[right]])
            if merged is not None:
                heappush(heap, (-self.scores[merged], left, ids[left], ids[right], merged))

        for position in range(len(ids) - 1):
            push(position)
        while heap:
            _, left, left_id, right_id, merged = heappop(heap)
            right = following[left]
            if ids[left] != left_id or right < 0 or ids[right] != right_id:
                continue
            ids[left], ids[right] = merged, _GONE
            following[left] = following[right]
            if following[right] >= 0:
                preceding[following[right]] = left
            push(preceding[left])
            push(left)
        return [index for index in ids if index != _GONE]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of `ids` without control tokens; after BOS, also without the space that `encode` added.

        Raises:
            IndexError: An id is outside the vocabulary.
        """
        raw = b"".join(
            bytes([index - _FIRST_BYTE_TOKEN]) if index < _FIRST_TEXT_TOKEN else self.pieces[index]
            for index in ids
            if index >= _FIRST_BYTE_TOKEN
        )
        text = raw.decode(errors="replace")
        return text.removeprefix(" ") if ids and ids[0] == BOS else text
