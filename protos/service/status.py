"""The only mapper between the error taxonomy and gRPC statuses, both ways, and the border that keeps bugs inside.

A status of ours carries `google.rpc` details and our ErrorDetail; the same class comes out on the other side. Statuses
that gRPC itself makes (nothing listens, transport cap, deadline) become sensible classes too.
"""

import asyncio
import logging
import re
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import Any, Never, Protocol, cast

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from protos.forwardplane.v1.error_pb2 import Blast, ErrorDetail, Retry
from protos.service.handlers import Context, Handler, async_behaviour, surrounded
from protos.service.readable import checked, checked_stream, tolerant
from protos.wire import errors
from protos.wire.errors import EngineError, InternalFault, StaleEpoch

DOMAIN = "forwardplane"
MAX_MESSAGE_BYTES = 512
MAX_ROWS = 64
"""Trailers are capped at 8 KiB: longer messages are cut, and of more failed rows the first ones are named."""

logger = logging.getLogger(__name__)

_CLASS_OF_CODE: dict[grpc.StatusCode, type[EngineError]] = {
    grpc.StatusCode.CANCELLED: errors.RequestAborted,
    grpc.StatusCode.INVALID_ARGUMENT: errors.InvalidRequest,
    grpc.StatusCode.OUT_OF_RANGE: errors.InvalidRequest,
    grpc.StatusCode.NOT_FOUND: errors.CallerError,
    grpc.StatusCode.ALREADY_EXISTS: errors.CallerError,
    grpc.StatusCode.FAILED_PRECONDITION: errors.CallerError,
    grpc.StatusCode.PERMISSION_DENIED: errors.PermissionDenied,
    grpc.StatusCode.UNAUTHENTICATED: errors.Unauthenticated,
    grpc.StatusCode.UNIMPLEMENTED: errors.NotOffered,
    grpc.StatusCode.DEADLINE_EXCEEDED: errors.DeadlinePassed,
    grpc.StatusCode.RESOURCE_EXHAUSTED: errors.MessageTooLarge,
    grpc.StatusCode.ABORTED: errors.SyncError,
    grpc.StatusCode.UNAVAILABLE: errors.ConnectionLost,
    grpc.StatusCode.DATA_LOSS: errors.DataFault,
    grpc.StatusCode.UNKNOWN: errors.InternalFault,
    grpc.StatusCode.INTERNAL: errors.InternalFault,
}
_SIZES = re.compile(r"larger than max \((\d+) vs\. (\d+)\)")
_WRITE_FAILED = "Internal error from Core"
"""What grpc.aio makes of a call, for its reader too, when a write finds the connection gone before the status is in."""
DEADLINE_SLACK_S = 0.05
"""A caller counts its deadline from before it sends, the server from the receipt: the cancellation of a caller whose
deadline is over comes before the server's own count ends, by the request's way there less the cancellation's."""
_CANCELLED_HERE = ("Locally cancelled", "Channel closed", "Channel deallocated")
"""What gRPC says where this side ended the call. Any other cancel without our detail is the peer's: a server that stops
drops so the calls that it had not taken up yet."""
_NOBODY_LISTENS = ("Connection refused", "DNS resolution failed", "Name or service not known", "No such file")


class CallObserver(Protocol):
    """Told of every call by the interceptor; counts them, never logs them."""

    def call_started(self, method: str) -> None:
        """A call of `method`, its full name with slashes, has arrived."""
        ...

    def call_finished(self, method: str, code: str, *, seconds: float) -> None:
        """It ended with the gRPC code of that name."""
        ...


def to_status(error: EngineError) -> grpc.Status:
    """Code, message and details of `error`, as a server sends them."""
    status = status_pb2.Status(code=grpc.StatusCode[error.status].value[0], message=_cut(error.message))
    for detail in _details(error):
        packed = AnyMessage()
        packed.Pack(detail)
        status.details.append(packed)
    return cast(grpc.Status, rpc_status.to_status(status))


async def abort_with(context: Context, error: EngineError) -> Never:
    """End the call with the status of `error`.

    Raises:
        AbortError: it was sent.
        CancelledError: the caller has gone meanwhile.
    """
    status = to_status(error)
    try:
        await context.abort(status.code, status.details or "", tuple(status.trailing_metadata or ()))
    except grpc.aio.InternalError:
        # gRPC could not send it; raised on, that would be logged with a stack as a fault of ours.
        raise asyncio.CancelledError from error
    raise AssertionError("abort raises")


def from_rpc_error(error: grpc.RpcError, *, target: str = "") -> EngineError:
    """The error that a call ended with, as the class the server raised.

    Args:
        error: raised by a synchronous or an asyncio call.
        target: HOST:PORT of the channel, for messages.
    """
    call = cast(grpc.Call, error)
    details = call.details() or ""
    detail, retry_after_ms = _read_details(call)
    error_class = errors.error_classes().get(detail.reason) if detail is not None else None
    if detail is None or error_class is None:
        return _from_code(call.code(), details, target)
    return _rebuilt(error_class, details, detail=detail, retry_after_ms=retry_after_ms)


@contextmanager
def fault_border(where: str) -> Iterator[None]:
    """Lets errors of the taxonomy pass; logs any other with its stack and an id, and raises InternalFault with that id.

    For the outermost frame of a call, a task or a thread. Cancellation and exit pass untouched.
    """
    try:
        yield
    except (EngineError, grpc.aio.AbortError):
        raise
    except Exception as error:
        error_id = secrets.token_hex(6)
        logger.exception("unexpected error", extra={"where": where, "error_id": error_id})
        fault = InternalFault(f"an unexpected error; the server's log has it under the error id {error_id}")
        fault.error_id = error_id
        raise fault from error


class StatusInterceptor(grpc.aio.ServerInterceptor):
    """Ends calls whose handler raised with the right status, and tells the observers of every call.

    Wraps a handler once per call; a stream's messages do not pass through it a second time.
    """

    def __init__(
        self,
        observers: Sequence[CallObserver] = (),
        *,
        max_request_bytes: int | None = None,
        check_stream: Callable[[AsyncIterator[Any]], AsyncIterator[Any]] = checked_stream,
    ) -> None:
        """Tell `observers`; requests of more bytes are refused, which the transport's own cap does without a reason.

        Args:
            observers: told of every call.
            max_request_bytes: None: the transport's cap alone.
            check_stream: raises for what is no request in a stream of them.
        """
        self._observers = tuple(observers)
        self._max_request_bytes = max_request_bytes
        self._check_stream = check_stream

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of this call inside a border; handlers that are not asynchronous stay as they are."""
        handler = cast(Any, await continuation(handler_call_details))
        behaviour = async_behaviour(handler)
        if behaviour is None:
            return cast(Handler, handler)
        check = self._check_stream if handler.request_streaming else checked
        read = tolerant(handler.request_deserializer, max_bytes=self._max_request_bytes)
        around = partial(self._inside, handler_call_details.method)
        return surrounded(handler, behaviour, around, deserializer=read, check=check)

    async def _inside(self, method: str, context: Context, answer: Callable[[], Awaitable[Any]]) -> Any:
        async with self._border(method, context):
            return await answer()

    @asynccontextmanager
    async def _border(self, method: str, context: Context) -> AsyncIterator[None]:
        began = time.monotonic()
        code = grpc.StatusCode.OK.name
        for observer in self._observers:
            observer.call_started(method)
        try:
            with fault_border(method):
                yield
            code = _code_name(context)
        except EngineError as error:
            code = error.status
            await abort_with(context, error)
        except grpc.aio.AbortError:
            code = _code_name(context)
            raise
        except asyncio.CancelledError:
            code = _cancelled_code(context)
            raise
        finally:
            for observer in self._observers:
                observer.call_finished(method, code, seconds=time.monotonic() - began)


def _code_name(context: Context) -> str:
    """Name of the code that the handler set; OK when it set none."""
    code = cast(Any, context).code() or 0
    number = code.value[0] if isinstance(code, grpc.StatusCode) else code
    return next((known.name for known in grpc.StatusCode if known.value[0] == number), grpc.StatusCode.UNKNOWN.name)


def _cancelled_code(context: Context) -> str:
    """A cancelled handler's code: the caller's deadline, if it is over, or the caller's leaving."""
    remaining = context.time_remaining()
    is_late = remaining is not None and remaining <= DEADLINE_SLACK_S
    return grpc.StatusCode.DEADLINE_EXCEEDED.name if is_late else grpc.StatusCode.CANCELLED.name


def _details(error: EngineError) -> list[Any]:
    found: list[Any] = [error_details_pb2.ErrorInfo(reason=error.reason, domain=DOMAIN), _our_detail(error)]
    if error.status == grpc.StatusCode.INVALID_ARGUMENT.name and error.field:
        violation = error_details_pb2.BadRequest.FieldViolation(field=error.field, description=_cut(error.message))
        found.append(error_details_pb2.BadRequest(field_violations=[violation]))
    if error.retry_after_ms > 0:
        delay = Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        found.append(error_details_pb2.RetryInfo(retry_delay=delay))
    if error.error_id:
        found.append(error_details_pb2.RequestInfo(request_id=error.error_id))
    return found


def _our_detail(error: EngineError) -> ErrorDetail:
    detail = ErrorDetail(
        reason=error.reason,
        retry=Retry.Value(f"RETRY_{error.retry.upper()}"),
        blast=Blast.Value(f"BLAST_{error.blast.upper()}"),
        error_id=error.error_id,
        field=error.field,
        plan_seq=error.plan_seq,
        rows=error.rows[:MAX_ROWS],
    )
    if isinstance(error, StaleEpoch):
        detail.highest_epoch = error.highest_epoch
        detail.highest_term = error.highest_term
    return detail


def _read_details(call: grpc.Call) -> tuple[ErrorDetail | None, int]:
    """Our detail, if the status has one that can be read, and the retry delay in milliseconds."""
    detail, delay = ErrorDetail(), error_details_pb2.RetryInfo()
    try:
        status = rpc_status.from_call(call)
        packed = status.details if status is not None else ()
        is_ours = any(item.Unpack(detail) for item in packed if item.Is(ErrorDetail.DESCRIPTOR))
        for item in packed:
            if item.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
                item.Unpack(delay)
    except (DecodeError, ValueError):
        return None, 0
    return (detail if is_ours else None), delay.retry_delay.ToMilliseconds()


def _rebuilt(error_class: type[EngineError], message: str, *, detail: ErrorDetail, retry_after_ms: int) -> EngineError:
    error = error_class(message)
    error.field = detail.field
    error.plan_seq = detail.plan_seq if detail.HasField("plan_seq") else None
    error.rows = tuple(detail.rows)
    error.retry_after_ms = retry_after_ms
    error.error_id = detail.error_id
    if isinstance(error, StaleEpoch):
        error.highest_epoch = detail.highest_epoch
        error.highest_term = detail.highest_term
    return error


def _from_code(code: grpc.StatusCode, details: str, target: str) -> EngineError:
    """An error for a status that no server of ours made."""
    peer = target or "the server"
    if code is grpc.StatusCode.INTERNAL and details.startswith(_WRITE_FAILED):
        return errors.ConnectionLost(f"the connection to {peer} was lost")
    if code is grpc.StatusCode.UNAVAILABLE:
        if any(sign in details for sign in _NOBODY_LISTENS):
            return errors.NoServer(f"no server answers at {peer}")
        return errors.ConnectionLost(f"the connection to {peer} was lost")
    if code is grpc.StatusCode.CANCELLED and not details.startswith(_CANCELLED_HERE):
        return errors.ConnectionLost(f"{peer} dropped the call")
    message = {
        grpc.StatusCode.DEADLINE_EXCEEDED: f"{peer} did not answer within the call's deadline",
        grpc.StatusCode.CANCELLED: "the call was cancelled",
        grpc.StatusCode.RESOURCE_EXHAUSTED: _over_cap(details),
        grpc.StatusCode.UNIMPLEMENTED: f"{peer} does not offer this call",
    }.get(code)
    return _CLASS_OF_CODE.get(code, InternalFault)(message or _cut(details) or f"{peer} answered {code.name}")


def _over_cap(details: str) -> str:
    """What gRPC says of a message over the transport's cap, with the two numbers if it gave them."""
    found = _SIZES.search(details)
    if found is None:
        return "a message is over the byte cap of the transport"
    return f"a message has {found[1]} bytes; the limit of the transport is {found[2]}"


def _cut(message: str) -> str:
    """`message`, at most MAX_MESSAGE_BYTES long in UTF-8."""
    return message.encode("utf-8", "replace")[:MAX_MESSAGE_BYTES].decode("utf-8", "ignore")
