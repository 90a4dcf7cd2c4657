"""Drafts from a second model: its cache follows the sequences, and it runs only where that pays."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import count

import numpy as np
import pytest
from numpy.typing import NDArray

from ortolan.engine import Engine, Request, Step, draft_model
from ortolan.engine.draft_model import DraftModel, likeliest
from ortolan.engine.drafts import Draft, LookupDrafter
from ortolan.engine.sequence import Sequence, State
from ortolan.engine.speculation import Speculation
from ortolan.engine.step_costs import StepCosts
from ortolan.errors import ArgumentError

from .simulation import Simulation
from .small_model import SmallModel, SmallSampler, answer
from .test_engine import GREEDY, answer_tokens, check_idle, collect, tokens

FREE = [0.01] * 64  # seconds of steps of the model: further tokens cost nothing


class Calls(SmallModel):
    """The small model, which notes the tokens of each sequence in each call."""

    def __init__(self, blocks: int = 100, context: int = 1000, repeats: bool = True) -> None:
        super().__init__(blocks, context, repeats)
        self.calls: list[list[int]] = []

    def run(self, step: Step) -> NDArray[np.float32]:
        self.calls.append(np.diff(step.sequence_starts).tolist())
        return super().run(step)


class Timed(DraftModel):
    """A draft model whose calls take 1 ms for each short one, and a given time for each token of a long one."""

    def __init__(self, model: SmallModel, accuracy: float = 0.9, token_seconds: float = 0.0) -> None:
        super().__init__(model)
        self.accuracy = accuracy
        self._guesses = 1000
        self._token_seconds = token_seconds
        for _ in range(20):
            for size in (1, 2, 3, 4):
                self._costs.observe(size, 0.001)

    def _observe(self, tokens: int, seconds: float) -> None:
        pass


def running(*prompts: tuple[int, ...], limit: int = 1000) -> list[Sequence]:
    found = [Sequence(prompt, limit) for prompt in prompts]
    for one in found:
        one.state = State.RUNNING
    return found


def following(prompt: Items[int], length: int) -> list[int]:
    return answer(Request(tuple(prompt), length, GREEDY), repeats=True)


def test_drafts_of_several_sequences_are_made_together() -> None:
    model = Calls()
    sequences = running(tokens(0, 30), tokens(1, 7), tokens(2, 50))
    drafts = DraftModel(model).propose(sequences, [4, 2, 4])
    assert [list(draft.tokens) for draft in drafts] == [
        following(one.tokens, most) for one, most in zip(sequences, (4, 2, 4), strict=True)
    ]
    assert model.calls == [[7, 30, 50], [1, 1, 1], [1, 1], [1, 1]]
    for draft in drafts:
        assert all(1 > before > after > 0 for before, after in zip(draft.chances, draft.chances[1:], strict=False))


@pytest.mark.parametrize(("right", "stored"), [(0, 1), (2, 1), (3, 1), (4, 2)])
def test_only_what_was_right_stays_in_the_cache(right: int, stored: int) -> None:
    """The next call stores the token that followed, and the last drafted one, which no call had stored."""
    model = Calls()
    drafter = DraftModel(model)
    (sequence,) = running(tokens(0, 30))
    (draft,) = drafter.propose([sequence], [4])
    wrong = (following([*sequence.tokens, *draft.tokens[:right]], 1)[0] + 1) % 50
    sequence.tokens.extend([*draft.tokens[:right], wrong])
    model.calls.clear()
    (draft,) = drafter.propose([sequence], [3])
    assert model.calls == [[stored], [1], [1]]
    assert list(draft.tokens) == following(sequence.tokens, 3)


def test_long_prompts_are_computed_in_several_calls() -> None:
    model = Calls()
    drafter = DraftModel(model)
    sequences = running(tokens(0, 800), tokens(1, 20))
    first = drafter.propose(sequences, [2, 2])
    assert [len(draft.tokens) for draft in first] == [0, 2]
    assert model.calls == [[20, 492], [1]]
    sequences[1].tokens.append(first[1].tokens[0])
    second = drafter.propose(sequences, [2, 2])
    assert list(second[0].tokens) == following(sequences[0].tokens, 2)
    assert model.calls[2:] == [[1, 308], [1, 1]]


def test_prefixes_are_shared_and_blocks_released() -> None:
    """A prefix is found by the hashes of the sequence, as in the engine's cache."""
    model = Calls()
    drafter = DraftModel(model)
    simulation = Simulation(60, 64, 8, Speculation(LookupDrafter(), drafter), repeats=True)
    first = simulation.add(Request(tokens(0, 100), 20, GREEDY))
    simulation.run()
    model.calls.clear()
    second = simulation.add(Request((*tokens(0, 100), *simulation.answer(first), 1, 2), 20, GREEDY))
    simulation.run()
    assert max(map(max, model.calls)) == 123 - 7 * 16 and simulation.accepted > 10
    assert drafter._pool.used > 0
    (other,) = running(tokens(5, 5))
    drafter.propose([other], [1])
    assert drafter._pool.used == 1
    assert simulation.answer(second) == answer(simulation.rows[second][0], repeats=True)


def test_sequences_without_room_get_no_drafts() -> None:
    drafter = DraftModel(Calls(blocks=3, context=40))
    sequences = running(tokens(0, 30), tokens(1, 20), tokens(2, 50))
    drafts = drafter.propose(sequences, [5, 5, 5])
    assert [len(draft.tokens) for draft in drafts] == [0, 5, 0]  # 2 blocks; 1 is missing; beyond the context
    sequences[1].state = State.WAITING  # preempted
    assert [len(draft.tokens) for draft in drafter.propose(sequences[::2], [5, 5])] == [5, 0]


# -- costs


def lengths(drafts: Items[Draft]) -> list[int]:
    return [len(draft.tokens) for draft in drafts]


def test_drafts_are_as_long_as_calls_pay() -> None:
    """Each token is right with a chance of 0.9. (1 + 0.9 + 0.9^2 + …) / (10 ms + calls) is largest for ten calls."""
    for milliseconds, expected in ((10, 10), (1.25, 1), (0.8, 0)):
        drafter = Timed(Calls(), accuracy=0.9)
        drafter._chances = [0.9] * 9
        drafter._credit = -1.0
        steps = [milliseconds / 1000] * 16
        assert lengths(drafter.propose(running(tokens(0, 30)), [15], 1, steps)) == [expected]


def test_a_model_that_is_never_right_is_rarely_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials take half a percent of the time: 1 ms in 20 steps of 10 ms."""
    model = Calls(repeats=False)
    drafter = Timed(model, accuracy=0.05)
    (sequence,) = running(tokens(0, 20))
    ticks = count()
    monkeypatch.setattr(draft_model.time, "perf_counter", lambda: next(ticks) * 0.001 / 3)  # three times in a trial
    drafted = 0
    decisions = 0
    for _ in range(320):
        if not drafter.rests():
            decisions += 1
            (draft,) = drafter.propose([sequence], [15], 1, FREE)
            drafted += len(draft.tokens)
        sequence.tokens.append(following(sequence.tokens, 1)[0])
    assert decisions == 20 and 10 < drafted < 18 and len(model.calls) == drafted


def test_it_is_used_again_when_it_is_right_again() -> None:
    model = Calls()
    drafter = Timed(model, accuracy=0.05)
    (sequence,) = running(tokens(0, 20))
    drafted = []
    for _ in range(600):
        drafter._credit = 1.0  # time for a trial in each step
        (draft,) = drafter.propose([sequence], [15], 1, FREE)
        drafted.append(len(draft.tokens))
        sequence.tokens.append(following(sequence.tokens, 1)[0])
    assert drafted[0] == 1 and drafted[-1] > 5 and drafter.accuracy > 0.8


@pytest.mark.parametrize(("limit", "expected"), [(110, 0), (1000, 3)])
def test_a_prompt_is_computed_if_its_answer_repays_it(limit: int, expected: int) -> None:
    drafter = Timed(Calls(), accuracy=0.9, token_seconds=0.002)
    drafter._credit = -1.0
    assert lengths(drafter.propose(running(tokens(0, 100), limit=limit), [3], 1, FREE)) == [expected]


def test_tokens_of_known_probability() -> None:
    logits = np.log(np.array([[0.2, 0.5, 0.3], [0.9, 0.05, 0.05], [0.1, 0.1, 0.8]], np.float32)) + 5
    logits[2, 0] = np.nan
    best, chances = likeliest(logits)
    assert best[:2] == [1, 0] and np.allclose(chances, [0.5, 0.9, 0])


# -- in the engine


def test_lookup_comes_first_where_it_is_likelier() -> None:
    model = Calls()
    drafter = DraftModel(model)
    speculation = Speculation(LookupDrafter(), drafter)
    repeating, other = running((1, 2, 3, 4, 5, 6, 7, 8) * 9, tokens(3, 30))
    speculation.costs = StepCosts()
    for _ in range(20):
        for size in (1, 2, 16, 64):
            speculation.costs.observe(size, 0.01)
    found = speculation.choose({repeating: 9, other: 9}, 2, 2, 100)
    assert list(found[repeating]) == [1, 2, 3, 4, 5, 6, 7, 8, 1]
    assert list(found[other]) == following(other.tokens, len(found[other]))
    assert model.calls[0] == [30]
    model.calls.clear()
    speculation.choose({repeating: 9, other: 9}, 2, 300, 100)
    assert not model.calls  # not beside prompts


def test_a_draft_model_that_fails_is_not_used_again() -> None:
    model = Calls()

    def fail(_: Step) -> None:
        raise MemoryError("no memory")

    model.check = fail
    with Engine(SmallModel(64, 400, repeats=True), sampler=SmallSampler(), speculation=DraftModel(model)) as engine:
        request = Request(tokens(0, 20), 40, GREEDY)
        assert answer_tokens(collect(engine.submit(request))[0]) == answer(request, repeats=True)
        check_idle(engine)
    assert len(model.calls) == 1


def test_another_vocabulary_is_refused() -> None:
    model = SmallModel(8)
    model.vocabulary = 60
    with pytest.raises(ArgumentError, match="a vocabulary of 60 tokens, expected 53, the model's"):
        Engine(SmallModel(8), sampler=SmallSampler(), speculation=DraftModel(model))
