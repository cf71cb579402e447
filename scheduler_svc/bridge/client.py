"""The edge's end of the bridge: one connection to the core for the edge's life.

Requests of one event-loop turn leave as one message. There is no reconnect: when the core is gone, so is the edge.
"""

import asyncio
from pathlib import Path

from google.protobuf.message import DecodeError

from protos.forwardplane.v1.bridge_pb2 import (
    AbortAnswer,
    AbortOrder,
    CancelStream,
    CoreToEdge,
    EdgeHello,
    EdgeToCore,
    PauseStream,
    SubmitStream,
)
from protos.wire.errors import DataFault, InternalFault, QueueFull, UnavailableError
from protos.wire.limits import MAX_BRIDGE_MESSAGE_BYTES
from scheduler_svc.bridge.frames import frame, read_body

# A batch leaves early at this size, so that it stays below the cap of one message.
_BATCH_BYTES = MAX_BRIDGE_MESSAGE_BYTES // 4
_CONNECT_PAUSE_S = 0.05


class BridgeClient:
    """Made and owned by the edge's composition root; used on its event loop only."""

    def __init__(self, path: Path, *, edge_index: int) -> None:
        self._path = path
        self._edge_index = edge_index
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._pending = EdgeToCore()
        self._pending_bytes = 0
        self._flush_due = False

    async def connect(self, *, timeout_s: float) -> None:
        """Connect and say hello; waits for the core to listen.

        Raises:
            UnavailableError: the core did not listen within `timeout_s`.
        """
        try:
            async with asyncio.timeout(timeout_s):
                self._reader, self._writer = await self._open()
        except TimeoutError as error:
            message = f"the scheduler core did not open its socket within {timeout_s} s"
            raise UnavailableError(message, field="socket_dir") from error
        hello = EdgeToCore(hello=EdgeHello(edge_index=self._edge_index))
        self._writer.write(frame(hello.SerializeToString()))

    def submit(self, submit: SubmitStream) -> None:
        """Send a request with this turn's message.

        Raises:
            QueueFull: the core has not taken what was sent before.
            UnavailableError: the core is gone.
        """
        size = submit.ByteSize()
        if self._pending_bytes + size + self._buffered_bytes() > MAX_BRIDGE_MESSAGE_BYTES:
            raise QueueFull("the scheduler core is not reading new requests", retry_after_ms=1000)
        self._pending.submits.append(submit)
        self._schedule(size)

    def cancel(self, cancel: CancelStream) -> None:
        """Send a cancellation with this turn's message. Never refused: it is small and frees what others wait for."""
        self._pending.cancels.append(cancel)
        self._schedule(cancel.ByteSize())

    def pause(self, pause: PauseStream) -> None:
        """Say that a reader fell behind or caught up, with this turn's message. Never refused, as a cancellation."""
        self._pending.pauses.append(pause)
        self._schedule(pause.ByteSize())

    def ask_load(self) -> None:
        """Ask for a load snapshot; it arrives as a `CoreToEdge.load`."""
        self._pending.want_load = True
        self._schedule(0)

    def ask_flush(self) -> None:
        """Ask to empty the prefix caches; the answer arrives as a `CoreToEdge.flushed`."""
        self._pending.want_flush = True
        self._schedule(0)

    def ask_abort(self, order: AbortOrder) -> None:
        """Have another edge end a request; its answer arrives among `CoreToEdge.abort_answers`."""
        self._pending.aborts.append(order)
        self._schedule(order.ByteSize())

    def answer_abort(self, answer: AbortAnswer) -> None:
        """Say what became of an order that arrived among `CoreToEdge.aborts`."""
        self._pending.abort_answers.append(answer)
        self._schedule(answer.ByteSize())

    async def receive(self) -> CoreToEdge | None:
        """The core's next message; None when the core is gone.

        Raises:
            DataFault: what arrived is not a message.
        """
        if self._reader is None:
            raise InternalFault("the bridge is not connected")
        try:
            body = await read_body(self._reader)
        except ConnectionError:
            body = None
        if body is None:
            if self._writer is not None:
                self._writer.close()
            return None
        try:
            return CoreToEdge.FromString(body)
        except DecodeError as error:
            raise DataFault("the core's message cannot be parsed", field="body") from error

    async def close(self) -> None:
        """Send what is pending and close. Safe to repeat."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        if self._flush_due and not writer.is_closing():
            writer.write(frame(self._pending.SerializeToString()))
        self._flush_due = False
        writer.close()
        try:
            async with asyncio.timeout(1.0):
                await writer.wait_closed()
        except (ConnectionError, TimeoutError):
            writer.transport.abort()

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        while True:
            try:
                return await asyncio.open_unix_connection(str(self._path))
            except (FileNotFoundError, ConnectionRefusedError):
                await asyncio.sleep(_CONNECT_PAUSE_S)

    def _buffered_bytes(self) -> int:
        if self._writer is None or self._writer.is_closing():
            raise UnavailableError("the scheduler core is gone")
        return self._writer.transport.get_write_buffer_size()

    def _schedule(self, size: int) -> None:
        self._pending_bytes += size
        if self._pending_bytes >= _BATCH_BYTES:
            self._flush()
        elif not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_due = False
        if self._pending.ByteSize() == 0:
            return
        body = self._pending.SerializeToString()
        self._pending = EdgeToCore()
        self._pending_bytes = 0
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(body))
