"""Exposition of one process's metrics over HTTP, and the rules for names.

Declares no metric: each service has its own `metrics.py`. Guards: a process exports one registry of its own.
"""

import re
from collections.abc import Sequence
from threading import Thread
from wsgiref.simple_server import WSGIServer

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Metric,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from protos.service.server import listen_error

_STANDARD_PREFIXES = ("process_", "python_")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*")
_UNITS = ("seconds", "bytes", "ratio")
_COUNTED = ("tokens", "rows", "pages", "requests", "plans")
_BAD_WORDS = {"ms", "us", "ns", "millis", "milliseconds", "microseconds", "kb", "mb", "gb", "kib", "mib", "percent"}
_BAD_LABELS = {"request_id", "client_tag", "prompt", "text", "tenant", "user", "plan_seq"}


class MetricsServer:
    """The registry of this process and its scrape endpoint.

    Made by `app.py`, which hands `registry` to the service's metric definitions; lives until the process ends.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._running: tuple[WSGIServer, Thread] | None = None

    def start(self, host: str, port: int) -> int:
        """Serve /metrics in a thread of its own; the port (0 asks for any free one).

        Raises:
            PortInUse: another process listens there.
            CannotListen: the address cannot be used.
        """
        assert self._running is None, "started twice"
        try:
            self._running = start_http_server(port, addr=host, registry=self.registry)
        except OSError as error:
            raise listen_error(error, host, port) from None
        return self._running[0].server_port

    def stop(self) -> None:
        """Close the port and wait for the thread: at most half a second, so not to be called on an event loop."""
        if self._running is not None:
            server, thread = self._running
            server.shutdown()
            server.server_close()
            thread.join()
            self._running = None


def naming_problems(registry: CollectorRegistry, prefix: str) -> list[str]:
    """One line for each breach of the naming rules by a metric of ours; tests ask for none."""
    problems: list[str] = []
    for family in registry.collect():
        if not family.name.startswith(_STANDARD_PREFIXES):
            problems += [f"{family.name}: {problem}" for problem in _family_problems(family, prefix)]
    return problems


def _family_problems(family: Metric, prefix: str) -> list[str]:
    words = family.name.split("_")
    rules = {
        f"does not start with {prefix}": family.name.startswith(prefix),
        "is not snake_case": _NAME.fullmatch(family.name) is not None,
        "has no help": bool(family.documentation.strip()),
        "has a unit that is no base unit": not _BAD_WORDS.intersection(words),
        "has its unit in the middle": not set(_UNITS).intersection(words[:-1]),
        "is a histogram without a unit at its end": family.type != "histogram" or words[-1] in (*_UNITS, *_COUNTED),
        "ends in a suffix of its type": words[-1] not in ("total", "info", "count", "sum", "bucket", "created"),
        "has a label of unbounded or private values": not _BAD_LABELS.intersection(_labels(family)),
    }
    return [problem for problem, holds in rules.items() if not holds]


def _labels(family: Metric) -> Sequence[str]:
    return [label for sample in family.samples for label in sample.labels]
