"""The bridge between the event loop of the server and the engine's thread."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from ..engine import EngineClosedError, Grammar, Output, QueueFullError, Request
from ..errors import ArgumentError
from .errors import ApiError
from .model_folder import ModelFolder
from .token_texts import TokenTexts

if TYPE_CHECKING:
    from ..engine import Engine, Stream

_PREPARING_THREADS = 2  # render chat templates and tokenize, beside the event loop
_COMPILING_THREADS = 2  # of their own, because a schema may take seconds


class Answer:
    """The outputs of one request, in the event loop.

    Attributes:
        request: The engine's request.
    """

    def __init__(self, request: Request) -> None:
        """Create an answer without outputs."""
        self.request = request
        self._outputs: deque[Output] = deque()
        self._open = request.n
        self._news = asyncio.Event()
        self._stream: Stream | None = None

    def follow(self, stream: Stream) -> None:
        """Remember the stream, to cancel it."""
        self._stream = stream

    def put(self, output: Output) -> None:
        """Add an output. Only the bridge calls this, in the event loop."""
        self._outputs.append(output)
        self._news.set()

    def cancel(self) -> None:
        """End the request soon; its outputs then end with "cancelled"."""
        if self._stream is not None:
            self._stream.cancel()

    async def batches(self, seconds: float | None = None) -> AsyncGenerator[list[Output]]:
        """Yield the outputs, all that there are at a time; an empty list if there were none for some seconds."""
        while self._open:
            try:
                async with asyncio.timeout(seconds):
                    await self._news.wait()
            except TimeoutError:
                yield []
                continue
            self._news.clear()
            found = list(self._outputs)
            self._outputs.clear()
            self._open -= sum(output.finish_reason is not None for output in found)
            yield found


class Generator:
    """Submits requests of one event loop to an engine.

    Attributes:
        engine: The engine.
        folder: Tokenizer, chat template and defaults of its model.
        texts: Texts of single tokens, for log probabilities.
        compile: Compiles a grammar in llguidance's variant of Lark.
        preparing: Threads for work that would block the event loop.
        compiling: Threads that compile grammars.
    """

    def __init__(self, engine: Engine, folder: ModelFolder, compile_grammar: Callable[[str], Grammar]) -> None:
        """Wrap an engine.

        Args:
            engine: The engine.
            folder: What the server reads from the model's folder.
            compile_grammar: Compiles a grammar in llguidance's variant of Lark. It raises ArgumentError.
        """
        self.engine, self.folder, self.compile = engine, folder, compile_grammar
        self.texts = TokenTexts(folder.tokenizer)
        self.preparing = ThreadPoolExecutor(_PREPARING_THREADS, "ortolan-prepare")
        self.compiling = ThreadPoolExecutor(_COMPILING_THREADS, "ortolan-compile")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._outputs: deque[tuple[Answer, Output]] = deque()
        self._waking = False
        self._answers: set[Answer] = set()

    def start(self) -> None:
        """Deliver outputs in the running event loop."""
        self._loop = asyncio.get_running_loop()

    def submit(self, requests: list[Request]) -> list[Answer]:
        """Submit requests together: if one is refused, no request runs.

        Raises:
            ApiError: 400 if a request does not fit the model, 429 if the queue is full, 503 if the engine is closed.
        """
        answers: list[Answer] = []
        try:
            for request in requests:
                answers.append(self._submit(request))
        except BaseException as error:
            self.forget(answers)
            raise _refusal(error) from None
        return answers

    def check_room(self, sequences: int) -> None:
        """Check that a request would be queued now, before its prompt is prepared.

        Raises:
            ApiError: 429 if the queue is full, 503 if the engine is closed.
        """
        try:
            self.engine.check_room(sequences)
        except (QueueFullError, EngineClosedError) as error:
            raise _refusal(error) from None

    def _submit(self, request: Request) -> Answer:
        answer = Answer(request)
        stream = self.engine.submit(request)
        answer.follow(stream)
        self._answers.add(answer)

        def receive(output: Output) -> None:
            self._receive(answer, output)

        stream.on_output(receive)
        return answer

    def _receive(self, answer: Answer, output: Output) -> None:
        """Pass an output to the event loop, in the engine's thread. One wake-up serves all outputs of a step."""
        self._outputs.append((answer, output))
        if not self._waking:
            self._waking = True
            assert self._loop is not None
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        self._waking = False  # before the queue is read, so that no output is left without a wake-up
        while self._outputs:
            answer, output = self._outputs.popleft()
            answer.put(output)

    async def check(self) -> None:
        """Compute one token, before waiting requests. Raises RuntimeError if the model fails."""
        request = Request((self.folder.start,), 1, priority=-1, client="health check")
        try:
            (answer,) = self.submit([request])
        except ApiError as error:
            if error.status == 429:
                return
            raise
        try:
            async for outputs in answer.batches():
                if any(output.finish_reason == "error" for output in outputs):
                    raise RuntimeError(f"the model failed: {outputs[-1].error}")
        finally:
            self.forget([answer])

    def forget(self, answers: Sequence[Answer]) -> None:
        """Cancel what has not ended of answers that nobody reads any more."""
        for answer in answers:
            answer.cancel()
            self._answers.discard(answer)

    def cancel_all(self) -> None:
        """Cancel all requests, for the end of the server."""
        for answer in list(self._answers):
            answer.cancel()

    def close(self) -> None:
        """End the threads for preparing and compiling."""
        for pool in (self.preparing, self.compiling):
            pool.shutdown(wait=False, cancel_futures=True)


def _refusal(error: BaseException) -> BaseException:
    """Return the ApiError for an error of `Engine.submit`, or the error itself if it is another one."""
    if isinstance(error, QueueFullError):
        wait = max(math.ceil(error.retry_after), 1)
        return ApiError(429, str(error), code="queue_full", retry_after=wait)
    if isinstance(error, EngineClosedError):
        return ApiError(503, "the server is shutting down", retry_after=1)
    return ApiError(400, str(error)) if isinstance(error, ArgumentError) else error
