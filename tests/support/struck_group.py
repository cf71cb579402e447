"""Served groups for fault cycles: simulated workers that can be hurt, and what their links run through."""

import contextlib
import dataclasses
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from protos.client.process_group import ServiceCommand
from protos.client.serve_command import ServeOptions, SimulatedOptions
from tests.support.net_spaces import NetSpaces, net_spaces
from tests.support.served import Served, served
from tests.support.small_disk import small_disk
from tests.support.tcp_proxy import TcpProxy, proxied

STEP_MS = 5.0
SCHEDULER = "sched"
"""Its network namespace."""
SCHEDULER_NAME = "scheduler"
"""Its command."""


class Ways(Enum):
    """What lies between the processes."""

    DIRECT = "nothing"
    PROXIES = "a proxy between the scheduler and each worker; its port answers even while nobody listens behind it"
    SPACES = "routes between network namespaces of callers, scheduler and each worker"
    SMALL_DISK = "nothing, and their temporary files are on a small disk of their own"


@dataclasses.dataclass(frozen=True)
class StruckGroup:
    """A group, and what its links run through."""

    server: Served
    proxies: list[TcpProxy]
    """By worker."""
    spaces: NetSpaces | None
    disk: Path | None

    @property
    def target(self) -> str:
        """Where callers find it."""
        if self.spaces is None:
            return self.server.target
        return f"{self.spaces.address(SCHEDULER)}:{self.server.options.ports.port}"


@contextlib.contextmanager
def struck_group(*, workers: int, cache: Path, ways: Ways = Ways.DIRECT) -> Iterator[StruckGroup]:
    """Needs the simulated model in the cache.

    Raises:
        NoNetSpaces, NoSmallDisk: it cannot be had here.
    """
    with contextlib.ExitStack() as stack:
        proxies: list[TcpProxy] = []
        spaces, disk = None, None
        if ways is Ways.SPACES:
            spaces = stack.enter_context(net_spaces(SCHEDULER, *map(worker_end, range(workers))))
        if ways is Ways.SMALL_DISK:
            disk = stack.enter_context(small_disk())

        def arrange(options: ServeOptions, command: ServiceCommand) -> ServiceCommand:
            command = _with_argument(command, "worker_svc", "tests.support.struck_worker")
            if spaces is not None:
                return _in_space(command, options, spaces)
            if ways is Ways.PROXIES and command.name == SCHEDULER_NAME:
                ports = [options.ports.worker_port + number for number in range(workers)]
                proxies.extend(stack.enter_context(proxied(ports)))
                return _with_workers(command, [f"127.0.0.1:{proxy.port}" for proxy in proxies])
            return command

        simulated = SimulatedOptions(simulated_step_ms=STEP_MS)
        choices = {"device": "simulated", "workers": workers, "model_cache": cache, "numerics": "fast"}
        server = stack.enter_context(served(arrange=arrange, simulated=simulated, **choices))
        yield StruckGroup(server, proxies, spaces, disk)


def worker_end(number: int) -> str:
    """A worker's network namespace."""
    return f"w{number}"


def _in_space(command: ServiceCommand, options: ServeOptions, spaces: NetSpaces) -> ServiceCommand:
    """The process in its namespace, reached under that one's address."""
    if command.name == SCHEDULER_NAME:
        end = SCHEDULER
        found = [f"{spaces.address(worker_end(i))}:{options.ports.worker_port + i}" for i in range(options.workers)]
        command = _with_workers(command, found)
    else:
        end = worker_end(int(command.name.removeprefix("worker ")))
    return dataclasses.replace(
        command,
        arguments=(
            *("-m", "tests.support.net_spaces", spaces.space(end), *command.arguments),
            *("--host", spaces.address(end), "--insecure"),
        ),
        health_target=f"{spaces.address(end)}:{command.health_target.rpartition(':')[2]}",
    )


def _with_workers(command: ServiceCommand, addresses: list[str]) -> ServiceCommand:
    before = command.arguments[command.arguments.index("--workers") + 1]
    return _with_argument(command, before, ",".join(addresses))


def _with_argument(command: ServiceCommand, old: str, new: str) -> ServiceCommand:
    return dataclasses.replace(command, arguments=tuple(new if part == old else part for part in command.arguments))
