"""The application under Ray Serve, on several machines, with prefix-aware routing.

    serve run ortolan.server.ray_app:application model=/models/small replicas=4

Ray Serve starts, restarts and scales the replicas. A router sends requests that begin alike, such as the turns of one
conversation, to the same replica, whose prefix cache knows the beginning, unless that replica is full.
"""

# No `from __future__ import annotations`: `serve run` reads the type of the argument of `application`.

import asyncio
import contextlib
import hashlib
import logging
import os
from collections.abc import AsyncGenerator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from ..errors import OrtolanError
from .errors import ApiError, error_body
from .fields import parse_object
from .settings import Limits

try:
    import orjson
    from pydantic import BaseModel, ConfigDict, PositiveInt
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve import Application
    from ray.serve.exceptions import BackPressureError
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import Message, Receive, Scope, Send

    from ..engine.model import CacheType
    from .http import DONE, error_response, event, read_content
    from .run import ServeOptions, model_name, open_application, prepare_draft_model, prepare_model
    from .start_checks import check_engine_options, check_server_options
except ImportError as error:
    raise OrtolanError(f"this needs Ray Serve ({error}); install it with: pip install 'ortolan[ray]'") from error

_log = logging.getLogger("ray.serve")
_SHUTDOWN_SECONDS = 30.0
_PREFIXES = 512  # beginnings of requests that the router remembers for each replica
_PREFIX_LENGTH = 1024  # characters or tokens of a prompt that is not a chat
_ATTEMPTS = 3  # replicas that are tried, if they die before they answer
_SCOPE = ("type", "asgi", "http_version", "method", "path", "query_string", "headers", "client", "scheme")
_LOST = "the replica with this answer died; send the request again"


class RayConfig(BaseModel):
    """Settings of the application. Values may be strings, as `serve run` passes them.

    Attributes:
        model: A GGUF file, or a folder as for `ortolan serve`, with the same path on every machine.
        name: The model's name in answers. Default: the folder's or the file's.
        replicas: The number of replicas.
        min_replicas: The smallest number of replicas, if Ray Serve scales them.
        max_replicas: The largest number of replicas, if Ray Serve scales them.
        routers: The number of routers, which parse requests and relay answers.
        threads: ONNX Runtime's threads of each replica, and the CPUs that Ray counts for it.
        context: The most tokens of a prompt and its answer. Default: the model's limit.
        cache_bytes: The size of each replica's KV cache. Default: PagedModel's, so that replicas on one machine share
            its memory only if you set this.
        cache_type: The type of keys and values in the KV cache: bfloat16 or int8, see PagedModel.
        share_weights: Share the memory of the weights among replicas on one machine. False: each has its own copy in
            huge pages, where decoding is faster, see PagedModel.
        max_step_tokens: The most tokens of a call of the model.
        max_sequences: The most answers that run at the same time in a replica.
        speculate: "lookup" or "off", see `ServeOptions`.
        draft_model: As in ServeOptions, with the same path on every machine.
        max_seconds: The longest time of a request, waiting included.
        max_queued: Requests that wait in a router; more get 429.
        encoder: An embedding model or a reranker that each replica serves too.
        tool_calls: The form of tool calls. Default: from the chat template.
        chat_template: A Jinja file that replaces the model's chat template, with the same path on every machine.
        allow_origins: Origins of web pages that may send requests from browsers.
        api_key: The key that requests must have. Default: ORTOLAN_API_KEY in the environment of the replicas.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    name: str | None = None
    replicas: PositiveInt = 1
    min_replicas: PositiveInt | None = None
    max_replicas: PositiveInt | None = None
    routers: PositiveInt = 1
    threads: PositiveInt = 1
    context: PositiveInt | None = None
    cache_bytes: PositiveInt | None = None
    cache_type: CacheType = "bfloat16"
    share_weights: bool = True
    max_step_tokens: PositiveInt = 512
    max_sequences: PositiveInt = 64
    speculate: Literal["lookup", "off"] = "lookup"
    draft_model: str | None = None
    max_seconds: float = 600
    max_queued: PositiveInt = 1000
    encoder: str | None = None
    tool_calls: str | None = None
    chat_template: str | None = None
    allow_origins: list[str] = []
    api_key: str | None = None

    def options(self) -> ServeOptions:
        """Return the options of each replica."""
        return ServeOptions(
            name=self.name or model_name(Path(self.model)),
            threads=self.threads,
            context=self.context,
            cache_bytes=self.cache_bytes,
            cache_type=self.cache_type,
            share_weights=self.share_weights,
            max_step_tokens=self.max_step_tokens,
            max_sequences=self.max_sequences,
            speculate=self.speculate,
            draft_model=None if self.draft_model is None else Path(self.draft_model),
            encoder=None if self.encoder is None else Path(self.encoder),
            tool_calls=self.tool_calls,
            chat_template=None if self.chat_template is None else Path(self.chat_template),
            allow_origins=tuple(self.allow_origins),
            api_key=self.api_key or os.environ.get("ORTOLAN_API_KEY"),
            limits=Limits(seconds=self.max_seconds),
        )


def application(config: RayConfig) -> Application:
    """Return the application for `serve run`."""
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.min_replicas is not None or config.max_replicas is not None:
        least = config.min_replicas or 1
        most = config.max_replicas or max(least, config.replicas)
        scale = {"autoscaling_config": {"min_replicas": least, "max_replicas": most}}
    # A replica that has twice the sequences it can run is full, and the router prefers others.
    full = 2 * config.max_sequences
    servers = Server.options(  # type: ignore[attr-defined]
        **scale,
        max_ongoing_requests=full,
        max_queued_requests=config.max_queued,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": config.threads},
    ).bind(config.model_dump())
    most_waiting = config.max_queued + full * (config.max_replicas or config.replicas)
    bound: Application = Router.options(  # type: ignore[attr-defined]
        num_replicas=config.routers,
        max_ongoing_requests=most_waiting,
        graceful_shutdown_timeout_s=_SHUTDOWN_SECONDS,
        ray_actor_options={"num_cpus": 0.1},
    ).bind(servers)
    return bound


def prefix_key(path: str, content: bytes) -> str:
    """Return a key that requests share if they begin alike; empty for requests without a prompt.

    The turns of a conversation share its system message, tools and first user message. That spreads conversations with
    one system message over the replicas; each replica then keeps the system message once.
    """
    try:
        body = parse_object(content)
    except ApiError:
        return ""
    if path.endswith("/chat/completions"):
        messages = body.get("messages")
        if not isinstance(messages, list):
            return ""
        users = [number for number, one in enumerate(messages) if isinstance(one, dict) and one.get("role") == "user"]
        beginning: Any = [body.get("cache_salt"), body.get("tools"), messages[: users[0] + 1 if users else 1]]
    elif path.endswith("/completions"):
        prompt = body.get("prompt")
        prompt = prompt[0] if isinstance(prompt, list) and prompt and isinstance(prompt[0], str | list) else prompt
        if not isinstance(prompt, str | list):
            return ""
        beginning = [body.get("cache_salt"), prompt[:_PREFIX_LENGTH]]
    else:
        return ""
    return hashlib.blake2b(orjson.dumps(beginning), digest_size=12).hexdigest()


@serve.deployment
class Server:
    """A replica: the application of `ortolan serve`, which gets requests from a router instead of a socket."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Open the model."""
        self._stack = ExitStack()
        read = RayConfig(**config)
        check_server_options(read.options())
        check_engine_options(Path(read.model), read.options())
        prepared = prepare_model(Path(read.model))
        options = prepare_draft_model(read.options())
        self._application = self._stack.enter_context(open_application(prepared, options))
        self._opened = False

    def _open(self) -> None:
        """Answer requests in the event loop that calls this, which is always the same."""
        if not self._opened:
            self._application.open()
            self._opened = True

    @serve.multiplexed(max_num_models_per_replica=_PREFIXES)
    async def _remember(self, prefix: str) -> str:
        """Let the router know that this replica has seen a beginning."""
        return prefix

    async def answer(self, scope: dict[str, Any], content: bytes) -> AsyncGenerator[Message]:
        """Yield the ASGI messages of an answer. If the caller stops early, the answer is cancelled."""
        self._open()
        if prefix := serve.get_multiplexed_model_id():
            await self._remember(prefix)
        sent: asyncio.Queue[Message | None] = asyncio.Queue()
        received = [{"type": "http.request", "body": content, "more_body": False}]

        async def receive() -> Message:
            if received:
                return received.pop()
            await asyncio.Event().wait()  # the caller cancels this task if the client disconnects
            raise AssertionError

        work = asyncio.ensure_future(self._application.asgi(scope, receive, sent.put))
        work.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            work.result()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def check_health(self) -> None:
        """Run a request that needs the model. Ray Serve calls this regularly and replaces a replica that fails."""
        self._open()
        await self._application.check()

    def __del__(self) -> None:
        self._stack.close()


@serve.deployment
class Router:
    """Sends each request to a replica, and relays the answer."""

    def __init__(self, servers: DeploymentHandle) -> None:
        """Create a router to replicas of Server."""
        self._servers = servers
        self._limits = Limits()

    async def __call__(self, request: Request) -> Response:
        """Answer a request."""
        try:
            content = await read_content(request, self._limits)
        except ApiError as error:
            return error_response(error)
        scope = {name: request.scope[name] for name in _SCOPE if name in request.scope}
        # Without the application's route_prefix, because the replica's application knows its own paths.
        scope["path"] = scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        prefix = prefix_key(scope["path"], content) if request.method == "POST" else ""
        handle = self._servers.options(stream=True, multiplexed_model_id=prefix)
        for _ in range(_ATTEMPTS):
            messages = handle.answer.remote(scope, content)
            try:
                return _Relayed(await anext(messages), messages)
            except BackPressureError:
                return error_response(ApiError(429, "all replicas are busy; try again later", retry_after=1))
            except RayError:
                _log.exception("a replica died before it answered")
            except asyncio.CancelledError:
                messages.cancel()
                raise
        return error_response(ApiError(503, _LOST, retry_after=1))


class _Relayed(Response):
    """The answer of a replica."""

    def __init__(self, start: Message, messages: Any) -> None:
        super().__init__(status_code=start["status"])
        self._start, self._messages = start, messages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send(self._start)
            async for message in self._messages:
                await send(message)
        except RayError:
            _log.exception("a replica died while it answered")
            if not any(value.startswith(b"text/event-stream") for _, value in self._start["headers"]):
                raise
            last = event(error_body(ApiError(503, _LOST))) + DONE
            await send({"type": "http.response.body", "body": last, "more_body": False})
        finally:
            with contextlib.suppress(Exception):
                self._messages.cancel()
