"""A few mutated graphs. `python -m tests.fuzz` runs many."""

from __future__ import annotations

import pytest

from .fuzz import try_graph


@pytest.mark.parametrize("seed", range(1000, 1025))  # each graph takes about a second
def test_a_mutated_graph_answers_as_before_or_is_refused_with_a_reason(seed: int) -> None:
    outcome = try_graph(seed)
    assert outcome.good, "\n    ".join([f"{outcome.kind}: {outcome.detail}", *outcome.done])
