"""A few mutated graphs: python -m tests.fuzz runs many."""

from __future__ import annotations

import pytest
from hypothesis import settings

from .fuzz import try_graph

# As many as the options of the suite let hypothesis try, a quarter: a graph takes about a second.
SEEDS = range(1000, 1000 + max(settings().max_examples // 4, 4))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mutated_graph_answers_as_before_or_is_refused_with_a_reason(seed: int) -> None:
    outcome = try_graph(seed)
    assert outcome.good, "\n    ".join([f"{outcome.kind}: {outcome.detail}", *outcome.done])
