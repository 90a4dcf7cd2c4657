from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.engine import BLOCK_TOKENS, Request, SamplingOptions
from ortolan.engine.sequence import Sequence
from ortolan.errors import ArgumentError

from ..sampling import examples
from .simulation import Simulation
from .small_model import VOCABULARY, answer
from .speculations import SPECULATIONS

GREEDY = SamplingOptions(temperature=0)


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))


def request(prompt: tuple[int, ...], max_tokens: int = 5, **options: object) -> Request:
    return Request(prompt, max_tokens, GREEDY, **options)  # type: ignore[arg-type]


def check_answers(simulation: Simulation, sequences: list[Sequence]) -> None:
    for sequence in sequences:
        assert simulation.answer(sequence) == answer(simulation.rows[sequence][0], repeats=simulation.repeats)


def test_one_sequence_is_computed_in_chunks_that_end_at_blocks() -> None:
    simulation = Simulation(blocks=20, budget=40)
    sequence = simulation.add(request(tokens(0, 100), 3))
    computed = []
    while simulation.step():
        computed.append(sequence.computed)
    assert computed == [32, 64, 100, 101, 0]
    check_answers(simulation, [sequence])


def test_decoding_comes_before_prompts() -> None:
    simulation = Simulation(blocks=40, budget=32)
    short = [simulation.add(request(tokens(seed, 5), 20)) for seed in range(3)]
    simulation.step()
    simulation.add(request(tokens(9, 200), 1))
    simulation.step()
    assert [len(simulation.answer(one)) for one in short] == [2, 2, 2]
    assert simulation.computed == 15 + 3 + 16


def test_equal_prompts_that_arrive_together_are_computed_once() -> None:
    simulation = Simulation(blocks=100, budget=64, sequences=16)
    prompt = tokens(0, 10 * BLOCK_TOKENS)
    sequences = [simulation.add(request((*prompt, seed), 2)) for seed in range(16)]
    simulation.run()
    check_answers(simulation, sequences)
    assert simulation.computed == len(prompt) + 16 * 2
    assert [one.cached for one in sequences] == [0] + 15 * [len(prompt)]


def test_running_answers_share_the_blocks_of_their_prefix() -> None:
    simulation = Simulation(blocks=30, sequences=16)
    prompt = tokens(0, 10 * BLOCK_TOKENS)
    for seed in range(16):
        simulation.add(request((*prompt, seed), 8))
    for _ in range(6):
        simulation.step()
    assert len(simulation.scheduler.running) == 16
    assert simulation.scheduler.pool.used == 10 + 16


def test_equal_blocks_that_were_computed_apart_become_one() -> None:
    simulation = Simulation(blocks=30)
    for _ in range(2):  # equal answers, so also equal blocks of answers
        simulation.add(request(tokens(0, 20), 60))
    for _ in range(40):
        simulation.step()
    first, second = (simulation.scheduler.blocks(one)[:3] for one in simulation.scheduler.running)
    assert first == second


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    simulation = Simulation(blocks=10)
    first = simulation.add(request(tokens(0, 2 * BLOCK_TOKENS), 1))
    simulation.run()
    second = simulation.add(request(tokens(0, 2 * BLOCK_TOKENS), 1))
    simulation.run()
    assert (first.cached, second.cached) == (0, BLOCK_TOKENS)
    check_answers(simulation, [first, second])


def test_a_conversation_finds_its_earlier_answer() -> None:
    simulation = Simulation(blocks=20)
    first = simulation.add(request(tokens(0, 30), 40))
    simulation.run()
    second = simulation.add(request((*tokens(0, 30), *simulation.answer(first), *tokens(1, 5)), 3))
    simulation.run()
    assert second.cached == 64
    check_answers(simulation, [first, second])


def test_prefixes_that_were_used_last_stay() -> None:
    simulation = Simulation(blocks=6)
    for seed in (0, 1, 0, 2):  # two blocks each and one for the answer
        simulation.add(request(tokens(seed, 2 * BLOCK_TOKENS + 1), 1))
        simulation.run()
    again = simulation.add(request(tokens(0, 2 * BLOCK_TOKENS + 1), 1))
    simulation.run()
    assert again.cached == 2 * BLOCK_TOKENS
    other = simulation.add(request(tokens(1, 2 * BLOCK_TOKENS + 1), 1))
    simulation.run()
    assert other.cached < 2 * BLOCK_TOKENS


def test_the_youngest_gives_up_its_blocks() -> None:
    simulation = Simulation(blocks=8)
    sequences = [simulation.add(request(tokens(seed, 18), 60)) for seed in range(2)]
    simulation.run()
    assert sequences[0].preemptions == 0 < sequences[1].preemptions
    check_answers(simulation, sequences)


def test_a_lower_priority_number_runs_first_and_takes_blocks() -> None:
    simulation = Simulation(blocks=8, sequences=2)
    patient = [simulation.add(request(tokens(seed, 18), 30, priority=1)) for seed in range(3)]
    simulation.step()
    urgent = simulation.add(request(tokens(9, 100), 20, priority=0))
    simulation.step()
    assert simulation.scheduler.running[0] is urgent
    simulation.run()
    assert simulation.ended[urgent] == min(simulation.ended.values())
    assert sum(one.preemptions for one in patient) > 0
    check_answers(simulation, [urgent, *patient])


def test_an_urgent_prompt_goes_before_one_that_is_computed_in_chunks() -> None:
    simulation = Simulation(blocks=60, budget=32)
    patient = simulation.add(request(tokens(0, 300), 2, priority=1))
    simulation.step()
    urgent = simulation.add(request(tokens(1, 60), 2))
    simulation.step()
    assert (patient.computed, urgent.computed) == (32, 32)
    simulation.run()
    assert simulation.ended[urgent] < simulation.ended[patient]
    check_answers(simulation, [urgent, patient])


def test_a_prompt_takes_the_blocks_of_younger_sequences() -> None:
    simulation = Simulation(blocks=21, budget=32)
    old = simulation.add(request(tokens(0, 296), 2))  # 19 blocks; half of each step is for others
    young = simulation.add(request(tokens(1, 20), 60))  # needs a third block meanwhile
    simulation.run()
    assert young.preemptions == 1 and simulation.ended[old] == 19
    check_answers(simulation, [old, young])


def test_a_cached_prefix_counts_as_used_once_a_sequence_starts_with_it() -> None:
    simulation = Simulation(blocks=12)
    prefix = tokens(0, 10 * BLOCK_TOKENS)
    simulation.add(request((*prefix, 1), 1))
    simulation.run()
    running = simulation.add(request(tokens(1, 20), 8))
    simulation.step()
    second = simulation.add(request((*prefix, 2), 1))
    simulation.run()
    assert (second.preemptions, second.cached) == (0, len(prefix))
    assert simulation.ended[second] == simulation.ended[running] + 1
    check_answers(simulation, [running, second])


def test_the_end_of_a_prefix_is_evicted_before_its_beginning() -> None:
    simulation = Simulation(blocks=12)
    prefix = tokens(0, 10 * BLOCK_TOKENS)
    simulation.add(request((*prefix, 1), 1))
    simulation.run()
    simulation.add(request(tokens(1, 60), 1))  # four blocks, two of them of the prefix
    simulation.run()
    again = simulation.add(request((*prefix, 1), 1))
    simulation.run()
    assert again.cached == 8 * BLOCK_TOKENS


def test_a_sequence_that_ended_during_its_step() -> None:
    simulation = Simulation(blocks=10)
    sequence = simulation.add(request(tokens(0, 40), 2))
    plan = simulation.scheduler.schedule()
    assert plan is not None
    simulation.end(sequence)
    simulation.scheduler.complete(plan)
    assert sequence.computed == 0 and simulation.scheduler.pool.free == 10


def test_clients_take_turns() -> None:
    simulation = Simulation(blocks=40, sequences=2)
    greedy = [simulation.add(request(tokens(seed, 5), 4, client="greedy")) for seed in range(20)]
    modest = [simulation.add(request(tokens(99 + seed, 5), 4, client="modest")) for seed in range(2)]
    simulation.run()
    ends = simulation.ended
    assert all(ends[one] < ends[other] for one in modest for other in greedy[4:])
    check_answers(simulation, greedy + modest)


def test_a_very_long_prompt_leaves_half_of_each_step_to_others() -> None:
    simulation = Simulation(blocks=100, budget=64)
    long = simulation.add(request(tokens(0, 1000), 1))
    short = [simulation.add(request(tokens(seed, 30), 2)) for seed in range(1, 4)]
    for _ in range(4):
        simulation.step()
    assert long.computed == 32 + 32 + 32 + 48
    assert max(simulation.ended[one] for one in short) == 4
    simulation.run()
    check_answers(simulation, [long, *short])


def test_a_large_request_does_not_starve_behind_small_ones() -> None:
    simulation = Simulation(blocks=16, sequences=8)
    for seed in range(8):
        simulation.add(request(tokens(seed, 20), 30))
    simulation.step()
    large = simulation.add(request(tokens(50, 200), 20))
    for seed in range(1000, 1400):
        simulation.add(request(tokens(seed, 20), 30))
        simulation.step()
        if large in simulation.ended:
            break
    assert simulation.ended[large] < 200
    check_answers(simulation, [large])


def test_a_failed_step_leaves_nothing_in_the_prefix_cache() -> None:
    simulation = Simulation(blocks=10)
    sequence = simulation.add(request(tokens(0, 40), 2))
    plan = simulation.scheduler.schedule()
    assert plan is not None and list(plan.counts) == [sequence]
    simulation.end(sequence)  # without `complete`
    again = simulation.add(request(tokens(0, 40), 2))
    simulation.run()
    assert again.cached == 0
    check_answers(simulation, [again])


@pytest.mark.parametrize(("budget", "sequences"), [(7, 8), (15, 1), (64, 0), (63, 64)])
def test_limits_that_cannot_work_are_refused(budget: int, sequences: int) -> None:
    with pytest.raises(ArgumentError, match="expected at least"):
        Simulation(blocks=8, budget=budget, sequences=sequences)


PROMPTS = st.tuples(st.integers(0, 3), st.integers(0, 80), st.integers(0, 2), st.integers(1, 20))
REQUESTS = st.tuples(PROMPTS, st.integers(1, 40), st.sampled_from((0, 0, 0, 1)), st.sampled_from("abc"))
EVENTS = st.lists(st.one_of(st.integers(1, 6), REQUESTS, st.just("cancel")), min_size=1, max_size=40)


@examples(120)
@given(
    EVENTS,
    st.integers(9, 40),
    st.sampled_from((16, 17, 40, 100)),
    st.integers(1, 8),
    st.sampled_from(sorted(SPECULATIONS)),
    st.booleans(),
    st.randoms(),
)
def test_any_arrivals(
    events: list[object],
    blocks: int,
    budget: int,
    most: int,
    drafts: str,
    repeats: bool,
    chance: random.Random,
) -> None:
    """Answers equal those of each request alone; the checks of the simulation hold in each step; all requests end."""
    simulation = Simulation(blocks, budget, most, SPECULATIONS[drafts](), repeats)
    cancelled: set[Sequence] = set()
    work = 0
    for event in events:
        if isinstance(event, int):
            for _ in range(event):
                simulation.step()
        elif isinstance(event, tuple):
            (family, shared, tail, length), max_tokens, priority, client = event
            prompt = tokens(family, shared) + tokens(10 + tail, length)
            simulation.add(request(prompt, max_tokens, priority=priority, client=client))
            work += len(prompt) + max_tokens
        elif alive := [one for one in simulation.submitted if one not in simulation.ended]:
            victim = chance.choice(alive)
            cancelled.add(victim)
            simulation.end(victim)
    # Each step computes at least one token of the sequence that is first in rank, and that one keeps its blocks.
    simulation.run(most_steps=work + 1)
    for sequence, (one, row) in simulation.rows.items():
        expected = answer(one, repeats=repeats)
        assert row.answer == (expected[: len(row.answer)] if sequence in cancelled else expected)


@examples(40)
@given(st.lists(st.tuples(st.integers(1, 100), st.integers(1, 30)), min_size=1, max_size=30), st.integers(9, 20))
def test_nobody_waits_for_those_who_came_later(sizes: list[tuple[int, int]], blocks: int) -> None:
    simulation = Simulation(blocks, 32, 4)
    sequences = []
    for seed, (length, max_tokens) in enumerate(sizes):
        sequences.append(simulation.add(request(tokens(seed, length), max_tokens)))
        simulation.step()
    simulation.run()
    earlier = 0  # tokens of this sequence and earlier ones; each step computes at least one
    for sequence, (length, max_tokens) in zip(sequences, sizes, strict=True):
        earlier += length + max_tokens
        assert simulation.ended[sequence] - simulation.submitted[sequence] <= earlier


@pytest.mark.parametrize("drafts", sorted(SPECULATIONS))
def test_thousands_of_arrivals(drafts: str) -> None:
    chance = random.Random(0)
    simulation = Simulation(16, 48, 8, SPECULATIONS[drafts](), repeats=drafts != "none")
    sequences: list[Sequence] = []
    while len(sequences) < 1000:
        for _ in range(chance.choice((0, 0, 1, 2))):
            prompt = tokens(chance.randrange(5), chance.randrange(100))
            prompt += tokens(len(sequences), chance.randrange(1, 30))
            end = frozenset({chance.randrange(VOCABULARY)})
            one = request(prompt, chance.randrange(1, 100), client=chance.choice("abcd"), end_tokens=end)
            sequences.append(simulation.add(one))
        simulation.step()
    simulation.run()
    assert simulation.scheduler.preemptions > 100 and simulation.scheduler.prefix_hits > 5_000
    assert drafts == "none" or 1000 < simulation.accepted < simulation.drafted
    check_answers(simulation, sequences)
