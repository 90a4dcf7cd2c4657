"""Texts of a file or of standard input, one a line, of which one is in memory at a time."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import OrtolanError, listing

STANDARD_INPUT = Path("-")
_SHOWN = 60  # characters of a line that is no JSON
_BOM = b"\xef\xbb\xbf"


class TextLines:
    """The texts in order, read anew by each loop: each line of UTF-8, an empty one too, or of JSON lines the string
    that each object has under a key."""

    def __init__(self, path: Path, field: str | None = None) -> None:
        """path: STANDARD_INPUT reads that. field: the key; without one, a line is a text.

        Raises OrtolanError for a file that cannot be read, also while it is read; then the message names the line.
        """
        self._path, self._field = path, field
        if path == STANDARD_INPUT:
            return
        if not path.exists():
            raise OrtolanError(f"the file of texts {str(path)!r} does not exist")
        if path.is_dir():
            raise OrtolanError(f"{str(path)!r} is a folder, expected a file of texts, one a line")
        if field is None and path.suffix == ".jsonl":
            raise OrtolanError(f"{str(path)!r} holds JSON lines: name the key of the text, as in --field text")

    def __iter__(self) -> Iterator[str]:
        try:
            if self._path == STANDARD_INPUT:
                yield from self._read(sys.stdin.buffer)
            else:
                with self._path.open("rb") as lines:
                    yield from self._read(lines)
        except OSError as error:
            raise OrtolanError(f"cannot read {self._name()}: {error.strerror or error}") from error

    def _read(self, lines: BinaryIO) -> Iterator[str]:
        # As bytes: text files also take a lone \r for the end of a line.
        for number, line in enumerate(lines, start=1):
            found = line.removesuffix(b"\n").removesuffix(b"\r")
            try:
                text = (found.removeprefix(_BOM) if number == 1 else found).decode("utf-8")
            except UnicodeDecodeError as error:
                raise OrtolanError(f"{self._name()}, line {number}: expected UTF-8, {error.reason}") from error
            yield text if self._field is None else self._text_in(text, number)

    def _text_in(self, line: str, number: int) -> str:
        place = f"{self._name()}, line {number}"
        try:
            record = json.loads(line)
        except ValueError:
            raise OrtolanError(f"{place}: expected a JSON object, found {line[:_SHOWN]!r}") from None
        if not isinstance(record, dict):
            raise OrtolanError(f"{place}: expected a JSON object, found {line[:_SHOWN]!r}")
        if self._field not in record:
            raise OrtolanError(f"{place}: no key {self._field!r}; there are {listing(record)}")
        text = record[self._field]
        if not isinstance(text, str):
            raise OrtolanError(f"{place}: {self._field!r} is a {type(text).__name__}, expected a string")
        return text

    def _name(self) -> str:
        return "standard input" if self._path == STANDARD_INPUT else repr(str(self._path))


class CheckedLines:
    """Lines that were all read once before work begins, so that a bad one far behind costs no hours."""

    def __init__(self, lines: TextLines) -> None:
        """Raises OrtolanError for a line that is no text."""
        self._lines = lines
        self._count = sum(1 for _ in lines)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)


def read_lines(path: Path, field: str | None = None) -> TextLines | CheckedLines:
    """Of a regular file all lines are checked at once; standard input and pipes can be read but once. See TextLines."""
    lines = TextLines(path, field)
    return CheckedLines(lines) if path.is_file() else lines
