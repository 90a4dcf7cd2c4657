"""Pieces of an answer, and text that must wait because it may be the beginning of a marker."""

from __future__ import annotations

from dataclasses import dataclass

REASONING, CONTENT, CALL, ARGUMENTS = "reasoning", "content", "call", "arguments"


@dataclass(frozen=True)
class Piece:
    """A piece of an answer.

    Attributes:
        kind: REASONING or CONTENT with text; CALL for the beginning of a tool call; ARGUMENTS with a call's next text.
        text: The new text.
        call: The index of the call.
        name: The name of the called function, in CALL.
        id: The id of the call, in CALL.
    """

    kind: str
    text: str = ""
    call: int = 0
    name: str = ""
    id: str = ""


def held_back(text: str, *markers: str) -> int:
    """Return the number of characters at the end of a text that wait for more text.

    They are the longest end that may begin a marker, and the whitespace before it.
    """
    longest = 0
    for marker in markers:
        for size in range(min(len(marker) - 1, len(text)), longest, -1):
            if text.endswith(marker[:size]):
                longest = size
                break
    before = text[: len(text) - longest]
    return longest + len(before) - len(before.rstrip())
