"""POST /tokenize and /detokenize, in vLLM's format."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .chat_completions import chat_tokens
from .fields import Fields, check_tokens
from .generation import Generator
from .http import json_response, read_body
from .settings import ServerSettings


async def tokenize(request: Request, generator: Generator, settings: ServerSettings) -> Response:
    """Return the tokens of a prompt, or of the messages of a chat."""
    body, limits = await read_body(request, settings.limits), settings.limits
    loop = asyncio.get_running_loop()
    shows = body.boolean("return_token_strs")
    if body.get("messages") is not None:
        ids = await chat_tokens(body, generator, limits)
    else:
        prompt = body.require("prompt", "a string, or messages")
        text = body.string("prompt", "", limits.characters)
        whole = body.boolean("add_special_tokens", True)
        ids = await loop.run_in_executor(generator.preparing, _encode, generator, text, whole) if prompt else ()
    said: dict[str, Any] = {"count": len(ids), "max_model_len": generator.engine.context, "tokens": ids}
    if shows:
        said["token_strs"] = await loop.run_in_executor(generator.preparing, _names, generator, ids)
    return await loop.run_in_executor(generator.preparing, json_response, said)


def _encode(generator: Generator, text: str, whole: bool) -> tuple[int, ...]:
    return generator.folder.encode(text, whole=whole)


def _names(generator: Generator, tokens: Sequence[int]) -> list[str | None]:
    name = generator.folder.tokenizer.id_to_token
    return [name(token) for token in tokens]


async def detokenize(request: Request, generator: Generator, settings: ServerSettings) -> Response:
    """Return the text of tokens, special tokens included."""
    body = await read_body(request, settings.limits)
    tokens = _tokens(body, generator)
    loop = asyncio.get_running_loop()
    text = await loop.run_in_executor(generator.preparing, _decode, generator, tokens)
    return json_response({"prompt": text})


def _tokens(body: Fields, generator: Generator) -> list[int]:
    vocabulary = generator.engine.model.vocabulary
    expected = f"an array of tokens from 0 to {vocabulary - 1}"
    body.require("tokens", expected)
    tokens = body.array("tokens", 1 << 20, expected)
    check_tokens("tokens", tokens, vocabulary)
    return tokens


def _decode(generator: Generator, tokens: list[int]) -> str:
    return generator.folder.tokenizer.decode(tokens, skip_special_tokens=False)
