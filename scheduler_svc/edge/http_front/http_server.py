"""The HTTP side of an edge: routes, the border around every call, and how it starts and stops.

An aiohttp server on the edge's event loop; it takes no signals and ticks no clock. Guards: every refusal of a
readable call has OpenAI's error shape; a caller who left cancels its call at once; nothing of a call is logged.
"""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import cast

from aiohttp import web
from aiohttp.typedefs import Handler

from protos.service.server import bound_socket
from protos.service.status import fault_border
from protos.wire.errors import EngineError, QueueFull, UnknownModel
from protos.wire.limits import MAX_CALLER_MESSAGE_BYTES
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.http_front.answering import OK, Answered
from scheduler_svc.edge.http_front.embedding_calls import embedding_answer
from scheduler_svc.edge.http_front.generation_calls import GenerationCalls
from scheduler_svc.edge.http_front.http_errors import ErrorReply, HttpRefusal, error_reply
from scheduler_svc.edge.http_front.request_body import continue_if_small, json_body
from scheduler_svc.edge.metrics import HttpCallMetrics

logger = logging.getLogger(__name__)

Endpoint = Callable[[web.Request, CallerIdentity], Awaitable[Answered]]

_STOP_GRACE_S = 1.0
_LAST_READ_S = 2.0
_MAX_SHOWN_CHARS = 64
_MAX_HEADER_BYTES = 8190
_OPEN_ROUTES = frozenset({"/health"})
"""Answered without a caller's identity: they tell nothing but that the server serves."""


def _let_in(_read_certificate: Callable[[], bytes | None]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where the front listens. Port 0 = any free one."""

    host: str
    port: int
    shares_port: bool = False
    """Other edges listen on the same port; the parent has proved it free."""
    tls: ssl.SSLContext | None = None
    """None: plain text."""
    kept_out: Callable[[Callable[[], bytes | None]], AbstractContextManager[None]] = _let_in
    """Around a call, given what reads its peer's certificate in DER: raises Unauthenticated if it is revoked."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpLimits:
    """Seconds that callers may take, and what they may hold."""

    headers_s: float = 30.0
    """Until a request's headers are there; also how long an idle connection is kept."""
    body_s: float = 30.0
    write_s: float = 30.0
    """During which nothing of what was written is taken."""
    linger_s: float = 2.0
    """To go on reading the body of a refused request, so that the refusal is seen."""
    max_calls: int = 1280
    """At once, whether their bodies have arrived or not."""


class HttpServer:
    """Made by the edge's composition root, in the event loop; started and stopped once."""

    def __init__(self, parts: EdgeParts, address: HttpAddress, limits: HttpLimits) -> None:
        self._parts = parts
        self._address = address
        self._limits = limits
        self._calls = HttpCallMetrics(parts.metrics)
        self._generation = GenerationCalls(parts, write_limit_s=limits.write_s)
        self._created = int(time.time())
        self._runner: web.AppRunner | None = None
        self.port = 0

    async def start(self) -> None:
        """Listen.

        Raises:
            CannotListen: the port is in use, or the address is not ours.
        """
        where = self._address
        listener = bound_socket(where.host, where.port, shares_port=where.shares_port)
        self.port = listener.getsockname()[1]
        self._runner = web.AppRunner(
            self._application(),
            handle_signals=False,
            handler_cancellation=True,
            access_log=None,
            logger=_silent_logger(),
            shutdown_timeout=_STOP_GRACE_S,
            keepalive_timeout=self._limits.headers_s,
            lingering_time=self._limits.linger_s,
            auto_decompress=False,
            max_line_size=_MAX_HEADER_BYTES,
            max_field_size=_MAX_HEADER_BYTES,
        )
        try:
            await self._runner.setup()
            await web.SockSite(self._runner, listener, ssl_context=where.tls).start()
        except BaseException:
            listener.close()
            raise
        logger.info("HTTP front listens", extra={"port": self.port})

    async def stop(self) -> None:
        """Close port and connections; calls that are ending get a moment. Safe to repeat."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    def _application(self) -> web.Application:
        application = web.Application(client_max_size=MAX_CALLER_MESSAGE_BYTES, middlewares=[_unmatched])
        posts: dict[str, Endpoint] = {
            "/v1/chat/completions": self._chat,
            "/v1/completions": self._completion,
            "/v1/embeddings": self._embeddings,
        }
        gets = {"/health": self._health, "/v1/models": self._models, "/v1/models/{model:.+}": self._model}
        for route, endpoint in posts.items():
            application.router.add_post(route, self._guarded(route, endpoint), expect_handler=continue_if_small)
        for route, endpoint in gets.items():
            application.router.add_get(route, self._guarded(route.partition("{")[0].rstrip("/"), endpoint))
        return application

    def _guarded(self, route: str, endpoint: Endpoint) -> Handler:
        """The handler of a route: counted, and ended with an answer whatever happens in it."""

        async def handle(request: web.Request) -> web.StreamResponse:
            began = time.monotonic()
            code = "CANCELLED"
            self._calls.call_started()
            try:
                response, code, is_stuck = await self._answered(route, endpoint, request)
            finally:
                self._calls.call_finished(route, code, seconds=time.monotonic() - began)
            if is_stuck and request.transport is not None:
                # What was written, the error last, is there for a caller that is slow and not gone.
                asyncio.get_running_loop().call_later(_LAST_READ_S, _cut, request.transport)
            return response

        return handle

    async def _answered(self, route: str, endpoint: Endpoint, request: web.Request) -> Answered:
        try:
            with fault_border(route):
                if self._calls.open_calls > self._limits.max_calls:
                    raise QueueFull(f"this edge serves {self._limits.max_calls} HTTP calls, which is its limit")
                with self._address.kept_out(partial(_certificate_of, request)):
                    caller = ANONYMOUS if route in _OPEN_ROUTES else self._parts.door.admit_http(request)
                    return await _or_refusal(endpoint(request, caller))
        except EngineError as error:
            return Answered(error_reply(error).response(), error.status)

    async def _chat(self, request: web.Request, caller: CallerIdentity) -> Answered:
        return await self._generation.chat(request, await self._body(request), caller)

    async def _completion(self, request: web.Request, caller: CallerIdentity) -> Answered:
        return await self._generation.completion(request, await self._body(request), caller)

    async def _embeddings(self, request: web.Request, caller: CallerIdentity) -> Answered:
        return await embedding_answer(request, await self._body(request), self._parts, caller)

    async def _health(self, _request: web.Request, _caller: CallerIdentity) -> Answered:
        self._parts.admission.check_gate()
        return Answered(web.json_response({"status": "serving"}), OK)

    async def _models(self, _request: web.Request, _caller: CallerIdentity) -> Answered:
        return Answered(web.json_response({"object": "list", "data": [self._served()]}), OK)

    async def _model(self, request: web.Request, _caller: CallerIdentity) -> Answered:
        asked, served = request.match_info["model"], self._served()
        if asked != served["id"]:
            message = f"model is {asked[:_MAX_SHOWN_CHARS]!r}; this server serves {served['id']!r}"
            raise UnknownModel(message, field="model")
        return Answered(web.json_response(served), OK)

    def _served(self) -> dict[str, str | int]:
        facts = self._parts.link.facts
        return {
            "id": facts.card.name,
            "object": "model",
            "created": self._created,
            "owned_by": "forwardplane",
            "max_model_len": facts.context_tokens,
        }

    async def _body(self, request: web.Request) -> bytes:
        return await json_body(request, limit_s=self._limits.body_s)


def _certificate_of(request: web.Request) -> bytes | None:
    """The peer's certificate in DER; None without one."""
    secured = None if request.transport is None else request.transport.get_extra_info("ssl_object")
    return None if secured is None else cast("bytes | None", secured.getpeercert(binary_form=True))


def _silent_logger() -> logging.Logger:
    """For aiohttp, whose records hold what callers sent; what goes wrong in a call of ours is logged by the border."""
    silent = logging.getLogger(f"{__name__}.aiohttp")
    silent.setLevel(logging.CRITICAL + 1)
    return silent


def _cut(transport: asyncio.Transport) -> None:
    """End the connection, unless its end has come by itself; a transport that is closed can no longer be aborted."""
    if not transport.is_closing() or transport.get_write_buffer_size():
        transport.abort()


async def _or_refusal(answering: Awaitable[Answered]) -> Answered:
    try:
        return await answering
    except HttpRefusal as refusal:
        return Answered(refusal.reply.response(), "INVALID_ARGUMENT")


@web.middleware
async def _unmatched(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Calls that no route takes."""
    problem = request.match_info.http_exception
    if problem is None:
        return await handler(request)
    allowed = {name: value for name, value in problem.headers.items() if name == "Allow"}
    message = f"{request.method} {request.path[:_MAX_SHOWN_CHARS]}: {problem.reason.lower()}"
    code = problem.reason.lower().replace(" ", "_")
    return ErrorReply(status=problem.status, message=message, code=code, headers=allowed).response()
