"""Run a sample of the test suite: `pytest --sample N`.

Runs at most N parameter sets of each test, at most 10 N examples of each hypothesis test, and a quarter of the tests
marked `slow`. The choice depends on the commit, so that successive commits cover all tests. `--sample-seed` repeats the
choice of another run.
"""

from __future__ import annotations

import subprocess
import zlib
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

_EXAMPLES_PER_SET = 10
_HYPOTHESIS_DEFAULT = 100
_SLOW_SHARE = 4  # one in four slow tests runs
_most_examples: int | None = None  # set before test modules are imported, because their decorators read it


def examples(count: int, **others: Any) -> settings:
    """Decorate a hypothesis test that runs `count` examples, or fewer in a sample of the suite.

    Args:
        count: Examples in a full run.
        **others: Further arguments of `hypothesis.settings`.
    """
    return settings(max_examples=count if _most_examples is None else min(count, _most_examples), **others)


def configure_hypothesis(sample: int | None) -> None:
    """Load the hypothesis profile of the suite, which has no deadlines: machines may be slow, busy or emulated."""
    global _most_examples
    _most_examples = None if sample is None else sample * _EXAMPLES_PER_SET
    count = examples(_HYPOTHESIS_DEFAULT).max_examples
    settings.register_profile(
        "any speed", deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=count
    )
    settings.load_profile("any speed")


def current_commit() -> str:
    """Return the abbreviated commit of this checkout, or "none" outside a git repository."""
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def take_sample(items: Sequence[pytest.Item], most: int, seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Return the tests to run and the tests to leave out.

    Keeps `most` parameter sets of each test, evenly spread over their order from a start that depends on the seed and
    the test's name. Of the tests marked `slow`, it keeps one in `_SLOW_SHARE`, with one parameter set.
    """
    sets: dict[tuple[str, str], list[pytest.Item]] = defaultdict(list)
    for item in items:
        sets[str(item.path), getattr(item, "originalname", item.name)].append(item)
    kept: set[pytest.Item] = set()
    for (_, name), some in sets.items():
        start = zlib.crc32(f"{seed} {name}".encode())
        count = min(most, len(some))
        if some[0].get_closest_marker("slow") is not None:
            count = 1 if start % _SLOW_SHARE == 0 else 0
        kept.update(some[(start + i * len(some) // count) % len(some)] for i in range(count))
    return [item for item in items if item in kept], [item for item in items if item not in kept]
