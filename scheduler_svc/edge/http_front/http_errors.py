"""Errors of the taxonomy as HTTP answers in OpenAI's shape.

The gRPC names of `EngineError.status` are the keys, so that both doors class an error the same way.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from aiohttp import web

from protos.wire.errors import EngineError, MessageTooLarge, Unauthenticated, UnknownModel

STATUSES: Mapping[str, int] = MappingProxyType(
    {
        "INVALID_ARGUMENT": 400,
        "FAILED_PRECONDITION": 400,
        "UNAUTHENTICATED": 401,
        "PERMISSION_DENIED": 403,
        "NOT_FOUND": 404,
        "ABORTED": 409,
        "RESOURCE_EXHAUSTED": 429,
        "CANCELLED": 499,
        "INTERNAL": 500,
        "DATA_LOSS": 500,
        "UNIMPLEMENTED": 501,
        "UNAVAILABLE": 503,
        "DEADLINE_EXCEEDED": 504,
    }
)
_RETRIES = ("later", "elsewhere")
_DEFAULT_RETRY_MS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReply:
    """One refusal or failure, as callers of the HTTP front see it."""

    status: int
    message: str
    code: str
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """OpenAI's error object."""
        error = {"message": self.message, "type": self._type(), "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> web.Response:
        """The answer of a call that has not begun to answer."""
        return web.json_response(self.body(), status=self.status, headers=self.headers)

    def _type(self) -> str:
        if self.status == web.HTTPTooManyRequests.status_code:
            return "rate_limit_error"
        return "server_error" if self.status >= web.HTTPInternalServerError.status_code else "invalid_request_error"


class HttpRefusal(Exception):
    """A call that is wrong as HTTP; nothing like it exists in the gRPC door."""

    def __init__(self, status: int, message: str, code: str) -> None:
        super().__init__(message)
        self.reply = ErrorReply(status=status, message=message, code=code)


def error_reply(error: EngineError) -> ErrorReply:
    """What a caller is told of `error`."""
    is_too_large = isinstance(error, MessageTooLarge)
    return ErrorReply(
        status=web.HTTPRequestEntityTooLarge.status_code if is_too_large else STATUSES[error.status],
        message=error.message,
        code=_code(error),
        param=error.field or None,
        headers=_headers(error),
    )


def _code(error: EngineError) -> str:
    """OpenAI's word where there is one."""
    if isinstance(error, Unauthenticated):
        return "invalid_api_key"
    return "model_not_found" if isinstance(error, UnknownModel) else error.reason.lower()


def _headers(error: EngineError) -> dict[str, str]:
    """When to come again. `x-should-retry` is what OpenAI's clients obey before they look at the status."""
    if isinstance(error, Unauthenticated):
        return {"x-should-retry": "false", "www-authenticate": "Bearer"}
    if error.retry not in _RETRIES:
        return {"x-should-retry": "false"}
    pause_ms = error.retry_after_ms or _DEFAULT_RETRY_MS
    return {
        "x-should-retry": "true",
        "retry-after": str(math.ceil(pause_ms / 1000)),
        "retry-after-ms": str(pause_ms),
    }
