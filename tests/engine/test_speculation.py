"""Speculative decoding: answers are those without drafts, and drafts are chosen by their chances and costs."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from ortolan.engine import BLOCK_TOKENS, Engine, Output, Request, RowState, Sampled, SamplingOptions, Step
from ortolan.engine.draft_model import DraftModel
from ortolan.engine.drafts import Draft, Drafter, LookupDrafter
from ortolan.engine.sequence import Sequence
from ortolan.engine.speculation import MOST_DRAFTED, Speculation
from ortolan.engine.step_costs import MOST_ROWS, StepCosts
from ortolan.errors import ArgumentError, OrtolanError

from .chain_drafter import ChainDrafter
from .letters import letters
from .sampling_oracle import distribution
from .simulation import Simulation
from .small_model import VOCABULARY, SmallModel, SmallSampler, answer
from .test_engine import GREEDY, answer_tokens, check_idle, collect, tokens


@pytest.fixture(autouse=True)
def steady(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let drafts not depend on the times of steps."""
    monkeypatch.setattr(Speculation, "observe", lambda *_: None)


class Wave:
    """A grammar: tokens of another set of five after each token, and an end after 25."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    @property
    def finished(self) -> bool:
        return self.seen == 25

    def mask(self) -> NDArray[np.uint32] | None:
        if self.seen % 10 == 9:
            return None
        allowed = np.zeros(64, bool)
        allowed[np.arange(self.seen % 3, VOCABULARY, 3)] = True
        return np.packbits(allowed, bitorder="little").view(np.uint32)

    def advance(self, token: int) -> None:
        if self.seen % 10 != 9 and token % 3 != self.seen % 3:
            raise OrtolanError(f"token {token} is not allowed")
        self.seen += 1

    def copy(self) -> Wave:
        return Wave(self.seen)


def random_request(chance: random.Random) -> Request:
    options = SamplingOptions(
        temperature=chance.choice((0, 0.8, 1.5)),
        top_k=chance.choice((0, 5)),
        top_p=chance.choice((1.0, 0.9)),
        seed=chance.randrange(1000),
        repetition_penalty=chance.choice((1.0, 1.3, 2.5)),
        presence_penalty=chance.choice((0.0, 1e6)),
        frequency_penalty=chance.choice((0.0, 3e6)),
        logit_bias=chance.choice(({}, {5: 1e7, 9: -1e8})),
        logprobs=chance.choice((None, 2)),
    )
    text = letters().decode(list(range(VOCABULARY)))
    start = chance.randrange(VOCABULARY - 3)
    return Request(
        tokens(chance.randrange(4), chance.randrange(60)) + tokens(chance.randrange(99), chance.randrange(1, 20)),
        chance.randrange(1, 60),
        options,
        stop=chance.choice(((), (text[start : start + 3],))),
        end_tokens=chance.choice((frozenset(), frozenset({chance.randrange(VOCABULARY)}))),
        n=chance.choice((1, 1, 1, 3)),
        priority=chance.randrange(2),
        grammar=chance.choice((None, None, None, Wave())),
    )


def events(engine: Engine, requests: list[Request]) -> list[dict[int, list[tuple[Any, ...]]]]:
    """Return the events of each request without the tokens that came from the prefix cache."""
    streams = [engine.submit(request) for request in requests]
    return [{index: [_event(one) for one in outputs] for index, outputs in collect(one).items()} for one in streams]


def _event(output: Output) -> tuple[Any, ...]:
    return output.tokens, output.text, output.logprobs, output.finish_reason, output.error, output.generated


def small_draft_model() -> DraftModel:
    return DraftModel(SmallModel(60, 90, repeats=True))


@pytest.mark.parametrize("drafter", [LookupDrafter, ChainDrafter, small_draft_model])
@pytest.mark.parametrize("blocks", [20, 300])
def test_all_events_are_those_without_drafts(drafter: Callable[[], Drafter | DraftModel], blocks: int) -> None:
    """Penalties, grammars, stop strings, log probabilities, seeds, choices, and preemption if there are few blocks."""
    chance = random.Random(blocks)
    requests = [random_request(chance) for _ in range(80)]
    with Engine(SmallModel(300, 200, repeats=True), tokenizer=letters(), speculation=None) as engine:
        expected = events(engine, requests)
    with Engine(
        SmallModel(blocks, 200, repeats=True),
        tokenizer=letters(),
        speculation=drafter(),
        max_sequences=8,
        max_step_tokens=64,
    ) as engine:
        found = events(engine, requests)
        check_idle(engine)
        counts = engine.stats()
    assert found == expected
    assert 200 < counts.accepted_tokens < counts.drafted_tokens and counts.steps < counts.computed_tokens
    assert counts.preemptions > 0 or blocks == 300
    reasons = [outputs[-1][3] for one in expected for outputs in one.values()]
    assert {"stop", "length"} == set(reasons)


def test_a_repeated_text_takes_few_steps() -> None:
    request = Request(tokens(0, 20), 200, GREEDY)
    with Engine(SmallModel(64, 400, repeats=True), sampler=SmallSampler()) as engine:
        outputs = collect(engine.submit(request))[0]
        assert answer_tokens(outputs) == answer(request, repeats=True) and len(outputs) == 200
        counts = engine.stats()
    assert counts.generated_tokens == 200 == counts.steps + counts.accepted_tokens
    assert counts.steps < 120 and counts.computed_tokens == 20 + counts.steps - 1 + counts.drafted_tokens


def test_texts_that_do_not_repeat_have_few_drafts() -> None:
    requests = [Request(tokens(seed, 20), 200, GREEDY) for seed in range(4)]
    with Engine(SmallModel(64, 400), sampler=SmallSampler()) as engine:
        for request in requests:
            assert answer_tokens(collect(engine.submit(request))[0]) == answer(request)
        assert engine.stats().drafted_tokens < 40


def test_an_error_after_an_accepted_token_ends_one_sequence() -> None:
    class FailsLate(SmallSampler):
        def sample(self, logits: NDArray[np.float32], rows: Items[RowState]) -> list[Sampled]:
            if any(row.prompt[0] == 0 and len(row.answer) == 33 for row in rows):
                raise OrtolanError("logits are not numbers")
            return super().sample(logits, rows)

    with Engine(SmallModel(64, 400, repeats=True), sampler=FailsLate(), speculation=ChainDrafter()) as engine:
        good = [Request((seed, *tokens(seed, 20)), 60, GREEDY) for seed in range(1, 5)]
        bad = engine.submit(Request((0, *tokens(0, 20)), 60, GREEDY))
        for request, stream in [(one, engine.submit(one)) for one in good]:
            assert answer_tokens(collect(stream)[0]) == answer(request, repeats=True)
        outputs = collect(bad)[0]
        assert (len(answer_tokens(outputs)), outputs[-1].error) == (33, "logits are not numbers")
        check_idle(engine)


def test_an_error_of_the_model_gives_the_blocks_of_drafts_back() -> None:
    model = SmallModel(64, 400, repeats=True)

    def fail(step: Step) -> None:
        if len(step.logit_rows) > 1:
            raise MemoryError("no memory")

    model.check = fail
    with Engine(model, sampler=SmallSampler(), speculation=ChainDrafter()) as engine:
        assert collect(engine.submit(Request(tokens(0, 14), 60, GREEDY)))[0][-1].error == "the model failed: no memory"
        check_idle(engine)


class Uneven:
    """A model of eight tokens whose logits are always the same, and a drafter of its likeliest token."""

    vocabulary, context, blocks = 8, 1 << 14, 1 << 10
    logits = np.random.default_rng(4).standard_normal(8).astype(np.float32)

    def run(self, step: Step) -> NDArray[np.float32]:
        return np.tile(self.logits, (len(step.logit_rows), 1))

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
        return [Draft([int(self.logits.argmax())] * min(count, 4), [0.9] * min(count, 4)) for count in most]


def test_frequencies_of_tokens_follow_the_distribution() -> None:
    with Engine(Uneven(), speculation=Uneven()) as engine:
        found = np.array(answer_tokens(collect(engine.submit(Request((1,), 10_000, SamplingOptions(seed=11))))[0]))
        counts = engine.stats()
    assert counts.accepted_tokens > 1000 and counts.drafted_tokens - counts.accepted_tokens > 1000
    expected = distribution(Uneven.logits.astype(np.float64), SamplingOptions()) * 10_000
    assert stats.chisquare(np.bincount(found, minlength=8), expected).pvalue > 1e-3
    # Tokens after an accepted one have the same distribution: pairs have the product distribution.
    pairs = np.bincount(found[:-1] * 8 + found[1:], minlength=64)
    assert stats.chisquare(pairs, np.outer(expected, expected).ravel() / 1e8 * 9_999).pvalue > 1e-3


def test_drafts_take_nothing_from_prompts() -> None:
    computed = []
    for speculation in (None, Speculation(ChainDrafter())):
        simulation = Simulation(60, 64, 8, speculation, repeats=True)
        simulation.add(Request(tokens(0, 12), 60, GREEDY))
        simulation.step()
        prompt = simulation.add(Request(tokens(1, 150), 5, GREEDY))
        simulation.step()
        computed.append(prompt.computed)
    assert computed == [48, 48]
    assert simulation.drafted == 15  # the rest of the step


def test_an_answer_with_drafts_is_found_by_the_next_turn() -> None:
    simulation = Simulation(20, speculation=Speculation(ChainDrafter()), repeats=True)
    first = simulation.add(Request(tokens(0, 30), 40, GREEDY))
    simulation.run()
    second = simulation.add(Request((*tokens(0, 30), *simulation.answer(first), *tokens(1, 5)), 3, GREEDY))
    simulation.run()
    assert simulation.accepted > 10 and second.cached == 64
    assert simulation.answer(second) == answer(simulation.rows[second][0], repeats=True)


def test_other_sources_are_refused() -> None:
    with pytest.raises(ArgumentError, match="speculation is 'magic', expected 'lookup', a DraftModel, a Drafter"):
        Engine(SmallModel(8), sampler=SmallSampler(), speculation="magic")  # type: ignore[arg-type]


# -- the number of drafts


class Fixed:
    """Proposes drafts of tokens 0, 1, 2, … with given chances of each token."""

    def __init__(self, *chances: float) -> None:
        self._chances = chances

    def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
        return [Draft(range(n), chance ** np.arange(1, n + 1)) for n, chance in zip(most, self._chances, strict=True)]


def chosen(speculation: Speculation, most: Items[int], rows: int = 0, tokens: int = 0, left: int = 1000) -> list[int]:
    """Return the lengths of the drafts of sequences."""
    sequences = [Sequence((1,), 1000) for _ in most]
    rows = rows or len(most)
    found = speculation.choose(dict(zip(sequences, most, strict=True)), rows, tokens or rows, left)
    return [len(found.get(one, ())) for one in sequences]


def costs(*milliseconds: float) -> StepCosts:
    """Return costs that were measured for steps of 1, 2, … tokens."""
    result = StepCosts()
    for _ in range(20):
        for tokens_, one in enumerate(milliseconds, 1):
            result.observe(tokens_, one / 1000)
    return result


def test_drafts_are_as_long_as_they_pay() -> None:
    speculation = Speculation(Fixed(0.9))
    speculation.costs = costs(*[10] * 16)
    assert chosen(speculation, [50]) == [MOST_DRAFTED]
    assert chosen(speculation, [4]) == [4]
    assert chosen(speculation, [50], left=3) == [3]
    speculation.costs = costs(10, 11, 12, 13, *[100] * 12)
    assert chosen(speculation, [50]) == [3]
    speculation.costs = costs(10, *[19.5] * 15)
    assert chosen(speculation, [50]) == [MOST_DRAFTED]  # one drafted token would not pay
    speculation.costs = costs(*range(10, 170, 10))
    assert chosen(speculation, [50]) == [0]


def test_the_likeliest_drafts_are_taken() -> None:
    speculation = Speculation(Fixed(0.84, 0.95, 0.0))
    speculation.costs = costs(10, 10, 10, 10.5, 11, 11.5, 12, 100)
    assert chosen(speculation, [20, 20, 20]) == [1, 3, 0]  # 0.95, 0.9, 0.86 and 0.84


def test_rows_of_a_step_are_limited() -> None:
    speculation = Speculation(Fixed(*[0.99] * 10))
    assert sum(chosen(speculation, [50] * 10)) == MOST_ROWS - 10
    assert chosen(Speculation(Fixed()), [50] * 10, rows=MOST_ROWS) == [0] * 10  # nothing is asked of the drafter
    assert chosen(Speculation(Fixed()), [0, -3]) == [0, 0]


def test_drafts_that_are_too_long_are_cut() -> None:
    class Long(Fixed):
        def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
            return super().propose(sequences, [2 * count for count in most])

    assert chosen(Speculation(Long(0.99, 0.99)), [4, 2], tokens=100) == [4, 2]


@pytest.mark.parametrize("is_short", [True, False])
def test_a_drafter_that_fails_is_not_used_again(is_short: bool, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Fixed):
        calls = 0

        def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
            Broken.calls += 1
            if is_short:
                return []
            raise ValueError("no idea")

    speculation = Speculation(Broken(0.99))
    assert chosen(speculation, [4, 2]) == chosen(speculation, [4, 2]) == [0, 0]
    assert Broken.calls == 1
    assert "the drafter failed and is not used again" in caplog.text


@pytest.mark.parametrize("wrong", [-1, VOCABULARY, 1 << 70])
def test_a_drafter_of_another_vocabulary_is_not_used(wrong: int, caplog: pytest.LogCaptureFixture) -> None:
    class Foreign:
        def propose(self, sequences: Items[Sequence], most: Items[int]) -> list[Draft]:
            return [Draft([0, VOCABULARY - 1, wrong][:count], [0.99] * min(count, 3)) for count in most]

    request = Request(tokens(0, 20), 30, GREEDY)
    with Engine(SmallModel(64, 400), sampler=SmallSampler(), speculation=Foreign()) as engine:
        assert answer_tokens(collect(engine.submit(request))[0]) == answer(request)
        assert engine.stats().drafted_tokens == 0
    assert f"a draft has token {wrong}, expected 0 to {VOCABULARY - 1}, the model's vocabulary" in caplog.text


def test_drafts_beside_prompts_cost_what_prompts_cost() -> None:
    speculation = Speculation(Fixed(0.5))
    speculation.costs = costs(10, 100)
    # The seventh drafted token adds 2 ** -7 to 2 tokens, and 1 / 500 to the time.
    assert chosen(speculation, [20], rows=1, tokens=500) == [7]
    assert chosen(speculation, [20], rows=1, tokens=4) == [1]


def test_a_step_that_takes_no_time_by_the_clock() -> None:
    result = costs(0, 0)
    assert np.allclose(result.table(1, 2), result.table(1, 1), rtol=0.05)


def test_costs_follow_times() -> None:
    found = costs(10, 14, 14, 16).table(1, 4)
    assert np.allclose(np.array(found) / found[0], [1, 1.4, 1.4, 1.6], rtol=0.05)


def test_costs_between_and_beyond_those_that_were_measured() -> None:
    result = StepCosts()
    assert result.table(1, 2)[1] / result.table(1, 2)[0] == 2**0.25
    for tokens_, seconds in ((2, 0.02), (4, 0.03)) * 40:
        result.observe(tokens_, seconds)
    one, two, three, four, eight = (result.table(1, 8)[index] for index in (0, 1, 2, 3, 7))
    assert np.allclose([three / two, four / two, eight / four, two / one], [1.25, 1.5, 2**0.25, 2**0.25], rtol=0.01)
    assert result.table(3, 3) == [three]


def test_costs_are_relative_while_sequences_grow() -> None:
    result = costs(10, 15)
    for seconds in np.linspace(0.01, 0.05, 100):
        result.observe(1, seconds)
    one, two = result.table(1, 2)
    assert 1.3 < two / one < 1.7


def test_one_slow_step_changes_little() -> None:
    result = costs(10, 12)
    result.observe(2, 10)
    for _ in range(3):
        result.observe(1, 0.01)
    one, two = result.table(1, 2)
    assert two / one < 1.4


def test_costs_are_measured_again_after_a_while() -> None:
    result = costs(10, 100)
    for _ in range(300):
        result.observe(1, 0.01)
    one, two = result.table(1, 2)
    assert two / one == pytest.approx(2**0.25)


# -- prompt lookup


def propose(drafter: LookupDrafter, sequence: Sequence, most: int = 15) -> Draft:
    (draft,) = drafter.propose([sequence], [most])
    assert len(draft.tokens) == len(draft.chances) <= most
    assert all(1 > before >= after > 0 for before, after in zip(draft.chances, draft.chances[1:], strict=False))
    return draft


def test_lookup_continues_after_the_latest_equal_tokens() -> None:
    drafter = LookupDrafter()
    assert list(propose(drafter, Sequence((1, 2, 3, 4, 9, 1, 2, 3, 5, 6, 7, 8, 1, 2, 3), 99), 3).tokens) == [5, 6, 7]
    assert list(propose(drafter, Sequence((1, 2, 3, 4, 0, 5, 2, 3), 99), 2).tokens) == [4, 0]
    assert not propose(drafter, Sequence((1, 2, 3, 4, 0, 5, 9, 3), 99)).tokens
    assert not propose(drafter, Sequence((1,), 99)).tokens


def test_lookup_runs_past_the_end_of_a_text_that_repeats() -> None:
    sequence = Sequence((9, *(1, 2, 3) * 20), 999)
    drafter = LookupDrafter()
    for token in (1, 2, 3) * 20:
        propose(drafter, sequence)
        sequence.tokens.append(token)
    assert list(propose(drafter, sequence).tokens) == [1, 2, 3] * 5


def test_lookup_learns_the_chances_of_each_sequence() -> None:
    text = tokens(0, 200)
    drafter = LookupDrafter()
    sequence = Sequence(text + text[:20], 999)
    before = propose(drafter, sequence).chances
    for token in text[20:60]:
        sequence.tokens.append(token)
        after = propose(drafter, sequence).chances
    assert after[0] > 0.95 > before[0]
    chance = random.Random(1)
    for _ in range(300):  # pairs of tokens come again and again, but what follows them is random
        sequence.tokens.append(chance.randrange(3))
        draft = propose(drafter, sequence)
    assert draft.chances[0] < 0.6
    # New sequences begin with the chances of others where those are lower.
    other = Sequence((0, 1, 5, 0, 1), 99)
    assert propose(drafter, other).chances[0] < propose(LookupDrafter(), Sequence(other.tokens, 99)).chances[0]
    assert propose(drafter, Sequence(text + text[:20], 999)).chances[0] == before[0]


@pytest.mark.parametrize("kinds", [2, 5, VOCABULARY, 100_000])
def test_lookup_finds_what_is_there(kinds: int) -> None:
    """A draft continues an earlier place after the same two tokens or more, also when tables have grown."""
    chance = random.Random(kinds)
    sequence = Sequence((chance.randrange(kinds),), 9999)
    drafter = LookupDrafter()
    found = 0
    while len(sequence.tokens) < 600:
        start = chance.randrange(len(sequence.tokens))
        sequence.tokens.extend(sequence.tokens[start : start + chance.randrange(8)])
        if chance.random() < 0.5:
            sequence.tokens.append(chance.randrange(kinds))
        draft = propose(drafter, sequence, 4)
        if draft.tokens:
            found += 1
            history = sequence.drafting
            assert 2 <= history.match < len(sequence.tokens)
            assert sequence.tokens[history.match - 2 : history.match] == sequence.tokens[-2:]
            expected = [*sequence.tokens[history.match :], *draft.tokens][: len(draft.tokens)]
            assert list(draft.tokens) == expected
    assert found > 10 and sequence.drafting.slots <= 20 * len(sequence.tokens)


def test_long_prompts_are_read_in_pieces() -> None:
    """A long prompt has no drafts until all is read. Short ones have theirs meanwhile."""
    chance = random.Random(0)
    text = [chance.randrange(100_000) for _ in range(10_000)]
    long = [Sequence((*text, *text[place : place + 5]), 99_999) for place in (50, 9000)]
    short = Sequence((1, 2, 3, 4, 1, 2, 3), 99_999)
    drafter = LookupDrafter()
    seen = [0, 0]
    for _ in range(10):
        *drafts, other = drafter.propose([*long, short], [4, 4, 4])
        assert list(other.tokens) == [4, 1, 2, 3]
        read = [one.drafting.seen - before for one, before in zip(long, seen, strict=True)]
        assert 0 < sum(read) <= 4096 + 16
        seen = [one.drafting.seen for one in long]
        for sequence, draft in zip(long, drafts, strict=True):
            assert bool(draft.tokens) == (sequence.drafting.seen == len(sequence.tokens))
        if all(draft.tokens for draft in drafts):
            break
    assert [list(draft.tokens) for draft in drafts] == [text[55:59], text[9005:9009]]
    for token in text[55:60]:  # a table that grows keeps what older ones have
        long[0].tokens.append(token)
    long[0].tokens.extend(range(200_000, 225_000))
    while long[0].drafting.seen < len(long[0].tokens):
        propose(drafter, long[0], 4)
    assert len(long[0].drafting.tables) == 2
    long[0].tokens.extend(text[700:703])
    assert list(propose(drafter, long[0], 4).tokens) == text[703:707]


def test_nothing_is_kept_about_a_sequence_that_ended() -> None:
    simulation = Simulation(20, speculation=Speculation(LookupDrafter()), repeats=True)
    sequence = simulation.add(Request(tokens(0, 30), BLOCK_TOKENS, GREEDY))
    simulation.run()
    assert simulation.drafted and sequence.drafting is None
