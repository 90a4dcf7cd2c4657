"""Pairwise parameter sets, for tests whose full product would be too large."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return parameter sets in which any two values of two parameters occur together at least once.

    A tuple as a value holds the values of several parameters that belong together; it is flattened in the result.
    """
    choices = list(product(*(range(len(values)) for values in parameters)))
    meetings = {choice: set(combinations(enumerate(choice), 2)) for choice in choices}
    missing = set().union(*meetings.values())
    found = []
    while missing:
        best = max(choices, key=lambda choice: len(meetings[choice] & missing))
        missing -= meetings[best]
        values = [values[number] for values, number in zip(parameters, best, strict=True)]
        found.append(tuple(one for value in values for one in (value if isinstance(value, tuple) else (value,))))
    return found
