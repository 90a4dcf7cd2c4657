"""Settings of a server: its model's name, its key, and the limits on requests, which are untrusted input."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Limits:
    """The largest values that requests may have.

    Attributes:
        requests: Requests at a time; more get 429.
        body_bytes: Bytes of a body; larger ones get 413.
        body_seconds: Seconds in which a body must arrive; later ones get 408.
        send_seconds: Seconds in which a client must take an event of a stream; a slower client loses its connection.
        characters: Characters of a prompt, and of a prompt that a chat template makes.
        prompts: Prompts of one completions request.
        choices: Answers of one request, over all of its prompts.
        messages: Messages of a chat.
        tools: Tools of a chat.
        stop: Stop strings.
        stop_characters: Characters of a stop string.
        logprobs: The likeliest tokens at each token of an answer.
        logit_bias: Tokens in logit_bias.
        schema_bytes: Bytes of a JSON schema, or of the schemas of all tools.
        seconds: Seconds of a request, queueing included.
        texts: Texts of a request for embeddings or reranking; more get 413.
        text_characters: Characters of one of these texts; longer ones get 413.
        waiting_tokens: Tokens of texts that wait; requests above that get 429.
    """

    requests: int = 1024
    body_bytes: int = 4 << 20
    body_seconds: float = 60
    send_seconds: float = 60
    characters: int = 1 << 20
    prompts: int = 64
    choices: int = 64
    messages: int = 2048
    tools: int = 128
    stop: int = 16
    stop_characters: int = 256
    logprobs: int = 20
    logit_bias: int = 1024
    schema_bytes: int = 1 << 16
    seconds: float = 600
    texts: int = 2048
    text_characters: int = 20_000
    waiting_tokens: int = 32 * 1024


@dataclass(frozen=True)
class ServerSettings:
    """Settings of the application.

    Attributes:
        name: The model's name in answers. Requests may name any model, since there is only one.
        api_key: Requests must have it as a bearer token, except those to /health; None: requests need no key.
        limits: The limits on requests.
        allow_origins: Origins of web pages that may send requests from browsers; "*": all.
        keep_alive_seconds: After this time without an event, a stream gets a comment, so that proxies keep it open.
    """

    name: str
    api_key: str | None = None
    limits: Limits = field(default_factory=Limits)
    allow_origins: tuple[str, ...] = ()
    keep_alive_seconds: float = 15
