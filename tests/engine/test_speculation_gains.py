"""Prompt lookup gains on texts that repeat, and costs almost nothing on others, by the costs of simulated steps."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from functools import cache
from itertools import accumulate

import numpy as np
import pytest

from ortolan.engine.drafts import LookupDrafter
from ortolan.engine.sequence import Sequence
from ortolan.engine.speculation import Speculation
from ortolan.engine.step_costs import MOST_ROWS

Text = tuple[list[int], list[int]]  # prompt and answer

_TOKENS = 64  # of an answer
_VOCABULARY, _SUCCESSORS = 2000, 40
# Relative costs of steps by their tokens, between the given ones in proportion.
_COSTS = {
    "AVX2": {1: 1.0, 2: 1.15, 4: 1.5, 5: 2.0, 8: 2.8, 16: 4.6, 64: 16.0},
    "VNNI": {1: 1.0, 2: 1.1, 4: 1.25, 8: 1.6, 16: 2.4, 64: 8.0},
    "memory": {1: 1.0, 16: 1.05, 32: 1.5, 64: 3.0},
}
_COUNTS = (1, 4, 16)  # requests at a time
_GAINS = {"AVX2": (2.4, 1.25, 1.0), "VNNI": (4.0, 1.8, 1.05), "memory": (8.0, 4.0, 1.2)}  # the least ones of copies


def story(seed: int, length: int) -> list[int]:
    """Return a text in which pairs of tokens come again, but what follows them mostly differs, as in prose."""
    chance = random.Random(seed)
    weights = list(accumulate(1 / rank for rank in range(1, _SUCCESSORS + 1)))
    token, text = chance.randrange(_VOCABULARY), []
    for _ in range(length):
        (token,) = chance.choices(successors(token), cum_weights=weights)
        text.append(token)
    return text


@cache
def successors(token: int) -> list[int]:
    """Return the tokens that follow a token, the likeliest first. Those of small ids are frequent everywhere."""
    chance = random.Random(token)
    return [int(_VOCABULARY ** chance.random()) for _ in range(_SUCCESSORS)]


def plain(seed: int) -> Text:
    return story(seed, 40), story(seed + 1000, _TOKENS)


def copied(seed: int) -> Text:
    text = story(seed, _TOKENS)
    start = text[:8]
    return [*text, *story(seed + 1000, 10), *start], (text * 2)[8 : 8 + _TOKENS]


@dataclass
class Served:
    """Result of simulated steps.

    Attributes:
        seconds: The time of all steps.
        steps: The answer's length at the end of each step, of the first text.
        drafted: Drafted tokens.
        accepted: Drafted tokens that were right.
    """

    seconds: float
    steps: list[int]
    drafted: int = 0
    accepted: int = 0


def serve(speculation: Speculation, texts: Items[Text], costs: Items[float], noise: random.Random) -> Served:
    """Answer requests that arrive together, by steps whose measured times differ by 3 % from their costs."""
    live = {Sequence((*prompt, answer[0]), len(prompt) + len(answer)): [*prompt, *answer] for prompt, answer in texts}
    first, prompt = next(iter(live)), len(texts[0][0])
    found = Served(0.0, [])
    while live:
        most = {one: one.limit - len(one.tokens) - 1 for one in live}
        drafts = speculation.choose(most, len(live), len(live), 1000)
        drafted = sum(map(len, drafts.values()))
        rows = len(live) + drafted
        found.seconds += costs[rows]
        found.drafted += drafted
        for sequence, text in live.items():
            end = len(sequence.tokens)
            draft = list(drafts.get(sequence, ()))
            right = next((n for n, token in enumerate(draft) if token != text[end + n]), len(draft))
            sequence.tokens.extend(text[end : end + right + 1])
            found.accepted += right
        speculation.observe(rows, rows, costs[rows] * noise.gauss(0.01, 0.0003))
        found.steps.append(len(first.tokens) - prompt)
        live = {one: text for one, text in live.items() if len(one.tokens) < one.limit}
    return found


class Workload:
    """Requests that an engine with prompt lookup serves one group after the other."""

    def __init__(self, costs: dict[int, float]) -> None:
        self.costs = np.interp(np.arange(MOST_ROWS + 1), list(costs), list(costs.values())).tolist()
        self.speculation = Speculation(LookupDrafter())
        self.noise = random.Random(0)

    def serve(self, make: Callable[[int], Text], count: int, seeds: Items[int] = range(4)) -> tuple[float, Served]:
        """Serve groups of a number of requests; return how much faster they are than without drafts, and the last."""
        groups = [[make(100 * seed + one) for one in range(count)] for seed in seeds]
        served = [serve(self.speculation, group, self.costs, self.noise) for group in groups]
        without = len(groups) * (len(groups[0][0][1]) - 1) * self.costs[count]
        return without / sum(one.seconds for one in served), served[-1]


@pytest.mark.parametrize("costs", list(_COSTS))
def test_other_texts_take_no_longer_also_after_copies(costs: str) -> None:
    workload = Workload(_COSTS[costs])
    before = [workload.serve(plain, count)[0] for count in _COUNTS]
    copies = [workload.serve(copied, count)[0] for count in _COUNTS]
    after = [workload.serve(plain, count, range(4, 8))[0] for count in _COUNTS]
    assert min(*before, *after) > 0.985
    assert np.all(np.array(copies) > _GAINS[costs])


@pytest.mark.parametrize("count", _COUNTS)
def test_drafts_of_long_texts_become_rare(count: int) -> None:
    """An answer of 1000 tokens, whose pairs of tokens come again all the time."""
    workload = Workload(_COSTS["VNNI"])
    gain, served = workload.serve(lambda seed: (story(seed, 40), story(seed + 1, 1000)), count, range(1))
    assert gain > 0.985 and served.drafted < 0.15 * 1000 * count


@pytest.mark.parametrize("count", [1, 4])
def test_a_text_that_begins_to_repeat_is_soon_drafted(count: int) -> None:
    """After 300 tokens of an answer, and many of other requests, it repeats its last 100 tokens again and again."""

    def turning(seed: int) -> Text:
        text = story(seed, 340)
        return text[:40], text[40:] + text[-100:] * 2

    workload = Workload(_COSTS["VNNI"])
    workload.serve(plain, count, range(20))
    _, served = workload.serve(turning, count, range(1))
    assert sum(length > 300 for length in served.steps) < 30
    assert served.accepted > 0.85 * 200 * count
