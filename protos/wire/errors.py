"""The error taxonomy of the whole project, free of grpc.

Each class says who must act: `status` is the name of the gRPC code callers see, `retry` what the receiver may do,
`blast` what the failure takes with it. Only `protos.service.status` turns them into gRPC and back.
"""

from typing import ClassVar


class EngineError(Exception):
    """Root of every failure that may cross a process border.

    `message` is a fixed sentence that names the field, the value and the limit; it never holds prompt text or paths.
    """

    reason: ClassVar[str] = "ENGINE_ERROR"
    status: ClassVar[str] = "INTERNAL"
    retry: ClassVar[str] = "never"
    blast: ClassVar[str] = "row"

    def __init__(
        self,
        message: str,
        *,
        field: str = "",
        plan_seq: int | None = None,
        rows: tuple[int, ...] = (),
        retry_after_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.field = field
        self.plan_seq = plan_seq
        self.rows = rows
        self.retry_after_ms = retry_after_ms
        self.error_id = ""
        """Set by the border that logged the cause, so that a report and the log line can be joined."""

    def rename_field(self, name: str) -> None:
        """Speak of the field as `name`, in the message too where it begins with the field."""
        if self.field and self.message.startswith(self.field):
            self.message = name + self.message.removeprefix(self.field)
        self.field = name

    def place_field(self, place: str) -> None:
        """Say of which part of a call the field is: `place` stands before it, as in `requests[0].model`."""
        self.rename_field(f"{place}{self.field}".rstrip("."))


class CallerError(EngineError):
    """The message is wrong; sending it again will not help."""

    reason = "CALLER_ERROR"
    status = "INVALID_ARGUMENT"


class InvalidPlan(CallerError):
    """Malformed columns, an id outside its pool, two rows that write one page."""

    reason = "INVALID_PLAN"
    blast = "plan"


class UnsupportedFeature(CallerError):
    """A mode, column, schema version or required feature that has no executor here."""

    reason = "UNSUPPORTED"
    status = "FAILED_PRECONDITION"
    blast = "plan"


class InvalidRequest(CallerError):
    """A caller's parameter or length is out of range."""

    reason = "INVALID_REQUEST"


class UnreadableRequest(InvalidRequest):
    """A request's bytes are no message, or one of too many fields."""

    reason = "UNREADABLE_REQUEST"


class UnknownRequest(CallerError):
    """No running request of this caller has that id."""

    reason = "UNKNOWN_REQUEST"
    status = "NOT_FOUND"


class UnknownModel(CallerError):
    """This server does not serve that model."""

    reason = "UNKNOWN_MODEL"
    status = "NOT_FOUND"


class InvalidModelFile(CallerError):
    """A weight, tokenizer or template file that cannot be trusted or used."""

    reason = "INVALID_MODEL_FILE"
    status = "FAILED_PRECONDITION"
    blast = "worker"


class InvalidCertificate(CallerError):
    """A certificate, key or authority of this process that cannot be used."""

    reason = "INVALID_CERTIFICATE"
    status = "FAILED_PRECONDITION"
    blast = "worker"


class Unauthenticated(CallerError):
    """Nobody knows who calls: no token or certificate, or one that is not known."""

    reason = "UNAUTHENTICATED"
    status = "UNAUTHENTICATED"


class PermissionDenied(CallerError):
    """Whoever calls is known and may not do this."""

    reason = "PERMISSION_DENIED"
    status = "PERMISSION_DENIED"


class CannotListen(CallerError):
    """An address this process may not or cannot listen on."""

    reason = "CANNOT_LISTEN"
    status = "FAILED_PRECONDITION"
    blast = "worker"


class PortInUse(CannotListen):
    """Another process listens on that port."""

    reason = "PORT_IN_USE"


class ForeignPackage(CallerError):
    """Another distribution has installed a package under a name of ours."""

    reason = "FOREIGN_PACKAGE"
    status = "FAILED_PRECONDITION"
    blast = "worker"


class UnsafeRuntime(CallerError):
    """A library under us runs in a way that is not safe with data of strangers."""

    reason = "UNSAFE_RUNTIME"
    status = "FAILED_PRECONDITION"
    blast = "worker"


class NotOffered(CallerError):
    """A whole call or option that this release does not offer."""

    reason = "NOT_OFFERED"
    status = "UNIMPLEMENTED"


class TicketRefused(CallerError):
    """A ticket with which nothing can be resumed here."""

    reason = "TICKET_REFUSED"
    status = "FAILED_PRECONDITION"


class NeverFits(CallerError):
    """The request is larger than the pool can ever hold."""

    reason = "NEVER_FITS"
    status = "FAILED_PRECONDITION"


class SyncError(EngineError):
    """Both sides are fine but disagree; resynchronise."""

    reason = "SYNC_ERROR"
    status = "ABORTED"
    retry = "resync"
    blast = "worker"


class NeedFullPlan(SyncError):
    """Soft state that the plan builds on is gone; the same plan in full is fine."""

    reason = "NEED_FULL_PLAN"
    blast = "plan"


class StaleEpoch(SyncError):
    """A scheduler whose (epoch, term) is not above the highest the worker has seen."""

    reason = "STALE_EPOCH"

    def __init__(self, message: str, *, highest_epoch: int = 0, highest_term: int = 0) -> None:
        super().__init__(message)
        self.highest_epoch = highest_epoch
        self.highest_term = highest_term


class WrongIncarnation(SyncError):
    """The worker was restarted: its pools are empty."""

    reason = "WRONG_INCARNATION"


class ProtocolMismatch(SyncError):
    """No protocol version that both sides speak."""

    reason = "PROTOCOL_MISMATCH"
    status = "FAILED_PRECONDITION"
    retry = "never"


class CapacityError(EngineError):
    """Not now."""

    reason = "CAPACITY"
    status = "RESOURCE_EXHAUSTED"
    retry = "later"


class QueueFull(CapacityError):
    """The waiting queue is at its limit."""

    reason = "QUEUE_FULL"


class QuotaExceeded(CapacityError):
    """This caller has had what it may have for now; others have not."""

    reason = "QUOTA_EXCEEDED"


class WindowFull(CapacityError):
    """More plans in flight than the worker's window."""

    reason = "WINDOW_FULL"
    blast = "plan"


class MessageTooLarge(CapacityError):
    """A message over its byte cap."""

    reason = "MESSAGE_TOO_LARGE"
    retry = "never"


class UnavailableError(EngineError):
    """Not here, not yet, or no longer."""

    reason = "UNAVAILABLE"
    status = "UNAVAILABLE"
    retry = "elsewhere"


class Loading(UnavailableError):
    """No worker is attached yet."""

    reason = "LOADING"


class Draining(UnavailableError):
    """The process is shutting down."""

    reason = "DRAINING"


class NoServer(UnavailableError):
    """Nothing listens at that address. Made on the client side."""

    reason = "NO_SERVER"


class ConnectionLost(UnavailableError):
    """The connection broke, or the peer stopped answering pings. Made on the client side."""

    reason = "CONNECTION_LOST"


class DeadlinePassed(EngineError):
    """The request's time is over."""

    reason = "DEADLINE_PASSED"
    status = "DEADLINE_EXCEEDED"


class RequestAborted(EngineError):
    """The caller left or aborted the request."""

    reason = "ABORTED"
    status = "CANCELLED"


class FaultError(EngineError):
    """Something broke."""

    reason = "FAULT"


class DeviceFault(FaultError):
    """The device is unusable: answer what can be answered, stop serving, exit non-zero."""

    reason = "DEVICE_FAULT"
    blast = "worker"


class DataFault(FaultError):
    """A checksum did not match, or logits were not finite."""

    reason = "DATA_FAULT"
    status = "DATA_LOSS"
    retry = "resync"


class InternalFault(FaultError):
    """A bug that was caught at a border."""

    reason = "INTERNAL_FAULT"


class SuspectedPoison(FaultError):
    """Workers died one after the other while this request was alone on them; it is not tried on another."""

    reason = "SUSPECTED_POISON"


def error_classes() -> dict[str, type[EngineError]]:
    """Every class of the taxonomy by its `reason`."""
    classes: dict[str, type[EngineError]] = {EngineError.reason: EngineError}
    waiting = list(EngineError.__subclasses__())
    while waiting:
        found = waiting.pop()
        classes[found.reason] = found
        waiting.extend(found.__subclasses__())
    return classes
