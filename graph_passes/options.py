"""Options of passes: frozen dataclasses that hold names, types, defaults and ranges.

A field's metadata holds the rule for its values: `field(default=0.5, metadata=takes("float", low=0.0))`. All values are
checked here, from TOML, Python or the command line: an unknown name, a wrong type or a value out of range is an error
that lists what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
import sys
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from ortolan.errors import ArgumentTypeError, RecipeError, listing, suggestion

Globs = tuple[str, ...]

# Words that users can write instead of several name patterns. "heads" selects output heads, where small errors become
# wrong labels or tokens, and embeddings, which often share a head's weight.
HEADS = "heads"
WORDS: dict[str, Globs] = {
    HEADS: (
        "*lm_head*", "*classifier*", "*qa_outputs*", "*cls.predictions*", "*/cls/*", "*/score/*", "score.weight",
        "*embed_tokens*", "*word_embeddings*",
    ),
}  # fmt: skip


def any_matches(names: Iterable[str], globs: Globs) -> bool:
    """Return True if a name matches a pattern (fnmatch). A word of WORDS is replaced by its patterns."""
    patterns = [pattern for glob in globs for pattern in WORDS.get(glob, (glob,))]
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)


_NUMBERS: dict[str, Any] = {"int": numbers.Integral, "float": numbers.Real}  # NumPy types included
OptionsT = TypeVar("OptionsT", bound="PassOptions")


@dataclasses.dataclass(frozen=True)
class Rule:
    """The values that an option accepts.

    Attributes:
        kind: "float", "int", "str", "bool", "texts", "globs" or "numbers_by_glob".
        choices: The allowed values; empty: all.
        low: Inclusive lower bound of numbers.
        below: Exclusive upper bound of numbers.
        none: None is allowed.
    """

    kind: str
    choices: tuple[str, ...] | tuple[int, ...] = ()
    low: float = -math.inf
    below: float = math.inf
    none: bool = False

    def describe(self) -> str:
        """Return the allowed values, for error messages."""
        if self.choices and self.kind == "texts":
            return "one or more of " + ", ".join(repr(choice) for choice in self.choices)
        if self.choices:
            return "one of " + ", ".join(repr(choice) for choice in self.choices)
        if self.kind == "globs":
            return 'a list of name patterns such as ["heads", "*layer.0*"]'
        number = {"float": "a number", "int": "an integer", "numbers_by_glob": "a table of pattern = number"}
        text = number.get(self.kind) or {"str": "a string", "bool": "true or false"}[self.kind]
        if self.low > -math.inf:
            text += f" from {self.low:g}"
        if self.below < math.inf:
            text += f" to below {self.below:g}"
        return text

    def check(self, value: Any, where: str) -> Any:
        """Return the value in its canonical type.

        Raises:
            ArgumentTypeError: The value has the wrong type.
            RecipeError: The value is not allowed.
        """
        if value is None and self.none:
            return None
        if self.kind == "numbers_by_glob":
            if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
                each = dataclasses.replace(self, kind="float")
                return {key: each.check(number, f"{where}[{key!r}]") for key, number in value.items()}
        elif self.kind in ("globs", "texts"):
            items = (value,) if isinstance(value, str) else value
            texts = isinstance(items, list | tuple) and all(isinstance(item, str) and item for item in items)
            if texts and (not self.choices or all(item in self.choices for item in items)):
                return tuple(items)
        elif self.kind == "bool":
            if isinstance(value, bool):
                return value
        elif self.kind == "str":
            if isinstance(value, str) and (not self.choices or value in self.choices):
                return value
        elif isinstance(value, _NUMBERS[self.kind]) and not isinstance(value, bool):
            number = int(value) if isinstance(value, numbers.Integral) else float(value)
            # The comparison with the largest float refuses NaN, infinities and integers too large for a float.
            in_range = self.low <= number < self.below and abs(number) <= sys.float_info.max
            if in_range and (not self.choices or number in self.choices):
                return number if self.kind == "int" else float(number)
        kind = RecipeError if self._has_type(value) else ArgumentTypeError
        raise kind(f"{where} is {value!r}, expected {self.describe()}")

    def _has_type(self, value: Any) -> bool:
        if self.kind in ("globs", "texts"):
            items = [value] if isinstance(value, str) else value
            return isinstance(items, list | tuple) and all(isinstance(item, str) for item in items)
        types = {"numbers_by_glob": Mapping, "bool": bool, "str": str} | _NUMBERS
        return isinstance(value, types[self.kind]) and (self.kind == "bool" or not isinstance(value, bool))


def takes(kind: str, **limits: Any) -> dict[str, Rule]:
    """Return the metadata of a dataclass field with the rule for its values."""
    return {"rule": Rule(kind, **limits)}


@dataclasses.dataclass(frozen=True)
class PassOptions:
    """Base class of the options of a pass. A pass without options uses this class itself."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rule: Rule = field.metadata["rule"]
            object.__setattr__(self, field.name, rule.check(getattr(self, field.name), field.name))

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of the options."""
        return [field.name for field in dataclasses.fields(cls)]

    def has(self, name: str) -> bool:
        """Return True if the option has an effect, given the values of the other options.

        If a recipe has several passes of one name, `Recipe.with_options` sets an option only in the passes that have
        it.
        """
        return True


def read_options(options_type: type[OptionsT], values: Mapping[str, Any], where: str) -> OptionsT:
    """Return the options of a pass from untrusted values; `where` opens error messages.

    Raises:
        RecipeError: A name is unknown, or a value has the wrong type or is not allowed.
    """
    known = options_type.names()
    for name in values:
        if name not in known:
            raise RecipeError(
                f"{where}: unknown option {name!r}, known ones are: {listing(known)}{suggestion(str(name), known)}"
            )
    try:
        return options_type(**values)
    except (RecipeError, ArgumentTypeError) as error:
        raise RecipeError(f"{where}: {error}") from None
