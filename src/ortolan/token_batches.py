"""Batches of texts from several requests: while one batch runs, the next one is collected."""

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
from .text_encoder import TokenBudget
from .tokens import Tokens

_SLOWEST, _LONGEST_WAIT = 1.0, 60.0  # lowest estimate of tokens per second; longest Retry-After in seconds
_RECENT = 0.2  # weight of the latest batch in the running estimate of the speed


@dataclass(eq=False)
class _Request:
    """A request.

    Attributes:
        waiting: Texts that are not yet in a batch, with the positions of their answers.
        answers: The answers so far.
        open: The number of missing answers.
        done: Set when all answers are known.
    """

    waiting: deque[tuple[int, Tokens]]
    answers: list[Any]
    open: int
    done: asyncio.Future[list[Any]]


class TokenBatches:
    """A queue, in one event loop, for a function that answers batches.

    A batch starts as soon as the previous one has ended, with the texts that wait at that time. Requests are served in
    order, but a request that is larger than a batch goes to the end of the queue after each batch, so that small
    requests do not wait for all of it.

    Attributes:
        waiting_tokens: Tokens of all texts that are not yet in a batch.
    """

    def __init__(
        self,
        run: Callable[[list[Tokens]], Awaitable[Sequence[Any]]],
        batch_tokens: int,
        max_waiting_tokens: int,
        pads: bool = False,
        length: int = 0,
        on_batch: Callable[[int, int], None] | None = None,
    ) -> None:
        """Create an empty queue.

        Args:
            run: Answers each text of a batch; an answer may be an exception.
            batch_tokens: As for `TokenBudget`.
            max_waiting_tokens: The limit on waiting tokens. Requests above it are refused, unless no request waits.
            pads: As for `TokenBudget`.
            length: As for `TokenBudget`.
            on_batch: Called with the number of texts and tokens of each batch when it starts.
        """
        self._run, self._batch_tokens, self._pads, self._length = run, batch_tokens, pads, length
        self._most, self._on_batch = max_waiting_tokens, on_batch
        self._requests: deque[_Request] = deque()
        self._worker: asyncio.Task[None] | None = None
        self._speed = 0.0  # tokens a second
        self.waiting_tokens = 0

    def check(self, tokens: int = 1) -> None:
        """Raise RequestError (429) with the expected waiting time if there is no room for more tokens."""
        over = self.waiting_tokens + tokens - self._most
        if self.waiting_tokens == 0 or over <= 0:
            return
        wait = min(math.ceil(over / max(self._speed, _SLOWEST)), int(_LONGEST_WAIT))
        raise RequestError(
            429,
            f"queue is full: {self.waiting_tokens} tokens wait, expected at most {self._most} with this request; try "
            f"again in {wait} s",
            retry_after=wait,
        )

    async def answer(self, texts: Sequence[Tokens]) -> list[Any]:
        """Return an answer or an exception for each text, in order.

        If the caller is cancelled, its texts that are not yet in a batch are removed.

        Raises:
            RequestError: 429 if there is no room, as for `check`.
        """
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
            request.waiting.clear()  # so that _take skips the request

    async def _work(self) -> None:
        while batch := self._take():
            texts = [text for _, _, text in batch]
            tokens = sum(map(len, texts))
            begun = time.monotonic()
            # If the batch fails, the exception is the answer to each of its texts. This task must not end, because it
            # serves all requests.
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
            for (request, position, _), answer in zip(batch, answers, strict=True):
                request.answers[position] = answer
                request.open -= 1
                if request.open == 0 and not request.done.done():
                    request.done.set_result(request.answers)

    def _take(self) -> list[tuple[_Request, int, Tokens]]:
        """Return the next batch; empty if no request waits."""
        batch: list[tuple[_Request, int, Tokens]] = []
        budget = TokenBudget(self._batch_tokens, self._pads, self._length)
        while self._requests:
            request = self._requests[0]
            taken = len(batch)
            while request.waiting and budget.takes(request.waiting[0][1]):
                position, text = request.waiting.popleft()
                budget.add(text)
                batch.append((request, position, text))
            if request.waiting:  # texts remain because the batch is full
                self._requests.rotate(-1 if len(batch) > taken else 0)
                break
            self._requests.popleft()
        self.waiting_tokens -= budget.tokens
        return batch
