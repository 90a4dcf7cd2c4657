"""Fields that completions and chats share, in OpenAI's format, and what becomes of them in the engine."""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..engine import Grammar, Request, SamplingOptions
from .errors import ApiError
from .fields import Fields
from .foreign_fields import sent_name
from .model_folder import ModelFolder
from .settings import Limits

_SEEDS = 1 << 63
_NAMED_CHARACTERS = 512  # of user and cache_salt, which are only compared


@dataclass(frozen=True)
class CommonOptions:
    """Options of a request that do not depend on its prompt.

    Attributes:
        max_tokens: The largest number of tokens of an answer; None: what the context has room for.
        sampling: How tokens are drawn.
        stop: Stop strings.
        end_tokens: Tokens that end an answer.
        n: Answers for each prompt.
        stream: Send the answer in pieces.
        include_usage: A stream ends with the numbers of tokens.
        client: Whose request this is, for fairness: the host, which a client cannot choose.
        user: For whom the client asks, by its own word.
        cache_salt: As for the engine's request.
        deadline: When the request ends, in seconds of time.monotonic().
    """

    max_tokens: int | None
    sampling: SamplingOptions
    stop: tuple[str, ...]
    end_tokens: frozenset[int]
    n: int
    stream: bool
    include_usage: bool
    client: str
    user: str
    cache_salt: str
    deadline: float

    def request(self, prompt: tuple[int, ...], context: int, grammar: Grammar | None = None) -> Request:
        """Return the engine's request for a prompt.

        Raises:
            ApiError: 400 if prompt and answer do not fit into the context.
        """
        room = context - len(prompt)
        if room < 1 or (self.max_tokens or 1) > room:
            wanted = f" and max_tokens of {self.max_tokens}" if self.max_tokens is not None else ""
            raise ApiError(
                400,
                f"prompt has {len(prompt)} tokens{wanted}, expected at most {context} together with the answer; "
                "shorten the prompt, or ask for a shorter answer",
                param="max_tokens" if room >= 1 else None,
                code="context_length_exceeded",
            )
        return Request(
            prompt,
            room if self.max_tokens is None else self.max_tokens,
            self.sampling,
            stop=self.stop,
            end_tokens=self.end_tokens,
            n=self.n,
            deadline=self.deadline,
            client=self.client,
            user=self.user,
            cache_salt=self.cache_salt,
            grammar=grammar,
        )


def read_common(
    fields: Fields, folder: ModelFolder, limits: Limits, host: str, *, max_tokens: int | None, logprobs: int | None
) -> CommonOptions:
    """Read the fields that completions and chats share.

    Args:
        fields: The body.
        folder: The model's folder, whose defaults apply to missing options.
        limits: The limits on requests.
        host: The client's address. Users of different hosts are different users, whatever `user` says.
        max_tokens: The default of max_tokens.
        logprobs: The number of likeliest tokens whose log probabilities are wanted; None: no log probabilities.

    Raises:
        ApiError: 400 for a wrong or unsupported value.
    """
    most = 1 << 31
    newest = fields.integer("max_completion_tokens", None, 1, most)
    stream = fields.boolean("stream")
    streaming = fields.fields("stream_options")
    user = fields.string("safety_identifier", None, _NAMED_CHARACTERS) or fields.string("user", None, _NAMED_CHARACTERS)
    return CommonOptions(
        newest if newest is not None else _max_tokens(fields, max_tokens, most),
        _sampling(fields, folder.sampling, limits, logprobs),
        _stop(fields, limits),
        frozenset() if fields.boolean("ignore_eos") else folder.end_tokens,
        fields.integer("n", 1, 1, limits.choices),
        stream,
        stream and streaming is not None and streaming.boolean("include_usage"),
        f"host {host}",
        user or "",
        _cache_salt(fields),
        time.monotonic() + limits.seconds,
    )


def _max_tokens(fields: Fields, default: int | None, most: int) -> int | None:
    name = sent_name(fields, "max_tokens")
    return None if fields.get(name) == -1 else fields.integer(name, default, 1, most)  # -1 is llama.cpp's default


def _cache_salt(fields: Fields) -> str:
    """Return the salt of cached prefixes: a new one, which no other request has, if cache_prompt is false."""
    salt = fields.string("cache_salt", "", _NAMED_CHARACTERS)
    return salt if fields.boolean("cache_prompt", True) else secrets.token_hex(16)


def _sampling(fields: Fields, defaults: Mapping[str, float], limits: Limits, logprobs: int | None) -> SamplingOptions:
    top_k = fields.integer("top_k", int(defaults.get("top_k", 0)), -1, 1 << 31)
    return SamplingOptions(
        temperature=fields.number("temperature", defaults.get("temperature", 1.0), 0, 2),
        top_p=fields.number("top_p", defaults.get("top_p", 1.0), 0, 1, above=True),
        top_k=max(top_k, 0),  # some clients send -1 for all tokens
        min_p=fields.number("min_p", defaults.get("min_p", 0.0), 0, 1),
        seed=fields.integer("seed", None, -_SEEDS, 2 * _SEEDS - 1),
        repetition_penalty=fields.number(
            sent_name(fields, "repetition_penalty"), defaults.get("repetition_penalty", 1.0), 0, 10, above=True
        ),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        logit_bias=_logit_bias(fields, limits),
        logprobs=logprobs,
    )


def _logit_bias(fields: Fields, limits: Limits) -> dict[int, float]:
    given = fields.fields("logit_bias")
    if given is None:
        return {}
    if len(given.given) > limits.logit_bias:
        raise ApiError(
            400,
            f"logit_bias has {len(given.given)} tokens, expected at most {limits.logit_bias}",
            param="logit_bias",
        )
    found = {}
    for name in given.given:
        if not (name.isascii() and name.isdecimal() and len(name) < 10):
            raise ApiError(400, f"logit_bias has the key {name[:20]!r}, expected a token's id", param="logit_bias")
        found[int(name)] = given.number(name, 0.0, -100, 100)
    return found


def _stop(fields: Fields, limits: Limits) -> tuple[str, ...]:
    value = fields.get("stop")
    found = [value] if isinstance(value, str) else fields.array("stop", limits.stop, "a string or an array of strings")
    for one in found:
        if not isinstance(one, str):
            raise fields.refuse("stop", "a string or an array of strings")
        if len(one) > limits.stop_characters:
            raise ApiError(
                400,
                f"stop has a string of {len(one)} characters, expected at most {limits.stop_characters}",
                param="stop",
            )
    return tuple(one for one in found if one)


def ends_in_time(reason: str | None) -> str | None:
    """Return OpenAI's name of a finish reason. An answer that its deadline ended was cut, like one that is too long."""
    return "length" if reason == "deadline" else reason


def usage(prompt: int, completion: int, cached: int) -> dict[str, Any]:
    """Return numbers of tokens in OpenAI's format."""
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
