"""The core's end of the bridge: accepts edges on a Unix socket and tells a listener what they say.

Each accepted connection gets its own number, never used again, which is the `edge` of its streams: so what a restarted
edge asks cannot be mistaken for what its predecessor asked. An edge that does not read is disconnected, so the core
never waits for one and its buffers stay bounded.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from google.protobuf.message import DecodeError

from protos.forwardplane.v1.bridge_pb2 import AbortAnswer, AbortOrder, CoreToEdge, EdgeToCore
from protos.wire.errors import DataFault, EngineError
from protos.wire.limits import MAX_BRIDGE_MESSAGE_BYTES
from scheduler_svc.bridge.convert import cancelled, paused, submitted
from scheduler_svc.bridge.frames import frame, read_body
from scheduler_svc.bridge.outbox import Messages
from scheduler_svc.core.events import CacheFlushRequested, Event

_logger = logging.getLogger(__name__)


class EdgeListener(Protocol):
    """What the bridge tells. Called on the event loop; must not wait."""

    def edge_connected(self, edge: int) -> None:
        """A new connection said hello."""
        ...

    def edge_events(self, events: Sequence[Event]) -> None:
        """What one message says of streams and caches, in order."""
        ...

    def load_wanted(self, edge: int) -> None:
        """The edge asks for a load snapshot."""
        ...

    def edge_of(self, request_id: str) -> int | None:
        """The connection whose request that is; None: there is none (any more)."""
        ...

    def edge_lost(self, edge: int) -> None:
        """The connection ended; nothing can be sent to it any more."""
        ...


class BridgeServer:
    """Made by the core's composition root, closed by it."""

    def __init__(
        self, path: Path, *, listener: EdgeListener, clock: Callable[[], float], hello_timeout_s: float = 5.0
    ) -> None:
        self._path = path
        self._listener = listener
        self._clock = clock
        self._hello_timeout_s = hello_timeout_s
        self._server: asyncio.Server | None = None
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._next_connection = 0
        self._all_gone = asyncio.Event()
        self._all_gone.set()

    async def start(self) -> None:
        """Listen. The socket's directory is the caller's, and private."""
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))

    def send(self, messages: Messages) -> None:
        """Send one message to each named connection; ones that are gone are skipped."""
        for edge, message in messages.items():
            writer = self._writers.get(edge)
            if writer is None or writer.is_closing():
                continue
            writer.write(frame(message.SerializeToString()))
            if writer.transport.get_write_buffer_size() > MAX_BRIDGE_MESSAGE_BYTES:
                _logger.error("edge does not read, disconnecting it", extra={"edge": edge})
                writer.transport.abort()

    def connections(self) -> list[int]:
        """The connections that said hello, oldest first."""
        return list(self._writers)

    async def flushed(self, *, timeout_s: float) -> None:
        """Wait until what was sent has left this process, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while any(_holds_bytes(writer) for writer in self._writers.values()):
                    await asyncio.sleep(0.005)
        except TimeoutError:
            _logger.warning("edges did not read everything before the core's end")

    async def edges_gone(self, *, timeout_s: float) -> None:
        """Wait until every edge has closed its connection, at most `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_gone.wait()
        except TimeoutError:
            _logger.warning("edges are still connected at the core's end", extra={"edges": len(self._writers)})

    async def close(self) -> None:
        """Stop listening and drop every connection. Safe to repeat."""
        if self._server is None:
            return
        server, self._server = self._server, None
        server.close()
        for writer in list(self._writers.values()):
            writer.close()
        await self.edges_gone(timeout_s=1.0)
        self._path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._next_connection += 1
        edge = self._next_connection
        try:
            async with asyncio.timeout(self._hello_timeout_s):
                hello = await self._read(reader)
            if hello is None or not hello.HasField("hello"):
                raise DataFault("a bridge connection did not begin with a hello", field="hello")
            self._opened(edge, writer)
            _logger.info("edge connected", extra={"edge": edge, "edge_index": hello.hello.edge_index})
            while (message := await self._read(reader)) is not None:
                self._deliver(edge, message)
        except (EngineError, ConnectionError, TimeoutError) as error:
            _logger.warning("edge connection failed", extra={"edge": edge, "error": str(error)})
        finally:
            self._closed(edge)
            writer.close()

    async def _read(self, reader: asyncio.StreamReader) -> EdgeToCore | None:
        body = await read_body(reader)
        if body is None:
            return None
        try:
            return EdgeToCore.FromString(body)
        except DecodeError as error:
            raise DataFault("an edge's message cannot be parsed", field="body") from error

    def _opened(self, edge: int, writer: asyncio.StreamWriter) -> None:
        self._writers[edge] = writer
        self._all_gone.clear()
        self._listener.edge_connected(edge)

    def _closed(self, edge: int) -> None:
        if self._writers.pop(edge, None) is None:
            return
        _logger.info("edge disconnected", extra={"edge": edge})
        if not self._writers:
            self._all_gone.set()
        self._listener.edge_lost(edge)

    def _deliver(self, edge: int, message: EdgeToCore) -> None:
        now = self._clock()
        events: list[Event] = [submitted(submit, edge=edge, now=now) for submit in message.submits]
        events.extend(cancelled(cancel, edge=edge) for cancel in message.cancels)
        events.extend(paused(pause, edge=edge) for pause in message.pauses)
        if message.want_flush:
            events.append(CacheFlushRequested(edge))
        if events:
            self._listener.edge_events(events)
        if message.want_load:
            self._listener.load_wanted(edge)
        for order in message.aborts:
            self._pass_on(edge, order)
        for answer in message.abort_answers:
            self.send({answer.asker: CoreToEdge(abort_answers=[answer])})

    def _pass_on(self, edge: int, order: AbortOrder) -> None:
        """To the edge that has the request; the asking one has looked at its own already."""
        order.asker = edge
        owner = self._listener.edge_of(order.request_id)
        if owner is None or owner == edge:
            answer = AbortAnswer(question=order.question, asker=edge, found=False)
            self.send({edge: CoreToEdge(abort_answers=[answer])})
        else:
            self.send({owner: CoreToEdge(aborts=[order])})


def _holds_bytes(writer: asyncio.StreamWriter) -> bool:
    return not writer.is_closing() and writer.transport.get_write_buffer_size() > 0
