"""Parameter sets where all of a product would repeat one another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any


def pairwise(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Sets in which any two values of two parameters meet at least once. A tuple stands for several parameters that
    belong together: its values are put into the sets one by one."""
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
