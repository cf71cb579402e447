"""Starts a scheduler and its workers as separate processes in one process group, and stops them in order.

Imports neither service: each is `python -m …` in a new interpreter. The group is apart from the terminal's, so that
Ctrl-C reaches the command alone and the scheduler drains before its workers leave. A child that loses its parent is
told to stop by the kernel.
"""

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2

from protos.wire.errors import FaultError, UnavailableError

PR_SET_PDEATHSIG = 1
POLL_S = 0.05


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


@dataclass(slots=True)
class _Child:
    command: ServiceCommand
    process: "subprocess.Popen[bytes]"


@dataclass(slots=True)
class ProcessGroup:
    """Owns the children from start to stop. Not thread-safe; used by one command."""

    stop_timeout_s: float = 40.0
    _children: list[_Child] = field(default_factory=list)
    _group: int = 0

    def start(self, commands: Sequence[ServiceCommand]) -> None:
        """Start all, without waiting for health."""
        for command in commands:
            process = subprocess.Popen(
                [sys.executable, *command.arguments],
                process_group=self._group,
                preexec_fn=_die_with_parent,
                stdin=subprocess.DEVNULL,
            )
            self._group = self._group or process.pid
            self._children.append(_Child(command, process))

    def wait_serving(self, *, timeout_s: float, progress: Callable[[str, float], None]) -> None:
        """Return once every child's service is SERVING; calls `progress(name of the one waited for, seconds)`.

        Raises:
            FaultError: a child ended first.
            UnavailableError: the time ran out.
        """
        begin = time.monotonic()
        for child in self._children:
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
            FaultError: names the child and its exit code.
        """
        for child in self._children:
            code = child.process.poll()
            if code is not None:
                raise FaultError(f"{child.command.name} ended with exit code {code}")

    def pids(self) -> list[int]:
        """Process ids of the children, in start order."""
        return [child.process.pid for child in self._children]

    def stop(self) -> int:
        """End all in reverse order of start, politely first. Returns the worst exit code, 0 when all were clean."""
        worst = 0
        for child in reversed(self._children):
            if child.process.poll() is None:
                child.process.send_signal(signal.SIGTERM)
            try:
                code = child.process.wait(self.stop_timeout_s)
            except subprocess.TimeoutExpired:
                child.process.kill()
                code = child.process.wait()
            worst = worst or code
        self._children.clear()
        self._group = 0
        return worst


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


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
