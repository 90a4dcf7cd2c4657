"""The application: routes of an OpenAI-compatible server for a decoder, an encoder, or both."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ..engines import EncoderEngine, RequestError
from ..session import package_versions
from .chat_completions import chat
from .completions import complete
from .encoders import Encoders
from .errors import ApiError
from .gate import Drain, Gate
from .generation import Generator
from .http import error_response, json_response
from .metrics import CONTENT_TYPE, Metrics
from .token_routes import detokenize, tokenize

if TYPE_CHECKING:
    from .settings import ServerSettings

_WITHOUT_VERSION = ("/chat/completions", "/completions", "/embeddings", "/models")  # of a wrong base_url
_Handler = Callable[[Request], Awaitable[Response]]


class Application:
    """The server's parts below HTTP, and its routes.

    Attributes:
        asgi: The Starlette application.
        drain: The requests that have not ended.
        sizes: The sizes of a decoder's context and cache, for people; empty without a decoder.
    """

    def __init__(
        self,
        settings: ServerSettings,
        generator: Generator | None = None,
        encoder: EncoderEngine | None = None,
        encoder_name: str | None = None,
    ) -> None:
        """Create an application.

        Args:
            settings: Settings.
            generator: The bridge to the engine of a decoder, for completions and chats.
            encoder: An embedding model or a reranker.
            encoder_name: Its name in answers. Default: the name in the settings.
        """
        self.drain = Drain()
        self.sizes = ""
        self._settings, self._generator, self._created = settings, generator, int(time.time())
        self._metrics = Metrics(None if generator is None else generator.engine.stats)
        self._encoder_name = encoder_name or settings.name
        self._encoders = None
        if encoder is not None:
            self._encoders = Encoders(encoder, self._encoder_name, settings.limits, self._metrics.add_encoder())
        self._kind = "" if encoder is None else encoder.encoder.kind
        routes = self._routes()
        middleware = [Middleware(Gate, settings, self._metrics, self.drain, [route.path for route in routes])]
        if settings.allow_origins:
            middleware.insert(0, _cross_origin(settings.allow_origins))
        self.asgi = Starlette(
            routes=routes,
            middleware=middleware,
            exception_handlers={RequestError: _refuse, HTTPException: _refuse_route},
            lifespan=self._lifespan,
        )
        self.asgi.router.redirect_slashes = False

    def _routes(self) -> list[Route]:
        def post(path: str, handler: _Handler) -> Route:
            return Route(path, handler, methods=["POST"])

        return [
            post("/v1/chat/completions", self._generating(chat)),
            post("/v1/completions", self._generating(complete)),
            post("/tokenize", self._generating(tokenize)),
            post("/detokenize", self._generating(detokenize)),
            post("/v1/embeddings", self._embed),
            post("/rerank", self._rerank),
            post("/v1/rerank", self._rerank),
            Route("/v1/models", self._models),
            Route("/v1/models/{name:path}", self._model),
            Route("/health", self._health),
            Route("/metrics", self._metrics_page),
        ]

    def cancel_all(self) -> None:
        """Cancel all answers, for the end of the server."""
        if self._generator is not None:
            self._generator.cancel_all()

    @asynccontextmanager
    async def _lifespan(self, _: Starlette) -> AsyncGenerator[None]:
        self.open()
        try:
            yield
        finally:
            self.close()

    def open(self) -> None:
        """Answer requests in the running event loop. Servers that know ASGI's lifespan do so themselves."""
        if self._generator is not None:
            self._generator.start()

    async def check(self) -> None:
        """Compute one token and one text, and raise the error if that fails. A full queue is no failure."""
        if self._generator is not None:
            await self._generator.check()
        if self._encoders is not None:
            await self._encoders.check()

    def close(self) -> None:
        """Cancel all answers, and end the threads beside the event loop."""
        self.cancel_all()
        if self._generator is not None:
            self._generator.close()
        if self._encoders is not None:
            self._encoders.close()

    def _generating(self, handler: Callable[[Request, Generator, ServerSettings], Awaitable[Response]]) -> _Handler:
        async def handle(request: Request) -> Response:
            if self._generator is None:
                raise ApiError(404, "this server has no decoder; it embeds or ranks texts: see /v1/models")
            return await handler(request, self._generator, self._settings)

        return handle

    def _encoder(self, kind: str, does: str) -> Encoders:
        if self._encoders is None or self._kind != kind:
            raise ApiError(404, f"this server has no model that {does}: see /v1/models")
        return self._encoders

    async def _embed(self, request: Request) -> Response:
        return await self._encoder("embedding", "embeds texts").embed(request)

    async def _rerank(self, request: Request) -> Response:
        return await self._encoder("reranker", "ranks texts").rerank(request)

    def _listed(self) -> list[dict[str, Any]]:
        def entry(name: str, **more: Any) -> dict[str, Any]:
            return {"id": name, "object": "model", "created": self._created, "owned_by": "ortolan", **more}

        found = []
        if self._generator is not None:
            found.append(entry(self._settings.name, max_model_len=self._generator.engine.context))
        if self._encoders is not None:
            found.append(entry(self._encoder_name))
        return found

    async def _models(self, _: Request) -> Response:
        return json_response({"object": "list", "data": self._listed()})

    async def _model(self, request: Request) -> Response:
        name = request.path_params["name"]
        for one in self._listed():
            if one["id"] == name:
                return json_response(one)
        raise ApiError(404, f"model {name[:200]!r} is not served here: see /v1/models", code="model_not_found")

    async def _health(self, _: Request) -> Response:
        said = {"status": "draining" if self.drain.begun else "ok", "model": self._settings.name}
        return json_response({**said, "versions": package_versions()}, 503 if self.drain.begun else 200)

    async def _metrics_page(self, _: Request) -> Response:
        return Response(self._metrics.page(), media_type=CONTENT_TYPE)


def _cross_origin(origins: tuple[str, ...]) -> Middleware:
    """Let web pages of these origins send requests. In front of the gate: browsers ask first, and without the key."""
    return Middleware(
        CORSMiddleware,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


async def _refuse(_: Request, error: Exception) -> Response:
    assert isinstance(error, RequestError)
    return error_response(error)


async def _refuse_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path, advice = request.url.path, ""
    if error.status_code == 404 and path in _WITHOUT_VERSION:
        advice = "; base_url must end with /v1"
    elif error.status_code == 404:
        advice = f"; this server has {', '.join(sorted({route.path for route in request.app.routes}))}"
    elif error.headers and "Allow" in error.headers:
        advice = f"; expected {error.headers['Allow']}"
    found = ApiError(error.status_code, f"{request.method} {path[:200]}: {error.detail}{advice}")
    response = error_response(found)
    response.headers.update(error.headers or {})
    return response
