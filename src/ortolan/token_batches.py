"""Texts of all requests at hand in batches by tokens: while one batch runs, the next one collects."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from .engines import RequestError
from .errors import OrtolanError
from .text_encoder import Budget, Tokens

_SLOWEST, _LONGEST_WAIT = 1.0, 60.0  # tokens a second; seconds that a client is told to wait at most
_RECENT = 0.2  # share of the last batch in what is known of the speed


@dataclass(eq=False)
class _Request:
    """waiting: texts that are in no batch yet, with their places among the answers. open: how many have no answer."""

    waiting: deque[tuple[int, Tokens]]
    answers: list[Any]
    open: int
    done: asyncio.Future[list[Any]]


class TokenBatches:
    """A queue before a function that answers batches, of one event loop. Requests come one after the other; one of more
    than a batch lets others go first after each, so that a small one does not wait for all of a large one. A batch
    begins as soon as the one before it has ended, with what is there by then: nobody waits for others while there is
    nothing to do."""

    def __init__(
        self,
        run: Callable[[list[Tokens]], Awaitable[Sequence[Any]]],
        batch_tokens: int,
        max_waiting_tokens: int,
        pads: bool = False,
        length: int = 0,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> None:
        """run: answers each text of a batch; an answer may be an exception. batch_tokens, pads, length: see Budget.
        max_waiting_tokens: of all requests that are in no batch; more are refused, but for a request that finds nobody
        waiting. on_batch: is called with the texts and tokens of each batch that begins."""
        self._run, self._batch_tokens, self._pads, self._length = run, batch_tokens, pads, length
        self._most, self._on_batch = max_waiting_tokens, on_batch
        self._requests: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._speed = 0.0  # tokens a second
        self.waiting_tokens = 0

    def check(self, tokens: int = 1) -> None:
        """Raises RequestError 429, with the seconds after which there should be room, where there is none for so many
        tokens."""
        over = self.waiting_tokens + tokens - self._most
        if self.waiting_tokens == 0 or over <= 0:
            return
        wait = min(math.ceil(over / max(self._speed, _SLOWEST)), int(_LONGEST_WAIT))
        raise RequestError(
            429,
            f"{self.waiting_tokens} tokens wait already, expected at most {self._most} with this request; try again in "
            f"{wait} s",
            retry_after=wait,
        )

    async def answer(self, texts: Sequence[Tokens]) -> list[Any]:
        """An answer or an exception for each text, in order. Where its caller is cancelled, its texts that are in no
        batch yet leave. Raises RequestError: see check."""
        tokens = sum(map(len, texts))
        self.check(tokens)
        if not texts:
            return []
        request = _Request(
            deque(enumerate(texts)), [None] * len(texts), len(texts), asyncio.get_running_loop().create_future()
        )
        self._requests.append(request)
        self.waiting_tokens += tokens
        if self._worker is None or self._worker.done():
            self._worker = asyncio.create_task(self._work())
        try:
            return await request.done
        finally:
            self.waiting_tokens -= sum(len(text) for _, text in request.waiting)
            request.waiting.clear()  # _take passes over it

    async def _work(self) -> None:
        while batch := self._take():
            texts = [text for _, _, text in batch]
            tokens = sum(map(len, texts))
            begun = time.monotonic()
            # Any failure goes to each request of the batch. This task must not end, since it serves all requests.
            try:
                if self._on_batch is not None:
                    self._on_batch(len(texts), tokens)
                answers = await self._run(texts)
                if len(answers) != len(texts):
                    raise OrtolanError(f"a batch of {len(texts)} texts got {len(answers)} answers")
            except Exception as error:
                answers = [error] * len(texts)
            speed = tokens / max(time.monotonic() - begun, 1e-6)
            self._speed += (speed - self._speed) * (_RECENT if self._speed else 1.0)
            for (request, place, _), answer in zip(batch, answers, strict=True):
                request.answers[place] = answer
                request.open -= 1
                if request.open == 0 and not request.done.done():
                    request.done.set_result(request.answers)

    def _take(self) -> list[tuple[_Request, int, Tokens]]:
        """The next batch; empty where nobody waits."""
        batch: list[tuple[_Request, int, Tokens]] = []
        budget = Budget(self._batch_tokens, self._pads, self._length)
        while self._requests:
            request = self._requests[0]
            taken = len(batch)
            while request.waiting and budget.takes(request.waiting[0][1]):
                place, text = request.waiting.popleft()
                budget.add(text)
                batch.append((request, place, text))
            if request.waiting:  # the batch is full
                self._requests.rotate(-1 if len(batch) > taken else 0)
                break
            self._requests.popleft()
        self.waiting_tokens -= budget.tokens
        return batch
