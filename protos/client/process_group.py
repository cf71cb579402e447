"""Starts a scheduler and its workers as separate processes in one process group, and stops them in order.

Imports neither service: each is `python -m …` in a new interpreter. The group is apart from the terminal's, so that
Ctrl-C reaches the command alone and the scheduler drains before its workers leave. A child that loses its parent is
told to stop by the kernel.
"""

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2

from protos.service.lifecycle import LASTING
from protos.wire.errors import EngineError, FaultError, InvalidRequest, UnavailableError

POLL_S = 0.05
MAX_RESTARTS = 5
RESTART_WINDOW_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceCommand:
    """One process of the group, in start order."""

    name: str
    arguments: tuple[str, ...]
    """After the interpreter: `-m worker_svc --port …`."""
    health_target: str
    """`HOST:PORT` of its plaintext health port."""
    health_service: str
    """Full name of the gRPC service that must be SERVING."""

    restarts: bool = False
    """Whether the others can go on while it is started again."""


@dataclass(slots=True)
class _Child:
    command: ServiceCommand
    process: "subprocess.Popen[bytes]"


@dataclass(slots=True)
class ProcessGroup:
    """Owns the children from start to stop. Not thread-safe; used by one command."""

    stop_timeout_s: float = 40.0
    max_restarts: int = MAX_RESTARTS
    """Within `RESTART_WINDOW_S`."""
    notice: Callable[[str], None] = field(default=lambda _: None)
    """Told what happens to children, in short sentences."""
    _children: list[_Child] = field(default_factory=list)
    _restarts: deque[float] = field(default_factory=deque)
    _group: int = 0

    def start(self, commands: Sequence[ServiceCommand]) -> None:
        """Start all, without waiting for health."""
        for command in commands:
            self._children.append(_Child(command, self._spawn(command)))

    def wait_serving(self, *, timeout_s: float, progress: Callable[[str, float], None]) -> None:
        """Return once every child's service is SERVING; calls `progress(name of the one waited for, seconds)`.

        Raises:
            InvalidRequest, FaultError: a child ended first, as `check_alive`.
            UnavailableError: the time ran out.
        """
        begin = time.monotonic()
        for child in self._children:
            self.check_alive()
            while not _is_serving(child.command):
                elapsed_s = time.monotonic() - begin
                self.check_alive()
                if elapsed_s > timeout_s:
                    raise UnavailableError(f"{child.command.name} was not serving within {timeout_s:g} s")
                progress(child.command.name, elapsed_s)
                time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise when a child has ended.

        Raises:
            InvalidRequest: names the child, which refused its settings, files or ports; its log says which.
            FaultError: names the child and its exit code.
        """
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise _ended(child.command.name, code)

    def supervise(self) -> None:
        """Start children again that may be and that a fault ended; the others' end is everybody's.

        Raises:
            InvalidRequest, FaultError: a child ended that cannot be started again, or too many did within a minute.
        """
        for child in self._children:
            code = child.process.poll()
            if code is None:
                continue
            error = _ended(child.command.name, code)
            if not child.command.restarts or code in LASTING or not self._may_restart():
                raise error
            self.notice(f"{error.message}; starting it again")
            child.process = self._spawn(child.command)

    def pids(self) -> list[int]:
        """Process ids of the children, in start order."""
        return [child.process.pid for child in self._children]

    def stop(self) -> int:
        """End all in reverse order of start, politely first. Returns the worst exit code, 0 when all were clean.

        A child that the signal itself ended had only just been started: there was nothing it could leave undone.
        """
        worst = 0
        for child in reversed(self._children):
            is_told = child.process.poll() is None
            if is_told:
                child.process.send_signal(signal.SIGTERM)
            try:
                code = child.process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                child.process.kill()
                code = child.process.wait()
            worst = worst or (0 if is_told and code == -signal.SIGTERM else code)
        self._children.clear()
        self._group = 0
        return worst

    def kill(self) -> None:
        """End all at once. Safe in a signal handler while `stop` waits."""
        for child in self._children:
            child.process.kill()

    def _spawn(self, command: ServiceCommand) -> "subprocess.Popen[bytes]":
        has_group = any(child.process.poll() is None for child in self._children)
        process = subprocess.Popen(
            [sys.executable, "-m", "protos.client.tethered", str(os.getpid()), *command.arguments],
            process_group=self._group if has_group else 0,
            stdin=subprocess.DEVNULL,
        )
        self._group = self._group if has_group else process.pid
        return process

    def _may_restart(self) -> bool:
        now = time.monotonic()
        while self._restarts and now - self._restarts[0] >= RESTART_WINDOW_S:
            self._restarts.popleft()
        self._restarts.append(now)
        return len(self._restarts) <= self.max_restarts


def _ended(name: str, code: int) -> EngineError:
    """What a child's end is to whoever started it: a refusal, which only other settings or files mend, or a fault."""
    message = f"{name} ended with exit code {code}"
    return InvalidRequest(f"{message}: it was refused, see above") if code in LASTING else FaultError(message)


def _is_serving(command: ServiceCommand) -> bool:
    with grpc.insecure_channel(command.health_target, options=[("grpc.enable_http_proxy", 0)]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = check(health_pb2.HealthCheckRequest(service=command.health_service), timeout=1.0)
        except grpc.RpcError:
            return False
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
