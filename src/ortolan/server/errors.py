"""Refused requests and failures, and their JSON in OpenAI's format."""

from __future__ import annotations

import logging
from contextvars import ContextVar
from typing import Any

from ..engines import RequestError

_KINDS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}
_log = logging.getLogger(__name__)
REQUEST_ID: ContextVar[str] = ContextVar("ortolan_request_id", default="unknown")  # of the request being answered
FAILED = "the server failed; its log has the reason, under this answer's x-request-id"


class ApiError(RequestError):
    """A request that is refused or failed.

    Attributes:
        status: The HTTP status: 4xx, or 5xx if the server is at fault.
        param: The field of the body that is wrong.
        code: A short name of the error for programs.
        retry_after: Seconds after which the same request may succeed; None: unknown.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        """Create the error."""
        super().__init__(status, message, retry_after)
        self.param, self.code = param, code


def log_failure(reason: str, error: BaseException | None = None) -> None:
    """Log why a request failed, with its id, to which FAILED refers."""
    _log.error("request %s failed: %s", REQUEST_ID.get(), reason, exc_info=error)


def error_body(error: RequestError) -> dict[str, Any]:
    """Return the error in OpenAI's format."""
    kind = "server_error" if error.status >= 500 else _KINDS.get(error.status, "invalid_request_error")
    return {
        "error": {
            "message": str(error),
            "type": kind,
            "param": getattr(error, "param", None),
            "code": getattr(error, "code", None),
        }
    }
