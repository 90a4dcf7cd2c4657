"""Bodies, answers, streams of events, and clients that go away."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ..engines import RequestError
from .errors import FAILED, ApiError, error_body, log_failure
from .fields import Fields, parse_object
from .settings import Limits

_Result = TypeVar("_Result")
GONE = 499  # the status of an answer that nobody reads, as nginx logs it
DONE = b"data: [DONE]\n\n"
COMMENT = b": waiting\n\n"


async def read_body(request: Request, limits: Limits) -> Fields:
    """Read a JSON object.

    Raises:
        ApiError: As for `read_content`, and 400 if it is not a JSON object.
    """
    return Fields(parse_object(await read_content(request, limits)))


async def read_content(request: Request, limits: Limits) -> bytes:
    """Read the bytes of a body.

    Raises:
        ApiError: 408 if it does not arrive in time, 413 for too many bytes.
    """
    content, most = bytearray(), limits.body_bytes
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                content += chunk
                if len(content) > most:
                    raise ApiError(413, f"body has more than {most} bytes; send less at a time")
    except TimeoutError:
        raise ApiError(408, f"body did not arrive within {limits.body_seconds:g} s") from None
    except ClientDisconnect:
        raise ApiError(GONE, "the client disconnected before the end of its body") from None
    return bytes(content)


def client_host(request: Request) -> str:
    """Return the client's address."""
    return request.client.host if request.client is not None else ""


def json_response(said: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """Return a JSON response; NumPy arrays become lists, float32 with the shortest digits that identify them."""
    content = orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY)
    return Response(content, status, headers, media_type="application/json")


def error_response(error: RequestError) -> Response:
    """Return an error in OpenAI's format."""
    wait = {} if error.retry_after is None else {"Retry-After": str(error.retry_after)}
    return json_response(error_body(error), error.status, wait)


def event(said: Any) -> bytes:
    """Return a server-sent event."""
    return b"data: " + orjson.dumps(said) + b"\n\n"


async def _until_gone(receive: Receive) -> None:
    """Wait until the client has disconnected. Its body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def unless_gone(request: Request, work: Coroutine[Any, Any, _Result]) -> _Result | None:
    """Return the work's result; None if the client disconnects first, which cancels the work."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_until_gone(request.receive))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        await _end(task, gone)


async def _end(*tasks: asyncio.Future[Any]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class EventStream(Response):
    """A stream of server-sent events. If the client disconnects or stops reading, the generator is closed."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncGenerator[bytes], on_end: Callable[[], None], send_seconds: float) -> None:
        """Wrap a generator of events.

        Args:
            events: The events.
            on_end: Called at the end, also if the generator never started.
            send_seconds: The time in which the client must take an event.
        """
        self.status_code, self.background = 200, None
        self._send_seconds = send_seconds
        self._events, self._on_end = events, on_end
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await self._send_unless_gone(receive, send)
        finally:
            self._on_end()

    async def _send_unless_gone(self, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        gone = asyncio.ensure_future(_until_gone(receive))
        try:
            await asyncio.wait({sending, gone}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                sending.result()
        except OSError:  # the client disconnected while an event was sent, or did not take it in time (TimeoutError)
            pass
        finally:
            await _end(sending, gone)

    async def _send(self, send: Send) -> None:
        async def send_body(content: bytes, *, more: bool = True) -> None:
            async with asyncio.timeout(self._send_seconds):  # uvicorn waits while the client does not read
                await send({"type": "http.response.body", "body": content, "more_body": more})

        async with aclosing(self._events) as events:
            try:
                async for one in events:
                    await send_body(one)
            except RequestError as error:  # the response has begun, so its status cannot change
                await send_body(_last(error))
            except OSError:
                raise
            except Exception as error:
                log_failure("its stream", error)
                await send_body(_last(ApiError(500, FAILED)))
        await send_body(b"", more=False)


def _last(error: RequestError) -> bytes:
    return event(error_body(error)) + DONE
