"""Tool calls in the text of an answer, for the common families of chat templates, while the text arrives."""

from __future__ import annotations

import secrets
import string
from collections.abc import Mapping
from typing import Any, Protocol

from .call_reader import CallReader
from .pieces import ARGUMENTS, CALL, CONTENT, Piece, held_back
from .xml_calls import FUNCTION, PARAMETER, XmlCallReader

HERMES, QWEN_CODER, MISTRAL, LLAMA = "hermes", "qwen3_coder", "mistral", "llama"
PYTHON_TAG, TOOL_CALLS, ARGS = "<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"
_LONGEST_HEAD = 256  # characters between Mistral's marker and the arguments


def detect_family(template: str) -> str | None:
    """Return the family of the calls that a chat template shows to the model; None if it takes no tools."""
    if "tools" not in template:
        return None
    if FUNCTION in template and PARAMETER in template:
        return QWEN_CODER
    if "<tool_call>" in template:
        return HERMES
    if TOOL_CALLS in template:
        return MISTRAL
    return LLAMA if PYTHON_TAG in template or '"parameters"' in template else None


def new_call_id(family: str) -> str:
    """Return an id for a call. Mistral's templates accept only nine letters or digits."""
    letters = string.ascii_letters + string.digits
    if family == MISTRAL:
        return "".join(secrets.choice(letters) for _ in range(9))
    return "call_" + "".join(secrets.choice(letters) for _ in range(24))


class _Reader(Protocol):
    """Reads one call, see `CallReader`."""

    name: str | None
    done: bool
    failed: bool

    @property
    def raw(self) -> str: ...

    def feed(self, text: str) -> str: ...

    def take_arguments(self) -> str: ...


class ToolCallParser:
    """Splits the text of an answer into content and tool calls. Text that is not a call after all becomes content.

    Attributes:
        calls: The number of calls so far.
    """

    family = ""
    start = ""  # the marker in front of calls
    other_start = ""  # the call's own beginning, if models forget the marker

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """Start an answer. functions: the schema of the parameters of each function that the request defines."""
        self._functions, self._text = functions, ""
        self.calls = 0
        self._marker = self.start  # the one in front of the open call
        self._begun = False  # the open call was told
        self._fresh = False  # no content was told since the last call
        self._cut = False  # the answer ended early, so that an incomplete marker or call is not content
        self._reader: _Reader = CallReader()
        self._step = self._content
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that are certain after more text."""
        self._text += text
        return self._run(ended=False)

    def finish(self, cut: bool = False) -> list[Piece]:
        """Return what was held back, after the last text.

        Args:
            cut: The answer was cut, so that a call's marker at its end, or a part of one, is not content.
        """
        self._cut = cut
        return self._run(ended=True)

    def _run(self, ended: bool) -> list[Piece]:
        """Run steps until one needs more text. A step returns True if the next one can run."""
        while self._step(ended):
            pass
        pieces, self._pieces = self._pieces, []
        return pieces

    def _say(self, text: str) -> None:
        if text:
            self._fresh = False
            self._pieces.append(Piece(CONTENT, text))

    def _content(self, ended: bool) -> bool:
        """Tell content up to the marker. Whitespace around calls is not content."""
        if self._fresh:
            self._text = self._text.lstrip()
        markers = [one for one in (self.start, self.other_start) if one]
        found = min((one for one in markers if one in self._text), key=self._text.index, default=None)
        if found is not None:
            before, self._marker, self._text = self._text.partition(found)
            self._say(before.rstrip())
            self._step = self._after_marker
            return True
        before = self._text
        kept = held_back(before, *markers)
        self._text = before[len(before) - kept :]
        self._say(before[: len(before) - kept])
        if ended and not (self._cut and self._text.strip()):
            self._say(self._text)
        return False

    def _after_marker(self, ended: bool) -> bool:
        return self._open(CallReader())

    def _open(self, reader: _Reader) -> bool:
        self._reader, self._begun, self._step = reader, False, self._call
        return True

    def _call(self, ended: bool) -> bool:
        """Read the open call, and tell its new parts."""
        reader = self._reader
        self._text = reader.feed(self._text)
        if reader.name is not None and not self._begun:
            self._begun = True
            self._pieces.append(Piece(CALL, call=self.calls, name=reader.name, id=new_call_id(self.family)))
        if self._begun and (text := reader.take_arguments()):
            self._pieces.append(Piece(ARGUMENTS, text, self.calls))
        if not (reader.done or reader.failed or ended):
            return False
        if self._begun:
            self.calls += 1
            self._fresh, self._step = True, self._after_call
        else:
            if reader.failed or not self._cut or not self._refused_before():
                self._say(self._refused_before() + reader.raw)
            self._step = self._content
        return bool(self._text) or ended

    def _refused_before(self) -> str:
        """Return the marker in front of a text that is not a call."""
        return self._marker

    def _after_call(self, ended: bool) -> bool:
        self._step = self._content
        return True


class HermesParser(ToolCallParser):
    """Calls of Hermes and Qwen: <tool_call>{"name": "f", "arguments": {…}}</tool_call>, any number of them."""

    family, start, end = HERMES, "<tool_call>", "</tool_call>"

    def _after_call(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if text.startswith(self.end):
            self._text = text[len(self.end) :]
        elif self.end.startswith(text) and not ended:
            return False
        elif self.end.startswith(text) and self._cut:
            self._text = ""
        self._step = self._content
        return True


class QwenCoderParser(HermesParser):
    """Calls of Qwen3-Coder: XML within <tool_call>, see xml_calls.py. The model sometimes forgets <tool_call>."""

    family, other_start = QWEN_CODER, FUNCTION

    def _after_marker(self, ended: bool) -> bool:
        if self._marker == FUNCTION:
            return self._open(XmlCallReader(self._functions, self._functions, opened=True))
        return self._open(XmlCallReader(self._functions))


class MistralParser(ToolCallParser):
    """Calls of Mistral: [TOOL_CALLS][{"name": "f", "arguments": {…}}, …], or [TOOL_CALLS]f[ARGS]{…} of newer models."""

    family, start = MISTRAL, TOOL_CALLS
    _listed = False

    def _after_marker(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if not text and not ended:
            return False
        self._listed = text.startswith("[")
        if self._listed or text.startswith("{"):
            self._text = text[1:] if self._listed else text
            return self._open(CallReader())
        head, found, _ = text.partition("{")
        name = head.partition("[")[0].strip()
        if found and name:
            self._text = text[len(head) :]
            return self._open(CallReader(name=name))
        if not found and not ended and len(head) <= _LONGEST_HEAD:
            return False
        if found or not self._cut:
            self._say(self.start)
        else:
            self._text = ""
        self._step = self._content
        return True

    def _refused_before(self) -> str:
        return self.start + ("[" if self._listed else "")

    def _after_call(self, ended: bool) -> bool:
        text = self._text.lstrip()
        if self._listed:
            if not text and not ended:
                return False
            if text.startswith(","):
                self._text = text[1:]
                return self._open(CallReader())
            self._text = text[1:] if text.startswith("]") else text
        self._step = self._content
        return True


class LlamaParser(ToolCallParser):
    """Calls of Llama 3: an answer that begins with {"name": "f", "parameters": {…}}, or with <|python_tag|> and that.

    As there may be no marker, only a function that the request defines makes a call.
    """

    family, start = LLAMA, PYTHON_TAG

    def __init__(self, functions: Mapping[str, Any]) -> None:
        """Start an answer."""
        super().__init__(functions)
        self._marked = False
        self._step = self._begin

    def _begin(self, ended: bool) -> bool:
        return self._read_call_or_content(self._text.lstrip(), ended)

    def _read_call_or_content(self, text: str, ended: bool) -> bool:
        """Begin a call if the text, which follows separators, opens an object; else read content."""
        if text.startswith("{"):
            self._text = text
            return self._open(CallReader(self._functions))
        if not text and not ended:
            return False
        self._step = self._content
        return True

    def _after_marker(self, ended: bool) -> bool:
        self._marked = True
        return self._open(CallReader(self._functions))

    def _refused_before(self) -> str:
        return self.start if self._marked else ""

    def _after_call(self, ended: bool) -> bool:
        self._marked = False
        return self._read_call_or_content(self._text.lstrip("; ,\r\n\t"), ended)


PARSERS: dict[str, type[ToolCallParser]] = {
    one.family: one for one in (HermesParser, QwenCoderParser, MistralParser, LlamaParser)
}
