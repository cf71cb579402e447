"""A TCP proxy whose connections can be slow, stand still, lie or break while bytes flow. Runs in its own thread."""

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

STEP_S = 0.005
CHUNK = 1 << 16
LEAST_TO_CORRUPT = 64
"""Smaller chunks are mostly HTTP/2's own."""


class Way(StrEnum):
    """Where bytes go."""

    UP = "to the target"
    DOWN = "to the caller"


@dataclass
class Weather:
    """How the network is. Written by the test's thread, read by the proxy's at every chunk."""

    delay_s: float = 0.0
    stalled: frozenset[Way] = frozenset()
    """Nothing moves that way; nothing is lost, as if every packet were sent again later."""
    corrupt: dict[Way, int] = field(default_factory=dict)
    """How many of the next chunks get one wrong byte."""


class TcpProxy:
    """Made by `proxied`, one for each target."""

    def __init__(self, target_port: int) -> None:
        self.weather = Weather()
        self.port = 0
        """Where it listens, once started."""
        self._target_port = target_port
        self._open: set[asyncio.StreamWriter] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._abort()
        while self._open:
            await asyncio.sleep(STEP_S)

    def reset(self) -> None:
        """Break every connection. From any thread."""
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._abort)

    def _abort(self) -> None:
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()  # as nobody listened here
            return
        ends = {writer, up_writer}
        self._open |= ends
        ways = ((reader, up_writer, Way.UP), (up_reader, writer, Way.DOWN))
        pumps = [asyncio.ensure_future(self._pump(*way)) for way in ways]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for pump in pumps:
            pump.cancel()
        await asyncio.gather(*pumps, return_exceptions=True)
        for end in ends:
            end.transport.abort()
        self._open -= ends

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, way: Way) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(CHUNK):
                await asyncio.sleep(self.weather.delay_s)
                while way in self.weather.stalled:
                    await asyncio.sleep(STEP_S)
                writer.write(self._spoilt(data, way))
                await writer.drain()

    def _spoilt(self, data: bytes, way: Way) -> bytes:
        left = self.weather.corrupt.get(way, 0)
        if not left or len(data) < LEAST_TO_CORRUPT:
            return data
        self.weather.corrupt[way] = left - 1
        middle = len(data) // 2
        return data[:middle] + bytes([data[middle] ^ 0x40]) + data[middle + 1 :]


@contextlib.contextmanager
def proxied(target_ports: list[int]) -> Iterator[list[TcpProxy]]:
    """Proxies in front of the ports, in their order, until the context ends."""
    proxies = [TcpProxy(port) for port in target_ports]
    loop = asyncio.new_event_loop()

    async def start_all() -> None:
        for proxy in proxies:
            await proxy.start()

    async def stop_all() -> None:
        for proxy in proxies:
            await proxy.stop()

    thread = threading.Thread(target=loop.run_forever, name="proxies", daemon=True)
    thread.start()
    asyncio.run_coroutine_threadsafe(start_all(), loop).result(timeout=30)
    try:
        yield proxies
    finally:
        asyncio.run_coroutine_threadsafe(stop_all(), loop).result(timeout=30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(timeout=30)
        loop.close()
