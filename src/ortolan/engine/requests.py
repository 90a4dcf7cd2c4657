"""Requests to the engine, and the events that it answers with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from ..errors import ArgumentError, OrtolanError, wrong_type

FinishReason = Literal["stop", "length", "cancelled", "deadline", "error"]
ErrorKind = Literal["request", "internal"]


class QueueFullError(OrtolanError):
    """The queue has no place for a request.

    Attributes:
        retry_after: The estimated seconds until there is a place.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class EngineClosedError(OrtolanError):
    """The engine is closed, or about to be, and takes no more requests."""


class Grammar(Protocol):
    """A state of structured output: which tokens may come next. The engine gives each choice its own copy."""

    @property
    def finished(self) -> bool:
        """True if the answer is complete and nothing may follow."""
        ...

    def mask(self) -> NDArray[np.uint32] | None:
        """Return the allowed tokens, uint32 [ceil(vocabulary / 32)], token t in bit t % 32; None: all tokens.

        Raises:
            ArgumentError: The grammar is too complex. Only this error counts as the request's fault.
        """
        ...

    def advance(self, token: int) -> None:
        """Change to the state after a token.

        Raises:
            ArgumentError: As for `mask`.
        """
        ...

    def copy(self) -> Grammar:
        """Return an independent copy of this state."""
        ...


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Options for drawing tokens from logits.

    They apply in this order: logit bias, grammar, penalties, temperature, top_k, top_p, min_p.

    Attributes:
        temperature: Divides the logits; 0 takes the likeliest token.
        top_k: Keep the k likeliest tokens; 0 keeps all.
        top_p: Keep the likeliest tokens whose probabilities add up to this.
        min_p: Keep tokens of at least this fraction of the highest probability.
        seed: Equal seeds give equal answers; None: each request draws its own.
        repetition_penalty: Divides positive logits of tokens of prompt and answer, and multiplies negative ones.
        presence_penalty: Subtracted from the logits of tokens that the answer contains.
        frequency_penalty: Subtracted from a token's logit once for each time that the answer contains the token.
        logit_bias: Added to the logits of these tokens.
        logprobs: None: no log probabilities; n: those of the drawn token and of the n likeliest.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _finite("temperature", self.temperature, 0, math.inf)
        _integer("top_k", self.top_k, 0)
        _finite("top_p", self.top_p, 0, 1)
        if self.top_p == 0:
            raise ArgumentError("top_p is 0, expected above 0 and at most 1; temperature=0 takes the likeliest token")
        _finite("min_p", self.min_p, 0, 1)
        if self.seed is not None:
            _integer("seed", self.seed)
        _finite("repetition_penalty", self.repetition_penalty, 0, math.inf)
        if self.repetition_penalty == 0:
            raise ArgumentError("repetition_penalty is 0, expected above 0; 1 does nothing")
        _finite("presence_penalty", self.presence_penalty, -math.inf, math.inf)
        _finite("frequency_penalty", self.frequency_penalty, -math.inf, math.inf)
        for token, bias in self.logit_bias.items():
            _integer("token of logit_bias", token, 0)
            _finite(f"logit_bias[{token}]", bias, -math.inf, math.inf)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0)


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and what is wanted of the answers to it.

    Attributes:
        prompt: Token ids.
        max_tokens: The most tokens of an answer; an answer also ends when the model's context is full.
        sampling: How tokens are drawn.
        stop: Strings that end an answer. The answer's text ends before them; its tokens include
            them. Needs a tokenizer.
        end_tokens: Tokens that end an answer. They count as tokens of the answer and are not part of its text.
        n: The number of answers, which are called choices.
        priority: Requests of lower numbers run first and take the memory of others.
        deadline: Seconds of time.monotonic() after which the request ends; None: never.
        client: Whose request this is. Requests of equal priority take turns between clients.
        user: For whom the client asks. The requests of a client take turns between its users.
        cache_salt: Requests with different salts share no prefixes, so that neither can tell what the other one sent.
        grammar: The state at the beginning of an answer, for structured output.
        skip_special_tokens: Leave special tokens out of the text.
    """

    prompt: tuple[int, ...]
    max_tokens: int
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    stop: tuple[str, ...] = ()
    end_tokens: frozenset[int] = frozenset()
    n: int = 1
    priority: int = 0
    deadline: float | None = None
    client: str = ""
    user: str = ""
    cache_salt: str = ""
    grammar: Grammar | None = None
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _set(self, "prompt", _token_tuple("prompt", self.prompt))
        if not self.prompt:
            raise ArgumentError("prompt is empty, expected at least one token; begin with the model's bos token")
        _set(self, "end_tokens", frozenset(_token_tuple("end_tokens", self.end_tokens)))
        _integer("max_tokens", self.max_tokens, 1)
        _integer("n", self.n, 1)
        _integer("priority", self.priority)
        if isinstance(self.stop, str):
            raise wrong_type("stop", self.stop, "a sequence of strings")
        _set(self, "stop", tuple(self.stop))
        for text in self.stop:
            if not isinstance(text, str):
                raise wrong_type("stop string", text, "a str")
            if not text:
                raise ArgumentError("stop contains an empty string, expected at least one character")
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise ArgumentError(f"deadline is {self.deadline}, expected seconds of time.monotonic(), or None")


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log probabilities at one token of an answer, of the model's logits before any option applies.

    Attributes:
        token: The token of the answer.
        logprob: Its log probability.
        top: The likeliest tokens with their log probabilities, likeliest first.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Output:
    """An event of one choice.

    Attributes:
        index: The choice, from 0.
        tokens: New tokens, end tokens included.
        text: New text. It lags behind the tokens while a character is incomplete or a stop string may follow. Empty
            without a tokenizer.
        logprobs: One for each new token, if asked for.
        finish_reason: None: more follows. "stop": an end token, a stop string or the end of the grammar. "length":
            `max_tokens` or the model's context.
        error: What went wrong, with the reason "error".
        error_kind: With the reason "error". "request": the request's grammar is too complex or allows no token, and the
            same request would fail again. "internal": the model, the sampler or the engine failed.
        cached_tokens: Tokens of the prompt that came from the prefix cache. Choices after the first find there what the
            first one computed.
        prompt_tokens: Tokens of the prompt.
        generated: Tokens of this choice so far.
    """

    index: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: FinishReason | None
    error: str | None
    error_kind: ErrorKind | None
    cached_tokens: int
    prompt_tokens: int
    generated: int


def _set(target: object, name: str, value: object) -> None:
    object.__setattr__(target, name, value)


def _finite(name: str, value: float, least: float, most: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)):
        raise wrong_type(name, value, "a number")
    if not math.isfinite(value) or not least <= value <= most:
        bounds = "a finite number" if least == -math.inf else f"at least {least}"
        raise ArgumentError(f"{name} is {value}, expected {bounds}{f' and at most {most}' if most < math.inf else ''}")


def _integer(name: str, value: Any, least: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise wrong_type(name, value, "an integer")
    if least is not None and value < least:
        raise ArgumentError(f"{name} is {value}, expected at least {least}")


def _token_tuple(name: str, tokens: Iterable[int]) -> tuple[int, ...]:
    values = np.array(list(tokens))
    if values.size == 0:
        return ()
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ArgumentError(f"{name} has elements that are not integers, expected token ids")
    if values.min() < 0:
        raise ArgumentError(f"{name} contains {values.min()}, expected token ids of at least 0")
    result: list[int] = values.tolist()
    return tuple(result)
