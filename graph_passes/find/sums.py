"""Arithmetic with symbolic dimensions, such as past + new tokens or batch x heads."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

_NO_END = 2**31 - 1  # a Slice end of at least this means the end of the axis
_FROM_START = -(2**31)  # a backward Slice with at most this end includes the first element

# A dimension: an int; the name of a graph input's dimension; (value, axis) for an unknown one; a Sum or a Product.
Dim = Hashable
Shape = tuple[Dim, ...]
# An element of a small tensor: a number, a boolean, a symbolic Dim, or None if unknown.
Element = Dim | float | None


@dataclass(frozen=True)
class Sum:
    """A sum of symbolic dimensions, each with its multiplicity, and an integer; for example, past + new tokens."""

    dims: frozenset[tuple[Dim, int]]
    number: int


@dataclass(frozen=True)
class Product:
    """An integer multiple of a symbolic dimension, such as batch x heads."""

    dim: Dim
    times: int


def named(text: str) -> Dim | None:
    """Return the dimension with an exporter's name: `a`, or a sum such as `a + b` or `a + 1`."""
    parts = [part.strip() for part in text.split("+")]
    if len(parts) < 2 or not all(re.fullmatch(r"\w+", part) for part in parts):
        return text or None
    return total_of([int(part) if re.fullmatch("[0-9]{1,18}", part) else part for part in parts])


def total_of(dims: Sequence[Element]) -> Dim | None:
    """Return the sum of dimensions, independent of their order; None if one is unknown or the sum may be negative."""
    counts: Counter[Dim] = Counter()
    number = 0
    for dim in dims:
        if dim is None or isinstance(dim, bool | float):
            return None
        own, more = _terms(dim)
        counts.update(own)
        number += more
    return _sum(counts, number)


def difference(a: Element, b: Element) -> Dim | None:
    """Return a - b; None if a term of b is not in a."""
    if a is None or b is None or isinstance(a, bool | float) or isinstance(b, bool | float):
        return None
    (counts, number), (less, minus) = _terms(a), _terms(b)
    return _sum(counts - less, number - minus) if not less - counts else None


def product_of(a: Element, b: Element) -> Dim | None:
    """Return the product of a positive integer and a dimension, else None."""
    times, dim = (a, b) if isinstance(a, int) else (b, a)
    if not isinstance(times, int) or isinstance(times, bool) or times < 1 or dim is None or isinstance(dim, float):
        return None
    if times == 1:
        return dim
    return Product(dim.dim, dim.times * times) if isinstance(dim, Product) else Product(dim, times)


def quotient_of(a: Element, b: Element) -> Dim | None:
    """Return the quotient of a dimension and a positive integer if the division is always exact, else None."""
    if not isinstance(b, int) or isinstance(b, bool) or b < 1 or a is None or isinstance(a, float):
        return None
    if b == 1:
        return a
    return product_of(a.times // b, a.dim) if isinstance(a, Product) and a.times % b == 0 else None


def _terms(dim: Dim) -> tuple[Counter[Dim], int]:
    if isinstance(dim, int):
        return Counter(), dim
    return (Counter(dict(dim.dims)), dim.number) if isinstance(dim, Sum) else (Counter({dim: 1}), 0)


def _sum(counts: Counter[Dim], number: int) -> Dim | None:
    if not counts:
        return number
    if number == 0 and counts.total() == 1:
        return next(iter(counts))
    return Sum(frozenset(counts.items()), number) if number >= 0 else None


def quotient(dims: Sequence[Dim], by: Sequence[Dim]) -> Dim | None:
    """Return the dimension d for which product(by) * d = product(dims), or None."""
    (symbols, number), (others, divisor) = _factors(dims), _factors(by)
    left, missing = symbols - others, others - symbols
    if missing or divisor == 0 or number % divisor or left.total() > 1:
        return None
    return product_of(number // divisor, next(iter(left))) if left else number // divisor


def _factors(dims: Sequence[Dim]) -> tuple[Counter[Dim], int]:
    """Return the symbolic factors, and the product of the integers."""
    parts = [(dim.dim, dim.times) if isinstance(dim, Product) else (dim, 1) for dim in dims]
    numbers = [dim * times if isinstance(dim, int) else times for dim, times in parts]
    return Counter(dim for dim, _ in parts if not isinstance(dim, int)), math.prod(numbers)


def compute(op_type: str, operands: Sequence[Element]) -> Element:
    """Return the result of an ONNX operator on scalar operands, which may be symbolic; None if unknown."""
    if op_type == "Where":
        condition, chosen, other = operands
        return (chosen if condition else other) if isinstance(condition, bool) else None
    numbers = [one for one in operands if isinstance(one, int | float)]
    if op_type == "Equal" and len(numbers) == 1 and None not in operands and numbers[0] < 0:
        return False  # a dimension is not negative
    if op_type == "Equal" and operands[0] is not None and operands[0] == operands[1]:
        return True
    if op_type == "Not":
        return not operands[0] if isinstance(operands[0], bool) else None
    if len(numbers) != len(operands):
        return _compute_dims(op_type, operands)
    try:
        match op_type, numbers:
            case "Add", (a, b):
                return a + b
            case "Sub", (a, b):
                return a - b
            case "Mul", (a, b):
                return a * b
            case "Div", (a, b):
                return int(a / b) if isinstance(a, int) and isinstance(b, int) else a / b
            case "Equal", (a, b):
                return a == b
            case "Sqrt", (a,):
                return math.sqrt(a)
            case "Reciprocal", (a,):
                return 1 / a
    except (ArithmeticError, ValueError):
        pass
    return None


def _compute_dims(op_type: str, operands: Sequence[Element]) -> Element:
    """Return the result of Add, Sub, Mul or Div with at least one symbolic operand; None if unknown."""
    if op_type == "Add":
        return total_of(operands)
    rules = {"Sub": difference, "Mul": product_of, "Div": quotient_of}
    return rules[op_type](*operands) if op_type in rules and len(operands) == 2 else None


def cut(dim: Dim, begin: Element, end: Element, step: Element) -> Dim | None:
    """Return the length that a Slice of an axis of length `dim` has, or None."""
    if isinstance(begin, int) and isinstance(end, int) and isinstance(dim, int) and isinstance(step, int) and step:
        return len(range(*slice(begin, end if end > _FROM_START else None, step).indices(dim)))
    if step != 1:
        return None
    if isinstance(dim, int) and dim > 1:  # slices of a table, such as positions, are assumed to end within it
        return None if isinstance(begin, int) and begin < 0 else difference(end, begin)
    whole = end == dim or (isinstance(end, int) and end >= _NO_END)
    return dim if begin == 0 and whole else None
