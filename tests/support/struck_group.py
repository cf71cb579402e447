"""Served groups for fault cycles: simulated workers that can be hurt, links through proxies."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from protos.client.process_group import ServiceCommand
from protos.client.serve_command import ServeOptions, SimulatedOptions
from tests.support.served import Served, served
from tests.support.tcp_proxy import TcpProxy, proxied

STEP_MS = 5.0


@dataclasses.dataclass(frozen=True)
class StruckGroup:
    """A group, and the proxies of its links by worker."""

    server: Served
    proxies: list[TcpProxy]


@contextlib.contextmanager
def struck_group(*, workers: int, cache: Path, has_proxies: bool = False) -> Iterator[StruckGroup]:
    """Needs the simulated model in the cache. A proxy's port answers even while nobody listens behind it."""
    with contextlib.ExitStack() as stack:
        proxies: list[TcpProxy] = []

        def arrange(options: ServeOptions, command: ServiceCommand) -> ServiceCommand:
            if command.name.startswith("worker"):
                return _replaced(command, "worker_svc", "tests.support.struck_worker")
            if not has_proxies:
                return command
            ports = [options.ports.worker_port + number for number in range(workers)]
            proxies.extend(stack.enter_context(proxied(ports)))
            before = command.arguments[command.arguments.index("--workers") + 1]
            return _replaced(command, before, ",".join(f"127.0.0.1:{proxy.port}" for proxy in proxies))

        simulated = SimulatedOptions(simulated_step_ms=STEP_MS)
        choices = {"device": "simulated", "workers": workers, "model_cache": cache, "numerics": "fast"}
        server = stack.enter_context(served(arrange=arrange, simulated=simulated, **choices))
        yield StruckGroup(server, proxies)


def _replaced(command: ServiceCommand, old: str, new: str) -> ServiceCommand:
    return dataclasses.replace(command, arguments=tuple(new if part == old else part for part in command.arguments))
