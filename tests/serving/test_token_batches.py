"""The queue of texts that forms batches, without a server."""

from __future__ import annotations

import asyncio

import pytest

from ortolan.engines import RequestError
from ortolan.token_batches import TokenBatches
from ortolan.tokens import Tokens


class Runner:
    """A model replacement that waits for permission, answers each text with its ids, and records the batches."""

    def __init__(self, held: bool = True) -> None:
        self.batches: list[list[list[int]]] = []
        self.go = asyncio.Semaphore(0 if held else 10**6)
        self.begun = asyncio.Event()

    async def __call__(self, texts):
        self.batches.append([list(text.ids) for text in texts])
        self.begun.set()
        await self.go.acquire()
        return [text.ids[0] for text in texts]


def texts(*lengths, name=0):
    return [Tokens((), [name] * length) for length in lengths]


def run(test):
    asyncio.run(asyncio.wait_for(test(), 30))


def test_texts_of_all_requests_share_batches_without_padding():
    async def test():
        runner = Runner()
        queue = TokenBatches(runner, 10, 100)
        first = asyncio.create_task(queue.answer(texts(1)))
        await runner.begun.wait()
        others = [asyncio.create_task(queue.answer(texts(length, name=length))) for length in (7, 2, 1, 5, 4, 12, 1)]
        await asyncio.sleep(0)
        assert queue.waiting_tokens == 32
        for _ in range(8):
            runner.go.release()
        assert await asyncio.gather(first, *others) == [[0], [7], [2], [1], [5], [4], [12], [1]]
        assert [[len(text) for text in batch] for batch in runner.batches] == [[1], [7, 2, 1], [5, 4], [12], [1]]
        assert queue.waiting_tokens == 0

    run(test)


def test_padding_is_counted_where_it_is_computed():
    async def test():
        runner = Runner(held=False)
        queue = TokenBatches(runner, 10, 100, pads=True)
        await queue.answer(texts(5, 1, 1, 1, 1))
        assert [[len(text) for text in batch] for batch in runner.batches] == [[5, 1], [1, 1, 1]]

    run(test)


@pytest.mark.parametrize("failing", ["on_batch", "run", "too few answers"])
def test_a_failure_is_told_to_the_requests_of_its_batch_alone(failing):
    async def test():
        runner, failures = Runner(held=False), 1

        def fail(name):
            nonlocal failures
            if name == failing and failures:
                failures -= 1
                raise ValueError(name)

        async def answer(texts):
            fail("run")
            answers = await runner(texts)
            return answers[1:] if failing == "too few answers" and len(runner.batches) == 1 else answers

        queue = TokenBatches(answer, 10, 100, on_batch=lambda texts, tokens: fail("on_batch"))
        (error,) = await queue.answer(texts(1))
        expected = "a batch of 1 texts got 0 answers" if failing == "too few answers" else failing
        assert isinstance(error, Exception) and str(error) == expected
        assert await queue.answer(texts(1, name=7)) == [7]
        assert queue.waiting_tokens == 0

    run(test)


def test_requests_take_turns():
    """A small request does not wait for all of a large request, and every text gets its own answer."""

    async def test():
        runner = Runner()
        queue = TokenBatches(runner, 4, 1000)
        large = asyncio.create_task(queue.answer([Tokens((), [number]) for number in range(40)]))
        await runner.begun.wait()
        small = asyncio.create_task(queue.answer(texts(1, 1, name=99)))
        await asyncio.sleep(0)
        for _ in range(3):
            runner.go.release()
        assert await small == [99, 99]
        assert not large.done()
        assert [len(batch) for batch in runner.batches[:3]] == [4, 4, 4] and runner.batches[2][:2] == [[99], [99]]
        for _ in range(20):
            runner.go.release()
        assert await large == list(range(40))

    run(test)


def test_one_that_goes_away_takes_its_texts_along():
    async def test():
        runner = Runner()
        queue = TokenBatches(runner, 4, 100)
        first = asyncio.create_task(queue.answer(texts(4)))
        await runner.begun.wait()
        gone, stays = (asyncio.create_task(queue.answer(texts(3, 3, name=name))) for name in (1, 2))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.wait([gone])
        assert gone.cancelled() and queue.waiting_tokens == 6
        for _ in range(3):
            runner.go.release()
        assert await first == [0] and await stays == [2, 2]
        assert [text[0] for batch in runner.batches for text in batch] == [0, 2, 2]

    run(test)


def test_one_that_goes_away_while_its_batch_runs():
    async def test():
        runner = Runner()
        queue = TokenBatches(runner, 4, 100)
        gone = asyncio.create_task(queue.answer(texts(2, 4)))
        await runner.begun.wait()
        gone.cancel()
        await asyncio.wait([gone])
        stays = asyncio.create_task(queue.answer(texts(1, name=5)))
        for _ in range(2):
            runner.go.release()
        assert await stays == [5]
        assert len(runner.batches) == 2 and queue.waiting_tokens == 0

    run(test)


def test_more_than_may_wait_is_refused():
    async def test():
        runner = Runner()
        queue = TokenBatches(runner, 4, 10)
        first = asyncio.create_task(queue.answer(texts(4)))
        await runner.begun.wait()
        # Accepted although it exceeds the limit, because nothing else waits.
        large = asyncio.create_task(queue.answer(texts(*[4] * 9, name=1)))
        await asyncio.sleep(0)
        with pytest.raises(RequestError, match="queue is full: 36 tokens wait, expected at most 10") as refused:
            await queue.answer(texts(1))
        assert refused.value.status == 429 and 1 <= refused.value.retry_after <= 60
        with pytest.raises(RequestError):
            queue.check()
        for _ in range(10):
            runner.go.release()
        assert await first == [0] and await large == [1] * 9
        queue.check(1000)

    run(test)


def test_a_batch_that_fails():
    async def test():
        async def fail(_):
            raise ValueError("wrong")

        queue = TokenBatches(fail, 4, 100)
        answers = await asyncio.gather(queue.answer(texts(1, 4)), queue.answer(texts(2)))
        assert [[str(one) for one in found] for found in answers] == [["wrong", "wrong"], ["wrong"]]
        assert await queue.answer([]) == []

    run(test)


def test_it_is_told_each_batch():
    async def test():
        told = []
        queue = TokenBatches(Runner(held=False), 4, 100, on_batch=lambda *counts: told.append(counts))
        await queue.answer(texts(1, 2, 3, 4))
        assert told == [(2, 3), (1, 3), (1, 4)]

    run(test)
