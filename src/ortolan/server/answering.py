"""Responses from the outputs of the engine, for completions and chats."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response

from ..engine import Grammar, Output, TokenLogprobs
from ..errors import ArgumentError
from .errors import FAILED, ApiError, log_failure
from .generation import Answer, Generator
from .http import COMMENT, DONE, GONE, EventStream, event, json_response, unless_gone
from .request_options import CommonOptions, usage
from .settings import ServerSettings
from .token_texts import TokenTexts


class Choice(Protocol):
    """One answer, as its outputs arrive."""

    def chunk(self, output: Output) -> list[dict[str, Any]]:
        """Return what a stream says about an output: `choices` of OpenAI's chunks."""
        ...

    def add(self, output: Output) -> None:
        """Keep an output for `result`."""
        ...

    def result(self) -> dict[str, Any]:
        """Return the whole answer, an entry of `choices` in OpenAI's format."""
        ...


class Head:
    """The fields that all parts of a response repeat."""

    def __init__(self, prefix: str, kind: str, model: str) -> None:
        """Create a new response. prefix: of its id. kind: the field `object`."""
        self._prefix, self._kind, self._model = prefix, kind, model
        self._id, self._created = f"{prefix}-{secrets.token_hex(12)}", int(time.time())

    def fields(self, choices: Sequence[Any], **more: Any) -> dict[str, Any]:
        """Return a response, or a chunk of a stream."""
        head = {"id": self._id, "object": self._kind, "created": self._created, "model": self._model}
        return {**head, "choices": choices, **more}


class Tally:
    """Counts the tokens of a response."""

    def __init__(self, prompts: int) -> None:
        """Start with no tokens. prompts: the number of prompts."""
        self._prompts = [(0, 0)] * prompts
        self._completion = 0

    def count(self, prompt: int, output: Output) -> None:
        """Count the tokens of an output."""
        if output.index == 0:  # other choices find in the cache what the first one computed
            self._prompts[prompt] = (output.prompt_tokens, output.cached_tokens)
        self._completion += len(output.tokens)

    def usage(self) -> dict[str, Any]:
        """Return the numbers in OpenAI's format."""
        return usage(sum(one for one, _ in self._prompts), self._completion, sum(one for _, one in self._prompts))


def check_end(output: Output) -> None:
    """Raise the error with which an answer ended.

    Raises:
        ApiError: 400 if the grammar was too complex or allowed no token, 500 if the model failed, 503 if the server
            ended the answer, 504 if there was no time for a token.
    """
    if output.finish_reason == "error":
        reason = output.error or ""
        if output.error_kind == "request":
            raise ApiError(400, f"{reason}; simplify the schema or grammar")
        log_failure(reason)
        raise ApiError(500, FAILED)
    if output.finish_reason == "cancelled":
        raise ApiError(503, "the server ended this answer because it is shutting down; send the request again")
    if output.finish_reason == "deadline" and output.generated == 0:
        raise ApiError(504, "no token before the request's time limit; try again later", code="timeout")


async def merged(answers: Sequence[Answer], seconds: float | None) -> AsyncGenerator[list[tuple[int, Output]]]:
    """Yield the outputs of several answers as they arrive, each with the number of its answer.

    An empty list says that there was no output for some seconds.
    """
    if len(answers) == 1:
        async for outputs in answers[0].batches(seconds):
            yield [(0, output) for output in outputs]
        return
    arrived: asyncio.Queue[tuple[int, Output] | None] = asyncio.Queue()

    async def pass_on(number: int) -> None:
        try:
            async for outputs in answers[number].batches():
                for output in outputs:
                    arrived.put_nowait((number, output))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.ensure_future(pass_on(number)) for number in range(len(answers))]
    try:
        left = len(tasks)
        while left:
            try:
                async with asyncio.timeout(seconds):
                    found = await arrived.get()
            except TimeoutError:
                yield []
                continue
            if found is None:
                left -= 1
            else:
                yield [found]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def respond(
    request: Request,
    generator: Generator,
    settings: ServerSettings,
    options: CommonOptions,
    answers: Sequence[Answer],
    choices: Sequence[Sequence[Choice]],
    head: Head,
    first: Sequence[dict[str, Any]] = (),
) -> Response:
    """Return the response to a request whose answers were submitted, as a stream or as a whole.

    Args:
        request: The HTTP request. If its client disconnects, the answers are cancelled.
        generator: The bridge to the engine.
        settings: The server's settings.
        options: The request's options.
        answers: The answers.
        choices: The choices of each answer.
        head: The fields that all parts of the response repeat.
        first: Choices with which a stream begins.
    """

    def forget() -> None:
        generator.forget(answers)

    if options.stream:
        events = _streamed(answers, choices, head, options.include_usage, first, settings.keep_alive_seconds)
        return EventStream(events, forget, settings.limits.send_seconds)
    try:
        found = await unless_gone(request, _whole(answers, choices, head))
    finally:
        forget()
    return Response(status_code=GONE) if found is None else json_response(found)


async def _whole(answers: Sequence[Answer], choices: Sequence[Sequence[Choice]], head: Head) -> dict[str, Any]:
    """Return a response after its last token."""
    tally = Tally(len(answers))
    async with aclosing(merged(answers, None)) as arriving:
        async for outputs in arriving:
            for number, output in outputs:
                check_end(output)
                tally.count(number, output)
                choices[number][output.index].add(output)
    found = [choice.result() for of_answer in choices for choice in of_answer]
    return head.fields(found, usage=tally.usage())


async def _streamed(
    answers: Sequence[Answer],
    choices: Sequence[Sequence[Choice]],
    head: Head,
    include_usage: bool,
    first: Sequence[dict[str, Any]],
    keep_alive_seconds: float,
) -> AsyncGenerator[bytes]:
    """Yield the events of a response."""
    tally = Tally(len(answers))
    no_usage = {"usage": None} if include_usage else {}
    if first:
        yield b"".join(event(head.fields([one], **no_usage)) for one in first)
    async with aclosing(merged(answers, keep_alive_seconds)) as arriving:
        async for outputs in arriving:
            said = []
            for number, output in outputs:
                check_end(output)
                tally.count(number, output)
                said += [event(head.fields([one], **no_usage)) for one in choices[number][output.index].chunk(output)]
            if said or not outputs:
                yield b"".join(said) if said else COMMENT
    if include_usage:
        yield event(head.fields([], usage=tally.usage()))
    yield DONE


def chat_logprobs(texts: TokenTexts, found: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Return log probabilities in the format of chats."""

    def entry(token: int, logprob: float) -> dict[str, Any]:
        return {"token": texts.text(token), "logprob": logprob, "bytes": list(texts.bytes(token))}

    content = [
        {**entry(one.token, one.logprob), "top_logprobs": [entry(token, value) for token, value in one.top]}
        for one in found
    ]
    return {"content": content, "refusal": None}


async def compiled(generator: Generator, make_source: Callable[[], str], param: str) -> Grammar:
    """Return the state at the beginning of a grammar, made and compiled beside the event loop.

    Args:
        generator: The bridge to the engine.
        make_source: Returns the grammar.
        param: The field that asks for it.

    Raises:
        ApiError: 400 if the grammar cannot be compiled.
    """
    loop = asyncio.get_running_loop()
    try:
        return await loop.run_in_executor(generator.compiling, lambda: generator.compile(make_source()))
    except ArgumentError as error:
        reason = str(error).removeprefix("the grammar: ")
        raise ApiError(400, f"{param} cannot be compiled: {reason}", param=param) from None
