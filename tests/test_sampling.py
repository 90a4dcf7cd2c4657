"""Tests of the sample of the suite that `pytest --sample` runs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import settings

from . import sampling


class Item(SimpleNamespace):
    __hash__ = object.__hash__  # hashed by identity, like pytest's items

    def get_closest_marker(self, name: str) -> bool | None:
        return True if self.originalname == name else None


def items(**counts: int) -> list[Any]:
    return [
        Item(path=Path("test_x.py"), originalname=name, name=f"{name}[{i}]")
        for name, count in counts.items()
        for i in range(count)
    ]


def test_a_sample_keeps_at_most_that_many_sets_in_order() -> None:
    given = items(one=1, two=2, many=11)
    kept, left_out = sampling.take_sample(given, 3, "seed")
    assert [item.originalname for item in kept] == ["one", "two", "two", "many", "many", "many"]
    assert sorted(map(id, kept + left_out)) == sorted(map(id, given))
    assert kept == [item for item in given if item in kept]


def test_the_seed_decides_and_seeds_cover_all_sets() -> None:
    given = items(many=11, more=7)
    assert sampling.take_sample(given, 2, "a") == sampling.take_sample(given, 2, "a")
    covered = {item.name for seed in range(60) for item in sampling.take_sample(given, 2, str(seed))[0]}
    assert len(covered) == len(given)


def test_a_quarter_of_the_slow_tests_runs() -> None:
    given = items(slow=3, quick=1)
    runs = [len(sampling.take_sample(given, 2, str(seed))[0]) - 1 for seed in range(400)]
    assert set(runs) == {0, 1}
    assert 50 < sum(runs) < 150


def test_examples_scale_with_the_sample() -> None:
    before = sampling._most_examples
    try:
        sampling._most_examples = 20
        assert sampling.examples(150).max_examples == 20
        assert sampling.examples(5).max_examples == 5
        sampling._most_examples = None
        assert sampling.examples(150, derandomize=True).max_examples == 150
    finally:
        sampling._most_examples = before
    assert settings().deadline is None
