"""POST /v1/completions: answers to prompts without a chat template."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine import Output, TokenLogprobs
from .answering import Head, respond
from .errors import ApiError
from .fields import Fields, check_tokens, refuse
from .foreign_fields import refuse_foreign
from .generation import Generator
from .http import client_host, read_body
from .request_options import ends_in_time, read_common
from .settings import Limits, ServerSettings
from .structured import response_grammar
from .token_texts import TokenTexts

_MAX_TOKENS = 16  # OpenAI's default
_PROMPT = "a string, an array of strings, tokens, or an array of tokens"


async def complete(request: Request, generator: Generator, settings: ServerSettings) -> Response:
    """Answer a request."""
    body, limits = await read_body(request, settings.limits), settings.limits
    for name, neutral in (("echo", False), ("suffix", "")):
        body.refuse_unless(name, neutral, why="not supported")
    refuse_foreign(body, is_chat=False)
    logprobs = body.integer("logprobs", None, 0, limits.logprobs)
    options = read_common(
        body, generator.folder, limits, client_host(request), max_tokens=_MAX_TOKENS, logprobs=logprobs
    )
    body.refuse_unless("best_of", options.n, why="the server returns all answers that it computes")
    prompts = _prompts(body, limits, generator.engine.model.vocabulary)
    if len(prompts) * options.n > limits.choices:
        raise ApiError(
            400,
            f"n is {options.n} for {len(prompts)} prompts, expected at most {limits.choices} answers together",
            param="n",
        )
    generator.check_room(len(prompts) * options.n)
    grammar = await response_grammar(body, generator, limits)
    loop = asyncio.get_running_loop()
    tokens = await loop.run_in_executor(generator.preparing, _tokenized, generator, prompts)
    context = generator.engine.context
    answers = generator.submit([options.request(one, context, grammar) for one in tokens])
    choices = [
        [_Choice(number * options.n + index, generator.texts, logprobs) for index in range(options.n)]
        for number in range(len(prompts))
    ]
    head = Head("cmpl", "text_completion", settings.name)
    return await respond(request, generator, settings, options, answers, choices, head)


def _prompts(body: Fields, limits: Limits, vocabulary: int) -> list[str | list[int]]:
    """Return texts and tokens."""
    given = body.require("prompt", _PROMPT)
    if isinstance(given, str) or (isinstance(given, list) and given and type(given[0]) is int):
        given = [given]
    if not isinstance(given, list) or not given:
        raise body.refuse("prompt", _PROMPT)
    if len(given) > limits.prompts:
        raise ApiError(400, f"prompt has {len(given)} prompts, expected at most {limits.prompts}", param="prompt")
    for number, one in enumerate(given):
        if isinstance(one, str):
            if len(one) > limits.characters:
                raise ApiError(
                    400, f"prompt has {len(one)} characters, expected at most {limits.characters}", param="prompt"
                )
        elif not isinstance(one, list) or not one:
            raise refuse(f"prompt[{number}]", one, "a string, or tokens")
        else:
            check_tokens(f"prompt[{number}]", one, vocabulary)
    return given


def _tokenized(generator: Generator, prompts: list[str | list[int]]) -> list[tuple[int, ...]]:
    folder = generator.folder
    return [folder.encode(one, whole=True) if isinstance(one, str) else tuple(one) for one in prompts]


class _Choice:
    """One answer."""

    def __init__(self, index: int, texts: TokenTexts, logprobs: int | None) -> None:
        self._index, self._texts, self._logprobs = index, texts, logprobs
        self._offset = 0  # of the next token in the text, in characters
        self._pieces: list[str] = []
        self._found: list[TokenLogprobs] = []
        self._reason: str | None = None

    def _entry(self, text: str, found: tuple[TokenLogprobs, ...] | list[TokenLogprobs], reason: str | None) -> Any:
        logprobs = self._listed(found) if self._logprobs is not None else None
        return {"index": self._index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _listed(self, found: tuple[TokenLogprobs, ...] | list[TokenLogprobs]) -> dict[str, Any]:
        tokens = [self._texts.text(one.token) for one in found]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return {
            "tokens": tokens,
            "token_logprobs": [one.logprob for one in found],
            "top_logprobs": [{self._texts.text(token): value for token, value in one.top} for one in found],
            "text_offset": offsets,
        }

    def chunk(self, output: Output) -> list[dict[str, Any]]:
        reason = ends_in_time(output.finish_reason)
        found = output.logprobs or () if self._logprobs is not None else ()
        return [self._entry(output.text, found, reason)] if output.text or found or reason else []

    def add(self, output: Output) -> None:
        self._pieces.append(output.text)
        self._found += output.logprobs or ()
        self._reason = ends_in_time(output.finish_reason)

    def result(self) -> dict[str, Any]:
        entry: dict[str, Any] = self._entry("".join(self._pieces), self._found, self._reason)
        return entry
