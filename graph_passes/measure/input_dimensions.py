"""Meanings of the symbolic dimensions of a model's inputs: batch, new tokens, past tokens or all tokens.

Descriptive names ("batch_size", "past_sequence_length") decide. For other names, the axis decides: the first axis of an
input is the batch. A symbol has the same meaning in all inputs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import onnx_ir as ir


class Meaning(Enum):
    """The quantity that a dimension counts. The enum's values are shown in the report."""

    BATCH = "batch"
    TOKENS = "tokens"
    PAST = "past tokens"
    TOTAL = "past and new tokens"


_BATCH_NAMES = ("b", "bs", "bsz")
_TOTAL = re.compile(r"total|past.*(and|plus)|kv_seq")
_TOKENS = re.compile(r"seq|len|tok|time|frame|step")


@dataclass(frozen=True)
class InputDimensions:
    """Meanings of the symbols in a model's inputs. `assumed` holds the symbols without a descriptive name."""

    meanings: Mapping[str, Meaning]
    assumed: tuple[str, ...]

    @classmethod
    def of(cls, inputs: Sequence[ir.Value]) -> InputDimensions:
        """Return the meanings of the symbols in these inputs."""
        meanings: dict[str, Meaning] = {}
        assumed: list[str] = []
        # Token inputs come first, because a symbol's axis in a token input decides its meaning in all inputs.
        for value in sorted(inputs, key=lambda value: not is_token_input(value)):
            first_axis = Meaning.BATCH if _begins_with_batch(value) else Meaning.TOKENS
            for axis, symbol in _symbols(value):
                if symbol in meanings:
                    continue
                named = _named(symbol)
                meanings[symbol] = named or (first_axis if axis == 0 else Meaning.TOKENS)
                if named is None or symbol.lower() in _BATCH_NAMES:
                    assumed.append(symbol)
        return cls(meanings, tuple(assumed))

    def describe(self) -> str:
        """Return the assumptions for the report, such as "b = batch, s = tokens"; empty if nothing is assumed."""
        return ", ".join(f"{symbol} = {self.meanings[symbol].value}" for symbol in self.assumed)


def is_token_input(value: ir.Value) -> bool:
    """Return True for integer inputs: token ids, masks and positions."""
    return value.dtype is not None and value.dtype.is_integer()


def parts_of(dimension: ir.SymbolicDim) -> list[str]:
    """Return the summands of a dimension, such as "past_sequence_length + 1"."""
    return [part.strip() for part in (dimension.value or "").split("+")]


def _symbols(value: ir.Value) -> Iterator[tuple[int, str]]:
    for axis, size in enumerate(value.shape or ()):
        if isinstance(size, ir.SymbolicDim):
            yield from ((axis, part) for part in parts_of(size) if part and not part.isdigit())


def _begins_with_batch(value: ir.Value) -> bool:
    """Return whether axis 0 is the batch, if its name is not descriptive."""
    shape = value.shape
    if shape is None or len(shape) < 2:
        return False
    first = {symbol for axis, symbol in _symbols(value) if axis == 0}
    others = {symbol for axis, symbol in _symbols(value) if axis > 0}
    if first & others or any(_named(symbol) is Meaning.BATCH for symbol in others):
        return False
    # In a float input [rows, width] of known width, rows are tokens in some models and a batch in other models.
    return is_token_input(value) or len(shape) > 2 or not isinstance(shape[1], int)


def _named(symbol: str) -> Meaning | None:
    """Return the meaning of a descriptive name, or None."""
    text = symbol.lower()
    if "batch" in text or text in _BATCH_NAMES:
        return Meaning.BATCH
    if _TOTAL.search(text):
        return Meaning.TOTAL
    if "past" in text or "cache" in text:
        return Meaning.PAST
    return Meaning.TOKENS if _TOKENS.search(text) else None
