"""SentencePiece models, serialized from their pieces.

A CHARACTERS model splits a text into characters, bytes or given sequences, and prefers the longest piece. With a
replacement for each piece, it does find and replace. A UNIGRAM model splits a text into the pieces with the best sum of
scores.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

UNKNOWN_ID, END_ID = 0, 1  # ids of the first pieces of every model
_UNKNOWN, _END, _BEGIN = b"\x02\x02", b"\x02end", b"\x02begin"
_NO_MAP = struct.pack("<I", 1024) + bytes(1024 + 1)  # an empty character map: size of the trie, empty trie


class Kind(IntEnum):
    """The type of a piece."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    FOUND = 4  # "user defined" in SentencePiece: found in a text before all other pieces
    BYTE = 6


class Search(IntEnum):
    """The algorithm that splits a text."""

    UNIGRAM = 1
    CHARACTERS = 4


@dataclass
class PieceModel:
    """Pieces in the order of their ids, from 3 on: (content, kind, score)."""

    search: Search
    pieces: list[tuple[bytes, Kind, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.pieces[:0] = [
            (_UNKNOWN, Kind.UNKNOWN, 0.0),
            (_END, Kind.CONTROL, 0.0),
            (_BEGIN, Kind.CONTROL, 0.0),
        ]

    def add(self, text: str, kind: Kind, score: float = 0.0) -> int:
        """Add a piece and return its id."""
        self.pieces.append((text.encode(), kind, score))
        return len(self.pieces) - 1

    def add_bytes(self) -> int:
        """Add a piece for each byte, used for text that no other piece covers, and return the first id."""
        first = len(self.pieces)
        self.pieces += [(b"<0x%02X>" % byte, Kind.BYTE, 0.0) for byte in range(256)]
        return first

    def encoded(self) -> str:
        """Return the model file in base64."""
        has_bytes = any(kind == Kind.BYTE for _, kind, _ in self.pieces)
        trainer = _number(3, self.search) + _number(4, len(self.pieces)) + _number(35, has_bytes)
        trainer += _bytes(45, _UNKNOWN) + _bytes(46, _BEGIN) + _bytes(47, _END)
        # Keep all spaces. The character map is empty instead of missing, because SentencePiece would log a warning.
        normalizer = _bytes(1, b"none") + _bytes(2, _NO_MAP) + _number(3, 0) + _number(4, 0) + _number(5, 0)
        model = b"".join(_bytes(1, _piece(*piece)) for piece in self.pieces)
        return base64.b64encode(model + _bytes(2, trainer) + _bytes(3, normalizer)).decode()


def byte_texts() -> Sequence[bytes]:
    """Return replacements for byte pieces that leave the bytes unchanged."""
    return [bytes([byte]) for byte in range(256)]


def _piece(text: bytes, kind: Kind, score: float) -> bytes:
    return _bytes(1, text) + b"\x15" + struct.pack("<f", score) + _number(3, kind)


def _bytes(number: int, content: bytes) -> bytes:
    """Return a protobuf field of bytes, text or a message."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _number(number: int, value: int) -> bytes:
    return _varint(number << 3) + _varint(value)


def _varint(value: int) -> bytes:
    digits = bytearray()
    while value >= 0x80:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*digits, value])
