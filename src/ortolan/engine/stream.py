"""The events of a request, handed from the engine's thread to another one."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from threading import Condition

from .choice import Choice
from .requests import Output, Request

_log = logging.getLogger(__name__)


class Stream(Iterator[Output]):
    """The events of all choices of a request, in the order in which they happen.

    Iterate, which blocks until the next event and ends after the last event of the last choice; or get events by a
    callback with `on_output`.

    Attributes:
        request: The request.
    """

    def __init__(self, request: Request, cancel: Callable[[Stream], None]) -> None:
        self.request = request
        self.choices: tuple[Choice, ...] = ()  # the engine's
        self._cancel = cancel
        self._condition = Condition()
        self._events: deque[Output] = deque()
        self._callback: Callable[[Output], None] | None = None
        self._open = request.n

    @property
    def finished(self) -> bool:
        """True if the last event has been put, though perhaps not yet been read."""
        return self._open == 0

    def cancel(self) -> None:
        """End the request soon; choices that have not ended do so with "cancelled". Any thread may call this."""
        if not self.finished:
            self._cancel(self)

    def on_output(self, callback: Callable[[Output], None]) -> None:
        """Call a function for each event instead of queueing events; first, now, for queued events.

        Later calls happen in the engine's thread and delay all sequences, so the function should only pass the event
        on, for example by `loop.call_soon_threadsafe`. If it raises, the request is cancelled.
        """
        with self._condition:
            while self._events:
                callback(self._events.popleft())
            self._callback = callback

    def __next__(self) -> Output:
        with self._condition:
            while not self._events:
                if self._open == 0 or self._callback is not None:
                    raise StopIteration
                self._condition.wait()
            return self._events.popleft()

    def put(self, output: Output) -> None:
        """Add an event. Only the engine calls this."""
        with self._condition:
            if output.finish_reason is not None:
                self._open -= 1
            if self._callback is None:
                self._events.append(output)
                self._condition.notify_all()
                return
            callback = self._callback
            try:
                callback(output)
            except Exception:
                _log.exception("on_output callback failed; its request is cancelled")
                self._callback = _ignore
                self.cancel()


def _ignore(output: Output) -> None:
    """Drop an event."""
