"""Reads texts from a file or standard input, one text per line, without loading all of them."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from .errors import OrtolanError, listing, type_name

STANDARD_INPUT = Path("-")
_SHOWN = 60  # number of characters of a bad line in error messages
_BOM = b"\xef\xbb\xbf"


class TextLines:
    """The texts of a UTF-8 file in order; each loop reads the file again.

    A text is a line, which may be empty, or the string under a key of each line's JSON object.
    """

    def __init__(self, path: Path, field: str | None = None) -> None:
        """Check the file.

        Args:
            path: The file, or STANDARD_INPUT.
            field: The key of JSON lines; None: a line is a text.

        Raises:
            OrtolanError: The file cannot be read. Iteration raises it too, and then names the line.
        """
        self._path, self._field = path, field
        if path == STANDARD_INPUT:
            return
        if not path.exists():
            raise OrtolanError(f"text file {str(path)!r} does not exist")
        if path.is_dir():
            raise OrtolanError(f"{str(path)!r} is a folder, expected a file with one text a line")
        if field is None and path.suffix == ".jsonl":
            raise OrtolanError(f"{str(path)!r} has JSON lines; give the key of the text, such as --field text")

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
        # Read bytes, because in text mode a lone \r would also end a line.
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
            raise OrtolanError(f"{place}: key {self._field!r} is missing; the keys are: {listing(record)}")
        text = record[self._field]
        if not isinstance(text, str):
            raise OrtolanError(f"{place}: {self._field!r} is {type_name(text)}, expected a string")
        return text

    def _name(self) -> str:
        return "standard input" if self._path == STANDARD_INPUT else repr(str(self._path))


class CheckedLines:
    """Lines that were all read once, so that a bad line near the end is found before hours of work."""

    def __init__(self, lines: TextLines) -> None:
        """Read all lines.

        Raises:
            OrtolanError: A line is not a text.
        """
        self._lines = lines
        self._count = sum(1 for _ in lines)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        return iter(self._lines)


def read_lines(path: Path, field: str | None = None) -> TextLines | CheckedLines:
    """Return the lines of a file. Regular files are checked first; a pipe is not, because it can be read only once."""
    lines = TextLines(path, field)
    return CheckedLines(lines) if path.is_file() else lines
