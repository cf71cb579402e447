"""Starts a scheduler's core and edge processes, restarts edges, and stops all in order. Holds no request.

Guards: when the core is gone everything ends non-zero; when this process is gone the kernel tells its children, by a
pipe. A second signal kills, unless it follows so closely that it is the same order.
"""

import asyncio
import contextlib
import logging
import math
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from protos.service.lifecycle import LASTING, SAME_SIGNAL_S, ExitCode
from protos.service.private_folder import private_folder
from protos.service.server import bound_socket, prove_port_free
from protos.wire.errors import InvalidRequest
from scheduler_svc.bridge.parent_watch import STOP_ORDER
from scheduler_svc.config import ProcessConfig, Role, SchedulerConfig

_logger = logging.getLogger(__name__)

# Ends of a child that was told to stop; the others are those of one which had begun nothing yet.
_ORDERLY = frozenset({int(ExitCode.OK), -int(STOP_ORDER), -int(signal.SIGTERM), -int(signal.SIGINT)})
_RESTART_WINDOW_S = 60.0
_FIRST_PAUSE_S = 0.2
_MARGIN_S = 5.0
_END_LIMIT_S = 3.0
_MAX_SOCKET_PATH_BYTES = 107


async def run_parent(config: SchedulerConfig, arguments: Sequence[str]) -> int:
    """Run core and edges until a signal or a failure; returns the exit code.

    Args:
        config: resolved from `arguments`.
        arguments: the flags, which each child gets too.

    Raises:
        EngineError: the port is in use, or the socket folder cannot be used.
    """
    with _lifeline() as lifeline, _socket_folder(config.process) as folder, _shared_ports(config) as ports:
        common = (*arguments, "--socket-dir", str(folder), "--parent-fd", str(lifeline), *ports)

        def command(role: Role, index: int) -> list[str]:
            flags = ("--role", role.value, "--edge-index", str(index))
            return [sys.executable, "-m", "scheduler_svc", *common, *flags]

        supervisor = Supervisor(config.process, command=command, lifeline=lifeline)
        with _stop_signals(supervisor):
            return await supervisor.run()


class Supervisor:
    """One run of one set of children. Made by `run_parent`, used once."""

    def __init__(
        self, config: ProcessConfig, *, command: Callable[[Role, int], Sequence[str]], lifeline: int | None = None
    ) -> None:
        self._config = config
        self._command = command
        self._pass_fds = () if lifeline is None else (lifeline,)
        self._core: asyncio.subprocess.Process | None = None
        self._edges: dict[int, asyncio.subprocess.Process] = {}
        self._stop = asyncio.Event()
        self._stop_asked_at = math.inf

    def request_stop(self) -> None:
        """Begin the orderly stop; asked again after `SAME_SIGNAL_S`, kill everything."""
        now = asyncio.get_running_loop().time()
        self._stop_asked_at = min(self._stop_asked_at, now)
        self._stop.set()
        if now - self._stop_asked_at > SAME_SIGNAL_S:
            _logger.warning("second signal: killing all children")
            for process in self._living():
                process.kill()

    async def run(self) -> int:
        """Start all, keep edges running, stop all; returns the exit code."""
        core = asyncio.create_task(self._keep_core())
        edges = [asyncio.create_task(self._keep_edge(index)) for index in range(self._config.edges)]
        stop = asyncio.create_task(self._stop.wait())
        try:
            await asyncio.wait({core, stop, *edges}, return_when=asyncio.FIRST_COMPLETED)
            if core.done() and not (self._stop.is_set() and core.result() in _ORDERLY):
                code = core.result()
                _logger.error("the core process ended, ending all", extra={"exit_code": code})
                return code if code > 0 else ExitCode.FAULT
            ended = [edge.result() for edge in edges if edge.done()]
            if ended:
                return ended[0]
            _logger.info("stopping: edges first, then the core")
            return await self._stop_in_order(edges, core)
        finally:
            for task in (*edges, core, stop):
                task.cancel()
            await asyncio.wait({core, stop, *edges})
            await self._end_all()

    async def _keep_core(self) -> int:
        self._core = await self._start(Role.CORE, 0)
        return await self._core.wait()

    async def _keep_edge(self, index: int) -> int:
        """Run an edge, again and again; returns the exit code to end everything with."""
        deaths: deque[float] = deque()
        clock = asyncio.get_running_loop().time
        while True:
            process = self._edges[index] = await self._start(Role.EDGE, index)
            if self._stop.is_set():
                _order_stop(process)
            code = await process.wait()
            if self._stop.is_set():
                return code
            deaths.append(clock())
            while deaths[0] < clock() - _RESTART_WINDOW_S:
                deaths.popleft()
            extra = {"edge_index": index, "exit_code": code, "deaths": len(deaths)}
            if code in LASTING or len(deaths) > self._config.edge_restarts:
                _logger.error("an edge process cannot run, ending all", extra=extra)
                return code if code > 0 else ExitCode.FAULT
            _logger.error("an edge process ended, starting it again", extra=extra)
            if await self._stopped_within(_FIRST_PAUSE_S * 2 ** (len(deaths) - 1)):
                return ExitCode.OK

    async def _stopped_within(self, pause_s: float) -> bool:
        try:
            async with asyncio.timeout(pause_s):
                await self._stop.wait()
        except TimeoutError:
            return False
        return True

    async def _start(self, role: Role, index: int) -> asyncio.subprocess.Process:
        command = self._command(role, index)
        process = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, pass_fds=self._pass_fds
        )
        _logger.info("process started", extra={"role": role.value, "edge_index": index, "child_pid": process.pid})
        return process

    async def _stop_in_order(self, edges: Sequence["asyncio.Task[int]"], core: "asyncio.Task[int]") -> int:
        codes: list[int] = []
        for process in self._edges.values():
            _order_stop(process)
        drained, late = await asyncio.wait(edges, timeout=self._config.drain_timeout_s + _MARGIN_S)
        if late:
            _logger.error("edges did not finish their streams in time", extra={"edges": len(late)})
        codes.extend(edge.result() for edge in drained)
        if self._core is not None:
            _order_stop(self._core)
        done, slow = await asyncio.wait({core}, timeout=_MARGIN_S)
        codes.extend(task.result() for task in done)
        return ExitCode.OK if not (late or slow) and _ORDERLY.issuperset(codes) else ExitCode.FAULT

    async def _end_all(self) -> None:
        """End what still runs: politely for a short while, then not."""
        for process in self._living():
            _order_stop(process)
        waits = [asyncio.create_task(process.wait()) for process in self._living()]
        if waits:
            await asyncio.wait(waits, timeout=_END_LIMIT_S)
        for process in self._living():
            process.kill()
        if waits:
            await asyncio.wait(waits)

    def _living(self) -> list[asyncio.subprocess.Process]:
        processes = [*self._edges.values(), *([self._core] if self._core else [])]
        return [process for process in processes if process.returncode is None]


def _order_stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(STOP_ORDER)


@contextlib.contextmanager
def _stop_signals(supervisor: Supervisor) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, supervisor.request_stop)
    try:
        yield
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


@contextlib.contextmanager
def _lifeline() -> Iterator[int]:
    """The read end of a pipe whose write end only this process holds."""
    read_end, write_end = os.pipe()
    try:
        yield read_end
    finally:
        os.close(read_end)
        os.close(write_end)


@contextlib.contextmanager
def _socket_folder(config: ProcessConfig) -> Iterator[Path]:
    """A new folder that only this user may enter.

    Raises:
        InvalidRequest: it cannot be made, or its path is too long for a socket.
    """
    with contextlib.ExitStack() as held:
        try:
            folder = held.enter_context(private_folder(config.socket_dir))
        except OSError as error:
            message = f"the socket folder cannot be made: {error.strerror}"
            raise InvalidRequest(message, field="socket_dir") from error
        size = len(os.fsencode(folder / "core.sock"))
        if size > _MAX_SOCKET_PATH_BYTES:
            message = f"the socket's path has {size} bytes, the system's limit is {_MAX_SOCKET_PATH_BYTES}"
            raise InvalidRequest(message, field="socket_dir")
        yield folder


@contextlib.contextmanager
def _shared_ports(config: SchedulerConfig) -> Iterator[list[str]]:
    """Flags with the edges' common ports, each proved free and then held. A single edge proves its ports itself.

    Raises:
        PortInUse, CannotListen: a port cannot be had.
    """
    wanted = {"--port": config.edge.port, "--http-port": config.edge.http_port}
    flags: list[str] = []
    with contextlib.ExitStack() as held:
        for flag, port in wanted.items():
            if config.process.edges > 1 and port is not None:
                prove_port_free(config.edge.host, port)
                holder = held.enter_context(bound_socket(config.edge.host, port, shares_port=True))
                flags += [flag, str(holder.getsockname()[1])]
        yield flags
