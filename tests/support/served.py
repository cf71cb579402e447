"""Real services as processes for end-to-end tests: the same commands that `forwardplane serve` runs, on free ports."""

import contextlib
import dataclasses
import socket
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import psutil
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from rich.console import Console

from protos.client.process_group import ProcessGroup, ServiceCommand
from protos.client.serve_command import ServeOptions, ServePorts, resolve_model, service_commands
from protos.client.serve_execution import ServeExecution
from tests.support.audited import audit

MANY_RESTARTS = 1000
Arrangement = Callable[[ServeOptions, ServiceCommand], ServiceCommand]
PORT_FIELDS = (
    "port",
    "http_port",
    "health_port",
    "metrics_port",
    "edge_metrics_port",
    "worker_port",
    "worker_health_port",
    "worker_metrics_port",
)


@dataclasses.dataclass(frozen=True)
class Served:
    """A running group and where to find it."""

    options: ServeOptions
    group: ProcessGroup

    @property
    def target(self) -> str:
        return f"127.0.0.1:{self.options.ports.port}"

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.options.ports.http_port}/v1"

    def processes(self) -> list[psutil.Process]:
        """Every process of the group, children of children included."""
        roots = [psutil.Process(pid) for pid in self.group.pids()]
        return [process for root in roots for process in (root, *root.children(recursive=True))]

    def command_lines(self) -> dict[psutil.Process, list[str]]:
        """Of those that still ran when they were looked at; some come and go."""
        lines = {}
        for process in self.processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                lines[process] = process.cmdline()
        return lines


def free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, each the first of a run of four so that `+ index` is free as well."""
    ports: list[int] = []
    with contextlib.ExitStack() as stack:
        while len(ports) < count:
            held = stack.enter_context(socket.socket())
            held.bind(("127.0.0.1", 0))
            port = held.getsockname()[1]
            if all(abs(port - other) > 4 for other in ports) and all(_is_free(port + index) for index in (1, 2, 3)):
                ports.append(port)
    return ports


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except (OSError, OverflowError):
            return False
        return True


def on_free_ports(options: ServeOptions) -> ServeOptions:
    ports = dict(zip(PORT_FIELDS, free_ports(len(PORT_FIELDS)), strict=True))
    return dataclasses.replace(options, ports=ServePorts(**ports))


@contextlib.contextmanager
def served(**choices: object) -> Iterator[Served]:
    """As `_served`, with each process watched for code that comes from data (S1)."""
    with audit() as audited, _served(audited.watching(), **choices) as server:  # type: ignore[arg-type]
        yield server


def served_for_figures(**choices: object) -> AbstractContextManager[Served]:
    """As `_served`, for what is measured: nobody watches."""
    return _served(contextlib.nullcontext(), **choices)  # type: ignore[arg-type]


@contextlib.contextmanager
def _served(
    around_start: AbstractContextManager[None],
    *,
    worker_flags: tuple[str, ...] = (),
    scheduler_flags: tuple[str, ...] = (),
    arrange: Arrangement | None = None,
    **choices: object,
) -> Iterator[Served]:
    """Serve the default model with `choices` of ServeOptions; stops everything at the end and checks the exit code.

    Graphs are off unless they are chosen: capturing takes the cores that the tests share.

    Args:
        around_start: is open while the processes are started for the first time.
        worker_flags: more flags of the workers, such as ServeOptions has no choice for.
        scheduler_flags: more flags of the scheduler.
        arrange: puts something of its own in a command's place, once the ports are chosen.
        choices: fields of ServeOptions.
    """
    defaults = {"numerics": "reproducible", "execution": ServeExecution(graph="off")}
    chosen = on_free_ports(ServeOptions(**{**defaults, **choices}))  # type: ignore[arg-type]
    with tempfile.TemporaryDirectory() as folder:
        options = dataclasses.replace(chosen, files=chosen.files.with_key(Path(folder)))
        commands = service_commands(options, resolve_model(options, Console(quiet=True)))
        if arrange is not None:
            commands = [arrange(options, command) for command in commands]
        flags = {True: worker_flags, False: scheduler_flags}
        yield from _running(
            options,
            [
                dataclasses.replace(command, arguments=(*command.arguments, *flags[command.name.startswith("worker")]))
                for command in commands
            ],
            around_start,
        )


def _running(
    options: ServeOptions, commands: list[ServiceCommand], around_start: AbstractContextManager[None]
) -> Iterator[Served]:
    group = ProcessGroup(max_restarts=MANY_RESTARTS)
    try:
        with around_start:
            group.start(commands)
        group.wait_serving(timeout_s=60.0, progress=lambda *_: None)
        yield Served(options, group)
        group.check_alive()
    except BaseException:
        group.stop()
        raise
    assert group.stop() == 0


def scrape(port: int) -> dict[str, list[Sample]]:
    """The samples of one process's metrics port, by name."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    found: dict[str, list[Sample]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


def total(samples: dict[str, list[Sample]], name: str, **labels: str) -> float:
    """The sum over all samples of a metric with these labels."""
    assert name in samples, f"{name} is not exported"
    return sum(
        sample.value
        for sample in samples[name]
        if all(sample.labels.get(label) == value for label, value in labels.items())
    )


def losses(server: Served) -> int:
    """How many terms of workers have ended, for whatever reason."""
    name, samples = "forwardplane_scheduler_worker_losses_total", scrape(server.options.ports.metrics_port)
    return int(total(samples, name)) if name in samples else 0
