from __future__ import annotations

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator

import numpy as np
import pytest
from numpy.typing import NDArray

from ortolan.engine import (
    BLOCK_TOKENS,
    Engine,
    EngineClosedError,
    Output,
    QueueFullError,
    Request,
    RowState,
    Sampled,
    SamplingOptions,
    Step,
    Stream,
    TokenLogprobs,
)
from ortolan.engine.text import Detokenizer
from ortolan.errors import ArgumentError, ArgumentTypeError, OrtolanError

from .letters import letters
from .simulation import check_step
from .small_model import VOCABULARY, SmallModel, SmallSampler, answer

GREEDY = SamplingOptions(temperature=0)


def tokens(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(VOCABULARY), k=length))


class Gate:
    """Holds the model until it is opened, so that a test decides what arrives before a step."""

    def __init__(self, model: SmallModel) -> None:
        self._open = threading.Semaphore(0)
        self._entered = threading.Semaphore(0)
        model.check = self._wait

    def _wait(self, step: Step) -> None:
        self._entered.release()
        assert self._open.acquire(timeout=60)

    def open(self, steps: int = 1_000_000) -> None:
        self._open.release(steps)

    def wait_for_step(self) -> None:
        assert self._entered.acquire(timeout=60)


@pytest.fixture
def model() -> SmallModel:
    return SmallModel(blocks=64, context=400)


@pytest.fixture
def engine(model: SmallModel) -> Iterator[Engine]:
    with Engine(model, sampler=SmallSampler(), max_sequences=8, max_step_tokens=64, speculation=None) as engine:
        yield engine


def collect(stream: Stream) -> dict[int, list[Output]]:
    found: dict[int, list[Output]] = defaultdict(list)
    for output in stream:
        assert not (found[output.index] and found[output.index][-1].finish_reason)
        found[output.index].append(output)
    assert all(outputs[-1].finish_reason for outputs in found.values()) and len(found) == stream.request.n
    return found


def answer_tokens(outputs: list[Output]) -> list[int]:
    result = [token for output in outputs for token in output.tokens]
    assert outputs[-1].generated == len(result)
    return result


def check_idle(engine: Engine) -> None:
    stats = engine.stats()
    assert (stats.queued_sequences, stats.running_sequences, stats.blocks_used) == (0, 0, 0)
    assert stats.blocks_cached + stats.blocks_free == engine.model.blocks


def test_an_answer_and_its_events(engine: Engine) -> None:
    request = Request(tokens(0, 100), 7, GREEDY)
    outputs = collect(engine.submit(request))[0]
    assert answer_tokens(outputs) == answer(request)
    assert [output.finish_reason for output in outputs] == [None] * 6 + ["length"]
    assert [output.generated for output in outputs] == list(range(1, 8))
    assert {(output.prompt_tokens, output.cached_tokens, output.text) for output in outputs} == {(100, 0, "")}
    again = collect(engine.submit(request))[0]
    assert again[0].cached_tokens == 96 and answer_tokens(again) == answer(request)
    check_idle(engine)


def test_choices_differ_and_share_the_prompt(engine: Engine) -> None:
    request = Request(tokens(0, 8 * BLOCK_TOKENS + 1), 6, SamplingOptions(seed=5), n=4)
    found = collect(engine.submit(request))
    answers = [answer_tokens(found[index]) for index in range(4)]
    assert answers == [answer(request, index=index, seed=5) for index in range(4)]
    assert len({tuple(one) for one in answers}) == 4
    assert [found[index][0].cached_tokens for index in range(4)] == [0, 128, 128, 128]
    assert engine.stats().computed_tokens == 129 + 3 * 1 + 4 * 5


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    request = Request(tokens(0, 10), 12)
    assert len({tuple(answer_tokens(collect(engine.submit(request))[0])) for _ in range(3)}) == 3


def test_an_end_token_ends_an_answer(engine: Engine) -> None:
    whole = answer(Request(tokens(3, 20), 20, GREEDY))
    request = Request(tokens(3, 20), 20, GREEDY, end_tokens=frozenset({whole[4]}))
    outputs = collect(engine.submit(request))[0]
    assert answer_tokens(outputs) == whole[: whole.index(whole[4]) + 1]
    assert outputs[-1].finish_reason == "stop"


def test_the_context_ends_an_answer() -> None:
    with Engine(SmallModel(blocks=64, context=50), sampler=SmallSampler()) as engine:
        request = Request(tokens(0, 40), 1000, GREEDY)
        outputs = collect(engine.submit(request))[0]
        assert answer_tokens(outputs) == answer(request, context=50)
        assert len(answer_tokens(outputs)) == 10 and outputs[-1].finish_reason == "length"
    with Engine(SmallModel(blocks=2, context=50), sampler=SmallSampler(), max_sequences=1) as engine:
        assert len(answer_tokens(collect(engine.submit(Request(tokens(0, 30), 9)))[0])) == 2
        with pytest.raises(ArgumentError, match=r"prompt has 32 tokens, expected at most 31: what the KV cache holds"):
            engine.submit(Request(tokens(0, 32), 1))


def test_logprobs_are_passed_on(engine: Engine) -> None:
    outputs = collect(engine.submit(Request(tokens(0, 9), 2, SamplingOptions(temperature=0, logprobs=2))))[0]
    for output in outputs:
        assert output.logprobs is not None
        (one,) = output.logprobs
        assert isinstance(one, TokenLogprobs) and one.token == output.tokens[0] == one.top[0][0] and len(one.top) == 2
    assert collect(engine.submit(Request(tokens(0, 9), 1, GREEDY)))[0][0].logprobs is None


def test_stop_strings(model: SmallModel) -> None:
    request = Request(tokens(1, 20), 30, GREEDY)
    text = letters().decode(answer(request))
    stop = text[7:10]
    with Engine(model, sampler=SmallSampler(), tokenizer=letters()) as engine:
        assert "".join(output.text for output in collect(engine.submit(request))[0]) == text
        outputs = collect(engine.submit(Request(tokens(1, 20), 30, GREEDY, stop=(stop, "absent"))))[0]
        assert "".join(output.text for output in outputs) == text[: text.find(stop)]
        assert answer_tokens(outputs) == answer(request)[: text.find(stop) + 3]
        assert outputs[-1].finish_reason == "stop"
        # Held-back text comes with the last token.
        held = Request(tokens(1, 20), 5, GREEDY, stop=(text[3:5] + "absent",))
        outputs = collect(engine.submit(held))[0]
        assert "".join(output.text for output in outputs) == text[:5] and outputs[-1].text.endswith(text[3:5])
        assert outputs[-1].finish_reason == "length"


class Digits:
    """A grammar: three tokens below 10."""

    def __init__(self, seen: int = 0) -> None:
        self.seen = seen

    @property
    def finished(self) -> bool:
        return self.seen == 3

    def mask(self) -> NDArray[np.uint32] | None:
        return np.array([0x3FF, 0], np.uint32)

    def advance(self, token: int) -> None:
        if token >= 10:
            raise OrtolanError(f"token {token} is not a digit")
        self.seen += 1

    def copy(self) -> Digits:
        return Digits(self.seen)


class NoMask(Digits):
    def mask(self) -> NDArray[np.uint32] | None:
        return None

    def copy(self) -> NoMask:
        return NoMask(self.seen)


class BadMask(Digits):
    def mask(self) -> NDArray[np.uint32] | None:
        raise OrtolanError("no mask today")

    def copy(self) -> BadMask:
        return BadMask(self.seen)


def test_a_grammar_allows_tokens_and_ends_answers(engine: Engine) -> None:
    request = Request(tokens(0, 20), 50, SamplingOptions(seed=1), n=3, grammar=Digits())
    for outputs in collect(engine.submit(request)).values():
        assert len(answer_tokens(outputs)) == 3 and max(answer_tokens(outputs)) < 10
        assert outputs[-1].finish_reason == "stop"
    assert request.grammar is not None and not request.grammar.finished


class TooComplex(Digits):
    def mask(self) -> NDArray[np.uint32] | None:
        raise ArgumentError("the grammar is too complex")

    def copy(self) -> TooComplex:
        return TooComplex(self.seen)


class NoToken(Digits):
    def mask(self) -> NDArray[np.uint32] | None:
        return np.zeros(-(-VOCABULARY // 32), np.uint32)

    def copy(self) -> NoToken:
        return NoToken(self.seen)


@pytest.mark.parametrize(
    ("grammar", "error", "kind"),
    [
        (NoMask(), "is not a digit", "internal"),
        (BadMask(), "no mask today", "internal"),
        (TooComplex(), "the grammar is too complex", "request"),
    ],
)
def test_an_error_of_a_grammar_ends_its_request_alone(engine: Engine, grammar: Digits, error: str, kind: str) -> None:
    other = engine.submit(fine := Request(tokens(1, 300), 20, GREEDY))
    outputs = collect(engine.submit(Request(tokens(0, 20), 50, SamplingOptions(seed=1), grammar=grammar)))[0]
    assert outputs[-1].finish_reason == "error" and error in str(outputs[-1].error)
    assert outputs[-1].error_kind == kind and outputs[0].error_kind == (kind if len(outputs) == 1 else None)
    assert answer_tokens(collect(other)[0]) == answer(fine)
    check_idle(engine)


def test_a_grammar_without_tokens_is_an_error_of_the_request(model: SmallModel) -> None:
    with Engine(model) as engine:
        (output,) = engine.submit(Request(tokens(0, 20), 50, GREEDY, grammar=NoToken()))
    assert (output.error, output.error_kind) == ("the grammar excludes every token", "request")


def test_a_grammar_that_fails_leaves_other_rows_their_logits(engine: Engine, model: SmallModel) -> None:
    gate = Gate(model)
    first = engine.submit(Request(tokens(5, 5), 1, GREEDY))
    gate.wait_for_step()
    bad = engine.submit(Request(tokens(0, 20), 50, GREEDY, grammar=BadMask()))
    good = [engine.submit(Request(tokens(seed, 20), 8, GREEDY)) for seed in (1, 2)]  # in the same step
    gate.open()
    assert collect(bad)[0][-1].error == "no mask today" and collect(first)
    for stream in good:
        assert answer_tokens(collect(stream)[0]) == answer(stream.request)


def test_cancel_a_running_and_a_waiting_request(engine: Engine, model: SmallModel) -> None:
    gate = Gate(model)
    running = engine.submit(Request(tokens(0, 20), 300, GREEDY, n=8))
    gate.wait_for_step()
    waiting = engine.submit(Request(tokens(1, 20), 300, GREEDY))
    kept = engine.submit(request := Request(tokens(2, 20), 30, GREEDY))
    waiting.cancel()
    running.cancel()
    gate.open()
    assert [outputs[-1].finish_reason for outputs in collect(running).values()] == ["cancelled"] * 8
    assert [output.finish_reason for output in waiting] == ["cancelled"]
    assert answer_tokens(collect(kept)[0]) == answer(request)
    waiting.cancel()  # nothing happens
    check_idle(engine)
    assert engine.stats().finished == {"stop": 0, "length": 1, "cancelled": 9, "deadline": 0, "error": 0}


def test_deadlines(engine: Engine, model: SmallModel) -> None:
    gate = Gate(model)
    late = engine.submit(Request(tokens(0, 20), 300, GREEDY, deadline=time.monotonic() + 0.05))
    gate.wait_for_step()
    queued = engine.submit(Request(tokens(1, 20), 300, GREEDY, deadline=time.monotonic() - 1))
    in_time = engine.submit(Request(tokens(2, 20), 3, GREEDY, deadline=time.monotonic() + 1000))
    time.sleep(0.06)
    gate.open()
    assert collect(late)[0][-1].finish_reason == "deadline"
    assert [output.finish_reason for output in queued] == ["deadline"]
    assert collect(in_time)[0][-1].finish_reason == "length"
    check_idle(engine)


def test_a_full_queue_refuses_and_tells_when_to_come_back(model: SmallModel) -> None:
    gate = Gate(model)
    with Engine(model, sampler=SmallSampler(), max_sequences=2, max_queue=5) as engine:
        streams = [engine.submit(Request(tokens(seed, 5), 4, GREEDY)) for seed in range(2)]
        gate.wait_for_step()
        streams += [engine.submit(Request(tokens(seed, 5), 4, GREEDY)) for seed in range(2, 6)]
        with pytest.raises(QueueFullError, match=r"queue is full: [45] sequences wait, and at most 5 may") as error:
            engine.submit(Request(tokens(9, 5), 4, GREEDY, n=3))
        assert 1 <= error.value.retry_after <= 60
        assert engine.stats().rejected_requests == 1
        gate.open()
        assert all(collect(stream)[0][-1].finish_reason == "length" for stream in streams)
        assert len(collect(engine.submit(Request(tokens(9, 5), 4, GREEDY, n=5)))) == 5
        with pytest.raises(ArgumentError, match=r"n is 6, expected at most 5, the engine's max_queue"):
            engine.submit(Request(tokens(9, 5), 4, GREEDY, n=6))


def test_a_queue_of_long_prompts_refuses(model: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ortolan.engine.engine._WAITING_TOKENS", 100)
    most = 4 * model.blocks * BLOCK_TOKENS
    gate = Gate(model)
    with Engine(model, sampler=SmallSampler(), max_sequences=1) as engine:
        streams = [engine.submit(Request(tokens(0, 5), 1, GREEDY))]
        gate.wait_for_step()
        streams += [engine.submit(Request(tokens(1, 256), 1, GREEDY, n=n)) for n in (4, most // 256 - 5)]
        streams.append(engine.submit(Request(tokens(2, 255), 1, GREEDY)))
        engine.check_room()
        with pytest.raises(
            QueueFullError, match=rf"sequences of {most - 1} tokens wait, and at most {most} tokens may"
        ):
            engine.submit(Request(tokens(3, 2), 1, GREEDY))
        with pytest.raises(QueueFullError, match=r"tokens may"):
            engine.check_room(2)
        streams.append(engine.submit(Request(tokens(3, 1), 1, GREEDY)))
        with pytest.raises(QueueFullError, match=r"tokens may"):
            engine.check_room()
        gate.open()
        assert all(collect(stream)[0][-1].finish_reason == "length" for stream in streams)
        engine.check_room()
        check_idle(engine)
    assert engine._scheduler.waiting.tokens == 0


def test_what_waits_shares_its_prompt_and_has_no_detokenizer(
    model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    monkeypatch.setattr("ortolan.engine.engine.Detokenizer", lambda *_: made.append(0) or Detokenizer(*_))
    gate = Gate(model)
    with Engine(model, sampler=SmallSampler(), tokenizer=letters(), max_sequences=1) as engine:
        first = engine.submit(Request(tokens(0, 5), 1, GREEDY))
        gate.wait_for_step()
        waiting = engine.submit(Request(tokens(1, 300), 3, GREEDY, n=8))
        assert len({id(choice.tokens) for choice in waiting.choices}) == 1 and not made
        cancelled = engine.submit(Request(tokens(2, 300), 3, GREEDY, n=8))
        cancelled.cancel()
        gate.open()
        assert collect(first) and collect(cancelled)
        for outputs in collect(waiting).values():
            assert answer_tokens(outputs) == answer(waiting.request)
            assert "".join(output.text for output in outputs) == letters().decode(answer_tokens(outputs))
        assert len({id(choice.tokens) for choice in waiting.choices}) == 8 and len(made) == 9


def test_an_error_of_the_model_ends_the_requests_of_the_step(engine: Engine, model: SmallModel) -> None:
    gate = Gate(model)
    streams = [engine.submit(Request(tokens(seed, 20), 30, GREEDY)) for seed in range(3)]
    gate.wait_for_step()

    def fail(step: Step) -> None:
        if len(step.past_lengths) == 3 and step.past_lengths.min() >= 20:
            raise MemoryError("no memory\nfor this step")

    model.check = fail
    gate.open()
    for stream in streams:
        outputs = collect(stream)[0]
        assert (outputs[-1].finish_reason, outputs[-1].error) == ("error", "the model failed: no memory for this step")
        assert len(outputs) > 1
    request = Request(tokens(0, 20), 5, GREEDY)
    assert answer_tokens(collect(engine.submit(request))[0]) == answer(request)
    check_idle(engine)


def test_logits_of_a_wrong_shape_are_an_error(model: SmallModel) -> None:
    model.vocabulary = 60
    with Engine(model, sampler=SmallSampler()) as engine:
        outputs = collect(engine.submit(Request(tokens(0, 20), 30, GREEDY)))[0]
    assert outputs[-1].error == "the model failed: logits have shape [1, 53], expected [1, 60]"


class OneRowFails(SmallSampler):
    def sample(self, logits: NDArray[np.float32], rows: list[RowState]) -> list[Sampled]:  # type: ignore[override]
        if any(row.prompt[0] == 0 and len(row.answer) == 3 for row in rows):
            raise OrtolanError("logits are not numbers")
        return super().sample(logits, rows)


def test_an_error_of_the_sampler_ends_one_sequence(model: SmallModel) -> None:
    with Engine(model, sampler=OneRowFails()) as engine:
        good = [Request((seed, *tokens(seed, 20)), 10, SamplingOptions(seed=seed)) for seed in range(1, 5)]
        gate = Gate(model)
        streams = [engine.submit(request) for request in good]
        bad = engine.submit(Request((0, *tokens(0, 20)), 10, GREEDY))
        gate.open()
        for request, stream in zip(good, streams, strict=True):
            assert answer_tokens(collect(stream)[0]) == answer(request, seed=request.sampling.seed or 0)
        outputs = collect(bad)[0]
        assert (len(answer_tokens(outputs)), outputs[-1].error) == (3, "logits are not numbers")


def test_an_error_of_the_engine_ends_requests_and_not_the_engine(
    engine: Engine, model: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("ortolan.engine.scheduler.Scheduler.complete", lambda self, plan: 1 / 0)
        stream = engine.submit(Request(tokens(0, 20), 30, GREEDY))
        (choice,) = stream.choices
        choice.drafting = "what a drafter keeps"
        assert collect(stream)[0][-1].error == "the engine failed: division by zero"
        assert choice.drafting is None
    request = Request(tokens(0, 20), 5, GREEDY)
    assert answer_tokens(collect(engine.submit(request))[0]) == answer(request)
    check_idle(engine)


class Panic(BaseException):
    """An error like a panic of a Rust library, which is not an Exception."""


def test_panics_end_requests_and_not_the_engine(model: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def panic(*_: object) -> str:
        raise Panic("index out of bounds")

    with Engine(model, tokenizer=letters(), sampler=SmallSampler()) as engine:
        with monkeypatch.context() as patch:
            patch.setattr("ortolan.engine.text.TextStream.push", panic)
            patch.setattr("ortolan.engine.text.TextStream.end", panic)
            streams = [engine.submit(Request(tokens(seed, 20), 30, GREEDY)) for seed in range(2)]
            for stream in streams:
                assert collect(stream)[0][-1].error == "the engine failed: index out of bounds"
        request = Request(tokens(0, 20), 5, GREEDY)
        assert answer_tokens(collect(engine.submit(request))[0]) == answer(request)
        check_idle(engine)


def test_callbacks_get_earlier_and_later_events(engine: Engine, model: SmallModel) -> None:
    gate = Gate(model)
    stream = engine.submit(request := Request(tokens(0, 20), 9, GREEDY))
    gate.open(3)
    for _ in range(4):
        gate.wait_for_step()  # so three events have been put
    found: list[Output] = []
    ended = threading.Event()

    def take(output: Output) -> None:
        found.append(output)
        if output.finish_reason:
            ended.set()

    stream.on_output(take)
    assert len(found) == 3
    gate.open()
    assert ended.wait(60) and answer_tokens(found) == answer(request) and stream.finished
    assert list(stream) == []


def test_a_callback_that_fails_cancels_its_request(engine: Engine, model: SmallModel) -> None:
    def fail(output: Output) -> None:
        raise RuntimeError("event loop is closed")

    gate = Gate(model)
    stream = engine.submit(Request(tokens(0, 20), 300, GREEDY))
    stream.on_output(fail)
    gate.open()
    other = engine.submit(request := Request(tokens(1, 20), 20, GREEDY))
    assert answer_tokens(collect(other)[0]) == answer(request)
    assert stream.finished and engine.stats().finished["cancelled"] == 1


def test_close_drains_or_cancels(model: SmallModel) -> None:
    engine = Engine(model, sampler=SmallSampler())
    streams = [engine.submit(Request(tokens(seed, 20), 50, GREEDY)) for seed in range(4)]
    engine.close(drain_seconds=60)
    assert [collect(stream)[0][-1].finish_reason for stream in streams] == ["length"] * 4
    with pytest.raises(EngineClosedError, match="closed"):
        engine.submit(Request(tokens(0, 20), 50, GREEDY))
    engine.close()

    engine = Engine(model, sampler=SmallSampler())
    gate = Gate(model)
    streams = [engine.submit(Request(tokens(seed, 20), 50, GREEDY)) for seed in range(4)]
    gate.wait_for_step()
    closing = threading.Thread(target=engine.close)
    closing.start()
    gate.open(1)
    closing.join(0.05)
    gate.open()
    closing.join(60)
    assert not closing.is_alive()
    assert [collect(stream)[0][-1].finish_reason for stream in streams] == ["cancelled"] * 4
    check_idle(engine)


def test_requests_that_do_not_fit_the_model_are_refused(engine: Engine) -> None:
    with pytest.raises(ArgumentError, match=r"prompt contains token 53, expected less than 53"):
        engine.submit(Request((1, 53), 5))
    with pytest.raises(ArgumentError, match=r"logit_bias has token 60, expected less than 53"):
        engine.submit(Request((1,), 5, SamplingOptions(logit_bias={60: 1.0})))
    with pytest.raises(ArgumentError, match=r"prompt has 400 tokens, expected at most 399: the model's context is 400"):
        engine.submit(Request(tokens(0, 400), 5))
    with pytest.raises(ArgumentError, match="stop needs a tokenizer"):
        engine.submit(Request((1,), 5, stop=("x",)))
    with pytest.raises(ArgumentError, match="max_queue is 0"):
        Engine(engine.model, sampler=SmallSampler(), max_queue=0)
    with pytest.raises(ArgumentTypeError, match=r"tokenizer is a str, expected a tokenizers\.Tokenizer"):
        Engine(engine.model, sampler=SmallSampler(), tokenizer="tokenizer.json")  # type: ignore[arg-type]


def test_stats(engine: Engine) -> None:
    for _ in range(2):
        collect(engine.submit(Request(tokens(0, 100), 5, GREEDY)))
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens, stats.computed_tokens) == (200, 10, 100 + 4 + 4 + 4)
    assert (stats.prefix_queried_tokens, stats.prefix_hit_tokens, stats.preemptions) == (200, 96, 0)
    assert stats.time_to_first_token.count == 2 and stats.time_between_tokens.count == 8
    assert stats.steps == stats.step_seconds.count == 2 + 4 + 1 + 4
    assert stats.request_seconds.count == 2 and stats.request_seconds.total >= stats.time_to_first_token.total > 0


def test_memory_of_ended_requests_with_late_deadlines_is_given_back(engine: Engine) -> None:
    deadline = time.monotonic() + 1000
    for seed in range(200):
        collect(engine.submit(Request(tokens(seed, 5), 1, GREEDY, deadline=deadline)))
    assert len(engine._deadlines) <= 70


@pytest.mark.parametrize("repeats", [False, True])
def test_two_thousand_requests_get_the_answers_that_each_gets_alone(repeats: bool) -> None:
    """Random arrivals in several threads, with preemption, cancellation, shared prefixes, seeds, and few blocks."""
    model = SmallModel(blocks=24, context=300, repeats=repeats)
    results: list[tuple[Request, dict[int, list[Output]], bool]] = []
    lock = threading.Lock()

    def arrive(engine: Engine, name: int) -> None:
        chance = random.Random(name)
        open_streams: list[tuple[Request, list[Output], Stream, bool]] = []
        for _ in range(500):
            prompt = tokens(chance.randrange(6), chance.randrange(120)) + tokens(chance.randrange(99), 1 + name)
            options = SamplingOptions(temperature=chance.choice((0, 1)), seed=chance.randrange(1000))
            ends = frozenset({chance.randrange(VOCABULARY)})
            n = chance.choice((1, 1, 1, 2, 3))
            request = Request(prompt, chance.randrange(1, 50), options, (), ends, n, client=str(name))
            stream = engine.submit(request)
            first = [next(stream)] if chance.random() < 0.1 else []
            is_cancelled = chance.random() < (0.5 if first else 0.1)
            if is_cancelled:
                stream.cancel()
            open_streams.append((request, first, stream, is_cancelled))
            if chance.random() < 0.2:
                time.sleep(0.002)
        for request, first, stream, is_cancelled in open_streams:
            found: dict[int, list[Output]] = defaultdict(list)
            for output in (*first, *stream):
                found[output.index].append(output)
            with lock:
                results.append((request, found, is_cancelled))

    with Engine(model, sampler=SmallSampler(), max_sequences=6, max_step_tokens=48, max_queue=10_000) as engine:
        original = engine._scheduler.schedule

        def schedule() -> object:
            plan = original()
            if plan is not None:
                check_step(engine._scheduler, plan, 48)
            return plan

        engine._scheduler.schedule = schedule  # type: ignore[method-assign, assignment]
        threads = [threading.Thread(target=arrive, args=(engine, name)) for name in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        check_idle(engine)
        stats = engine.stats()
    assert stats.preemptions > 50 and stats.prefix_hit_tokens > 10_000 and stats.finished["error"] == 0
    reasons: Counter[str | None] = Counter()
    for request, found, is_cancelled in results:
        for index, outputs in found.items():
            reasons[outputs[-1].finish_reason] += 1
            expected = answer(request, 300, index, request.sampling.seed or 0, repeats=repeats)
            got = answer_tokens(outputs)
            if outputs[-1].finish_reason == "cancelled":
                assert is_cancelled and got == expected[: len(got)]
            else:
                assert got == expected
    assert len(results) == 2000 and reasons["cancelled"] > 20 and reasons["length"] > 500 and reasons["stop"] > 500
