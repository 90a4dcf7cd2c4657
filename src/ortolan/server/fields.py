"""Fields of a JSON body: typed, limited, and named in errors.

An error has the form `temperature is "hot", expected a number from 0 to 2`. This small reader replaces pydantic, whose
messages have another form; it also keeps the extra `serve` free of compiled packages that only check types.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import orjson

from .errors import ApiError

_MOST_SHOWN = 60  # characters of a value in an error message
_DEEPEST = 100  # nested objects and arrays of a body; schemas and templates recurse over them
_Default = TypeVar("_Default")


def parse_object(content: bytes) -> dict[str, Any]:
    """Parse a body.

    Raises:
        ApiError: 400 if it is not a JSON object in UTF-8, or has too many nested levels.
    """
    try:
        body = orjson.loads(content)
    except orjson.JSONDecodeError as error:
        try:
            content.decode()
        except UnicodeDecodeError as wrong:
            raise ApiError(400, f"the body is not valid UTF-8 (byte {wrong.start}), expected JSON in UTF-8") from None
        raise ApiError(
            400, f"body is not JSON (line {error.lineno}, column {error.colno}), expected a JSON object"
        ) from None
    if not isinstance(body, dict):
        raise ApiError(400, f"body is {shown(body)}, expected a JSON object")
    _check_depth(body)
    return body


def _check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        if depth > _DEEPEST:
            raise ApiError(400, f"body has more than {_DEEPEST} nested levels; flatten it")
        inside = [one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list)]
        level = [value for values in inside for value in values if isinstance(value, dict | list)]
        depth += 1


def shown(value: Any) -> str:
    """Return a value for an error message, cut to one short line."""
    if value is None:
        return "null"
    text = value if isinstance(value, str) else None
    if text is not None and len(text) > _MOST_SHOWN:
        return f"{orjson.dumps(text[:_MOST_SHOWN]).decode()}…"
    if isinstance(value, dict):
        return "an object"
    if isinstance(value, list):
        found = orjson.dumps(value).decode() if len(value) <= _MOST_SHOWN else ""
        return found if 0 < len(found) <= _MOST_SHOWN else f"an array of {len(value)}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    found = orjson.dumps(value).decode()
    return found if len(found) <= 2 * _MOST_SHOWN else f"{found[:_MOST_SHOWN]}…"


def refuse(name: str, found: Any, expected: str) -> ApiError:
    """Return the error for a field with a wrong value."""
    return ApiError(400, f"{name} is {shown(found)}, expected {expected}", param=name)


def check_tokens(name: str, tokens: Sequence[Any], vocabulary: int) -> None:
    """Raise ApiError 400 for a value outside the vocabulary."""
    for token in tokens:
        if type(token) is not int or not 0 <= token < vocabulary:
            raise ApiError(400, f"{name} has {shown(token)}, expected tokens from 0 to {vocabulary - 1}", param=name)


class Fields:
    """The fields of one JSON object. null counts as missing, and unknown fields are ignored, as clients send many."""

    def __init__(self, given: Mapping[str, Any], where: str = "") -> None:
        """Wrap an object; `where` is its path in the body, such as "messages[0]"."""
        self.given = given
        self._before = f"{where}." if where else ""

    def path(self, name: str) -> str:
        """Return the path of a field in the body."""
        return self._before + name

    def get(self, name: str) -> Any:
        """Return a field's value without checks; None if it is missing."""
        return self.given.get(name)

    def refuse(self, name: str, expected: str) -> ApiError:
        """Return the error for a field whose value is wrong."""
        return refuse(self.path(name), self.get(name), expected)

    def require(self, name: str, expected: str) -> Any:
        """Return a field's value.

        Raises:
            ApiError: 400 if it is missing.
        """
        if (value := self.get(name)) is None:
            raise ApiError(400, f"{self.path(name)} is missing, expected {expected}", param=self.path(name))
        return value

    def boolean(self, name: str, default: bool = False) -> bool:
        """Return a boolean."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def integer(self, name: str, default: _Default, least: int, most: int) -> int | _Default:
        """Return an integer from least to most. A float without fraction counts, as some clients send them."""
        value = self.get(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.refuse(name, f"an integer from {least} to {most}")
        return value

    def number(
        self, name: str, default: _Default, least: float, most: float, *, above: bool = False
    ) -> float | _Default:
        """Return a number from least to most. above: it must be larger than least."""
        value = self.get(name)
        if value is None:
            return default
        expected = f"a number {'above' if above else 'from'} {least:g} {'and at most' if above else 'to'} {most:g}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.refuse(name, expected)
        if not (least < value if above else least <= value) or not value <= most:
            raise self.refuse(name, expected)
        return float(value)

    def string(self, name: str, default: _Default, most: int) -> str | _Default:
        """Return a string of at most `most` characters."""
        value = self.get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.refuse(name, "a string")
        if len(value) > most:
            raise ApiError(
                400,
                f"{self.path(name)} has {len(value)} characters, expected at most {most}",
                param=self.path(name),
            )
        return value

    def choice(self, name: str, default: str, choices: Sequence[str]) -> str:
        """Return one of several strings."""
        value = self.get(name)
        if value is None:
            return default
        if value not in choices:
            raise self.refuse(name, " or ".join(f'"{one}"' for one in choices))
        return str(value)

    def fields(self, name: str) -> Fields | None:
        """Return an object; None if it is missing."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.refuse(name, "an object")
        return Fields(value, self.path(name))

    def array(self, name: str, most: int, expected: str = "an array") -> list[Any]:
        """Return an array of at most `most` values; empty if it is missing."""
        value = self.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise self.refuse(name, expected)
        if len(value) > most:
            raise ApiError(
                400, f"{self.path(name)} has {len(value)} entries, expected at most {most}", param=self.path(name)
            )
        return value

    def objects(self, name: str, most: int) -> list[Fields]:
        """Return an array of at most `most` objects; empty if it is missing."""
        found = []
        for index, value in enumerate(self.array(name, most, "an array of objects")):
            where = f"{self.path(name)}[{index}]"
            if not isinstance(value, dict):
                raise refuse(where, value, "an object")
            found.append(Fields(value, where))
        return found

    def refuse_unless(self, name: str, *neutral: Any, why: str) -> None:
        """Refuse a field that is not supported, unless it is missing or has a neutral value."""
        value = self.get(name)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            # A whole float is neutral beside its integer, and has the same name.
            names = dict.fromkeys(f"{one:g}" if type(one) is float else shown(one) for one in neutral)
            expected = " or ".join(names)
            raise self.refuse(name, f"{expected or 'no value'}: {why}")
