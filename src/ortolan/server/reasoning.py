"""Reasoning models: the thoughts in front of an answer, `<think>…</think>`, become `reasoning_content`."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .pieces import CONTENT, REASONING, Piece, held_back


@dataclass(frozen=True)
class ThoughtMarkers:
    """The texts around a model's thoughts."""

    start: str
    end: str


_KNOWN = (ThoughtMarkers("<think>", "</think>"), ThoughtMarkers("[THINK]", "[/THINK]"))


def find_markers(template: str, added_tokens: Collection[str] = ()) -> ThoughtMarkers | None:
    """Return the markers of a reasoning model, found in its chat template or tokenizer; else None."""
    return next((one for one in _KNOWN if one.end in template or one.end in added_tokens), None)


def prompt_state(prompt: str, markers: ThoughtMarkers) -> str:
    """Return how a prompt ends: "opened" within thoughts, "closed" behind them, or "free".

    Some templates open the thoughts, others write empty ones if thinking is turned off.
    """
    end = prompt.rstrip()
    return "opened" if end.endswith(markers.start) else "closed" if end.endswith(markers.end) else "free"


class ReasoningParser:
    """Splits the text of an answer, as it arrives, into thoughts and content.

    Text that may be the beginning of a marker is held back, and so are line breaks beside markers.
    """

    def __init__(self, markers: ThoughtMarkers, opened: bool) -> None:
        """Start an answer. opened: the prompt ends within the thoughts."""
        self._markers, self._text = markers, ""
        self._step = self._begin_thought if opened else self._before

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after more text."""
        self._text += text
        return self._run(ended=False)

    def finish(self) -> list[Piece]:
        """Return what was held back, after the last text."""
        return self._run(ended=True)

    def _run(self, ended: bool) -> list[Piece]:
        pieces: list[Piece] = []
        step = None
        while step != self._step:
            step = self._step
            if (piece := step(ended)) is not None:
                pieces.append(piece)
        return pieces

    def _before(self, ended: bool) -> Piece | None:
        start, text = self._markers.start, self._text.lstrip()
        if text.startswith(start):
            self._text, self._step = text[len(start) :], self._begin_thought
        elif ended or not start.startswith(text):
            self._step = self._content
        return None

    def _begin_thought(self, ended: bool) -> Piece | None:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._thought
        return None

    def _thought(self, ended: bool) -> Piece | None:
        thought, found, rest = self._text.partition(self._markers.end)
        if found:
            self._text, self._step = rest, self._begin_content
            thought = thought.rstrip()
        else:
            kept = 0 if ended else held_back(thought, self._markers.end)
            thought, self._text = thought[: len(thought) - kept], thought[len(thought) - kept :]
        return Piece(REASONING, thought) if thought else None

    def _begin_content(self, ended: bool) -> Piece | None:
        self._text = self._text.lstrip()
        if self._text:
            self._step = self._content
        return None

    def _content(self, ended: bool) -> Piece | None:
        text, self._text = self._text, ""
        return Piece(CONTENT, text) if text else None
