"""The gate of every request: its id, the API key, the limit on requests at a time, metrics, and the server's end."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Callable, Collection
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import FAILED, REQUEST_ID, ApiError, log_failure
from .http import error_response
from .metrics import Metrics
from .settings import ServerSettings

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_OPEN_PATHS = ("/health",)  # without a key, for load balancers
_DRAINING_PATHS = ("/health", "/metrics")  # answered until the server ends


class Drain:
    """Counts the requests that have not ended, and waits for them at the end of the server.

    Attributes:
        active: The number of requests.
        begun: The server takes no more requests.
    """

    def __init__(self) -> None:
        """Start without requests."""
        self.active, self.begun = 0, False

    async def wait(self, seconds: float, hurried: Callable[[], bool] = lambda: False) -> bool:
        """Return True when no request is active; False after some seconds, or when `hurried` returns True."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while self.active:
            if loop.time() >= end or hurried():
                return False
            await asyncio.sleep(0.05)
        return True


class Gate:
    """An ASGI application around another one."""

    def __init__(
        self, app: ASGIApp, settings: ServerSettings, metrics: Metrics, drain: Drain, paths: Collection[str]
    ) -> None:
        """Wrap an application. paths: the paths that metrics name; all other paths share one name."""
        self._app, self._settings, self._metrics, self._drain = app, settings, metrics, drain
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        path = scope["path"]
        sent = _Sent(send, _request_id(scope))
        REQUEST_ID.set(sent.request_id)
        counted = path not in _DRAINING_PATHS
        if counted:
            self._drain.active += 1
            self._metrics.active.inc()
        try:
            self._check(scope, path)
            await self._app(scope, receive, sent)
        except ApiError as error:
            await error_response(error)(scope, receive, sent)
        except Exception as error:
            log_failure(path, error)
            if not sent.status:
                await error_response(ApiError(500, FAILED))(scope, receive, sent)
        finally:
            if counted:
                self._drain.active -= 1
                self._metrics.active.dec()
            name = path if path in self._paths else "other"
            self._metrics.requests.labels(name, str(sent.status or "none")).inc()

    def _check(self, scope: Scope, path: str) -> None:
        """Refuse requests without the key, too many at a time, and those after the server was told to stop."""
        if path not in _OPEN_PATHS and not self._knows_key(scope):
            raise ApiError(
                401, "the header Authorization has no valid key, expected: Bearer KEY", code="invalid_api_key"
            )
        if path in _DRAINING_PATHS:
            return
        if self._drain.begun:
            raise ApiError(503, "the server is shutting down; send the request to another one", retry_after=1)
        most = self._settings.limits.requests
        if self._drain.active > most:
            raise ApiError(429, f"the server has {most} requests, its limit; try again later", retry_after=1)

    def _knows_key(self, scope: Scope) -> bool:
        key = self._settings.api_key
        if key is None:
            return True
        found = _header(scope, b"authorization")
        kind, _, value = found.partition(b" ")
        return kind.lower() == b"bearer" and hmac.compare_digest(value.strip(), key.encode())


class _Sent:
    """Sends an answer, with the request's id, and remembers its status."""

    def __init__(self, send: Send, request_id: str) -> None:
        self._send, self.request_id, self.status = send, request_id, 0

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            headers: list[Any] = list(message.get("headers", []))
            message = {**message, "headers": [*headers, (b"x-request-id", self.request_id.encode())]}
        await self._send(message)


def _header(scope: Scope, name: bytes) -> bytes:
    return next((bytes(value) for key, value in scope["headers"] if key == name), b"")


def _request_id(scope: Scope) -> str:
    """Return the id that the client or a proxy gave, or a new one."""
    given = _header(scope, b"x-request-id").decode("latin-1")
    return given if _REQUEST_ID.fullmatch(given) else secrets.token_hex(16)
