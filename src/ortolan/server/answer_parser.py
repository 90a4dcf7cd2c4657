"""One answer of a chat as it arrives: thoughts, content and tool calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .pieces import ARGUMENTS, CALL, CONTENT, REASONING, Piece
from .reasoning import ReasoningParser, ThoughtMarkers
from .tool_calls import PARSERS, ToolCallParser


@dataclass(frozen=True)
class AnswerForm:
    """The form of the answers to one request.

    Attributes:
        thoughts: The markers of thoughts; None: the answer has none.
        opened: The prompt ends within thoughts.
        tool_family: The form of tool calls; None: the request allows no calls.
        functions: The functions that may be called: the schema of the parameters by name.
        several_calls: Calls after the first one count.
    """

    thoughts: ThoughtMarkers | None = None
    opened: bool = False
    tool_family: str | None = None
    functions: Mapping[str, Any] = field(default_factory=dict)
    several_calls: bool = True


class AnswerParser:
    """Splits the text of one answer into pieces."""

    def __init__(self, form: AnswerForm) -> None:
        """Start an answer."""
        self._form = form
        self._thoughts = None if form.thoughts is None else ReasoningParser(form.thoughts, form.opened)
        self._calls: ToolCallParser | None = None
        if form.tool_family is not None:
            self._calls = PARSERS[form.tool_family](form.functions)

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after more text."""
        if not text:
            return []
        return self._parsed([Piece(CONTENT, text)] if self._thoughts is None else self._thoughts.feed(text))

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return what was held back, after the last text. cut: the answer was cut."""
        pieces = self._parsed([] if self._thoughts is None else self._thoughts.finish())
        return pieces if self._calls is None else pieces + self._wanted(self._calls.finish(cut))

    def _parsed(self, pieces: list[Piece]) -> list[Piece]:
        """Pass content on to the parser of calls."""
        calls = self._calls
        if calls is None:
            return pieces
        return [
            found
            for piece in pieces
            for found in (self._wanted(calls.feed(piece.text)) if piece.kind == CONTENT else [piece])
        ]

    def _wanted(self, pieces: list[Piece]) -> list[Piece]:
        return [one for one in pieces if self._form.several_calls or one.call == 0]


class WholeAnswer:
    """All pieces of one answer, joined to a message."""

    def __init__(self) -> None:
        """Start without pieces."""
        self._texts: dict[str, list[str]] = {CONTENT: [], REASONING: []}
        self._calls: list[tuple[Piece, list[str]]] = []

    def add(self, pieces: list[Piece]) -> None:
        """Add pieces."""
        for piece in pieces:
            if piece.kind == CALL:
                self._calls.append((piece, []))
            elif piece.kind == ARGUMENTS:
                self._calls[piece.call][1].append(piece.text)
            else:
                self._texts[piece.kind].append(piece.text)

    def message(self) -> dict[str, object]:
        """Return the message in OpenAI's format."""
        content, thoughts = ("".join(self._texts[kind]) for kind in (CONTENT, REASONING))
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": "".join(arguments)}}
            for call, arguments in self._calls
        ]
        return {
            "role": "assistant",
            "content": content or (None if calls else ""),
            "refusal": None,
            **({"reasoning_content": thoughts} if thoughts else {}),
            **({"tool_calls": calls} if calls else {}),
        }


def delta(piece: Piece) -> dict[str, object]:
    """Return a piece as the `delta` of a chunk in OpenAI's format."""
    if piece.kind == CALL:
        call = {"index": piece.call, "id": piece.id, "type": "function"}
        return {"tool_calls": [{**call, "function": {"name": piece.name, "arguments": ""}}]}
    if piece.kind == ARGUMENTS:
        return {"tool_calls": [{"index": piece.call, "function": {"arguments": piece.text}}]}
    return {"reasoning_content" if piece.kind == REASONING else "content": piece.text}
