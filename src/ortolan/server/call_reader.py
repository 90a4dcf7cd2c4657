"""A tool call in JSON, read character by character, so that its arguments can be streamed."""

from __future__ import annotations

import json
from collections.abc import Collection

_ARGUMENTS = ("arguments", "parameters")
_SPACE = " \t\r\n"


class CallReader:
    """Reads one object {"name": "f", "arguments": {…}}, whose fields may come in any order.

    Attributes:
        name: The function's name, once it is known.
        done: The object has ended.
        failed: The text is not a call.
    """

    def __init__(self, known: Collection[str] | None = None, name: str | None = None) -> None:
        """Start a call.

        Args:
            known: Names that a call may have; None: any.
            name: The name, if the text has only the arguments' object.
        """
        self._known, self.name = known, name
        self._raw: list[str] = []  # characters until the name is known
        self.done = self.failed = False
        self._only_arguments = name is not None
        self._state = self._value if name is not None else self._start
        self._key = _ARGUMENTS[0] if name is not None else ""
        # Lists, because += on an attribute copies the whole text for each character.
        self._part: list[str] = []  # characters of a key or value
        self._depth = 0
        self._in_string = self._escaped = False
        self._arguments: str | None = None  # known before the name, or not an object
        self._pending: list[str] = []  # text of the arguments that was not yet taken
        self._streamed = False

    @property
    def raw(self) -> str:
        """The characters until the name is known."""
        return "".join(self._raw)

    def feed(self, text: str) -> str:
        """Read text until the call ends or fails; return the text that does not belong to it."""
        for position, character in enumerate(text):
            if self.name is None:
                self._raw.append(character)
            try:
                self._state(character)
            except (ValueError, RecursionError):
                self.failed = True
            if self.done or self.failed:
                return text[position + 1 :]
        return ""

    def take_arguments(self) -> str:
        """Return the new text of the arguments; empty before the name is known."""
        if self.name is None:
            return ""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def _start(self, character: str) -> None:
        if character == "{":
            self._state = self._next_key
        elif character not in _SPACE:
            self.failed = True

    def _next_key(self, character: str) -> None:
        if character == '"':
            self._part, self._state = [character], self._in_key
        elif character == "}":
            self._end()
        elif character not in _SPACE + ",":
            self.failed = True

    def _in_key(self, character: str) -> None:
        self._part.append(character)
        if self._string_ends(character):
            self._key, self._state = json.loads("".join(self._part)), self._colon

    def _colon(self, character: str) -> None:
        if character == ":":
            self._state = self._value
        elif character not in _SPACE:
            self.failed = True

    def _value(self, character: str) -> None:
        """Begin a value."""
        if character in _SPACE:
            return
        self._part, self._depth, self._in_string = [], 0, False
        is_object = character == "{"
        self._streamed = is_object and self._key in _ARGUMENTS and self.name is not None
        if self._key in _ARGUMENTS and not is_object and (self._only_arguments or character != '"'):
            self.failed = True
            return
        self._state = self._in_value
        self._in_value(character)

    def _in_value(self, character: str) -> None:
        if not self._in_string and self._depth == 0 and self._part and character in ",}" + _SPACE:
            self._end_value()  # a number, true, false or null has ended
            self._next_key(character)
            return
        if self._streamed:
            self._pending.append(character)
            self._part = [character]
        else:
            self._part.append(character)
        if self._in_string:
            ended = self._string_ends(character)
            self._in_string = not ended
        else:
            self._in_string = character == '"'
            self._depth += (character in "{[") - (character in "}]")
            ended = character in "}]"
            if self._depth < 0:
                raise ValueError(character)
        if ended and self._depth == 0:
            self._end_value()

    def _string_ends(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
            return False
        self._escaped = character == "\\"
        return character == '"'

    def _end_value(self) -> None:
        self._state = self._next_key
        if self._key == "name" and not self._only_arguments:
            name = json.loads("".join(self._part))
            if not isinstance(name, str) or not name or (self._known is not None and name not in self._known):
                raise ValueError(name)
            self.name = name
            if self._arguments is not None:
                self._pending = [self._arguments]
        elif self._key in _ARGUMENTS:
            if self._streamed:
                self._arguments = ""
            else:
                self._keep_arguments()
        self.done = self._only_arguments

    def _keep_arguments(self) -> None:
        """Keep arguments that are not streamed. Some models write the object as a JSON string."""
        arguments = "".join(self._part)
        if arguments.startswith('"'):
            arguments = json.loads(arguments)
        if not isinstance(json.loads(arguments), dict):
            raise ValueError(arguments)
        self._arguments = arguments
        if self.name is not None:
            self._pending = [arguments]

    def _end(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if self._arguments is None:
            self._pending = ["{}"]
        self.done = True
