"""A real Prometheus scrapes a real run of simulated workers: targets are up, and panels return data."""

import asyncio
import contextlib
import json
import shutil
import subprocess
import time
import urllib.parse
import urllib.request

import pytest

from k8s.observability.boards import BOARDS
from k8s.observability.observe import commands, prometheus_config
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from tests.support.served import served

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(180),
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="prometheus is missing: make setup-system"),
]
LIMIT_S = 60.0
# Panels of things that do not happen in a short, healthy run on a device without graphs.
EMPTY = {
    *("Refusals by reason", "What requests wait for", "Grammar processes", "Losses and refused attaches"),
    *("Plans not run, by answer", "Replays by bucket", "Padding share by bucket", "Padded and real tokens"),
    *("Capture progress", "Captured graphs and failures", "Graph memory", "Time spent on captures"),
}


def ask(port, path, **query):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        return json.load(answer)


@contextlib.contextmanager
def prometheus(folder, config, port):
    (command,) = commands(folder, config, port=port, alertmanager_port=None)
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def traffic(target):
    async with AsyncGenerationClient(target) as client:

        async def one(number):
            options = GenerateOptions(max_tokens=20, temperature=0.0, ignore_eos=True)
            async for _ in client.stream(TokenIds(tuple(range(40, 80 + number))), options):
                pass

        await asyncio.gather(*(one(number) for number in range(8)))


def filled(expr):
    """The expression with the board's variables at All."""
    for variable in ("namespace", "model", "worker"):
        expr = expr.replace(f"${variable}", ".*")
    return expr.replace("$__rate_interval", "30s")


def empty_panels(port):
    """Titles of panels none of whose queries returns a series; None while Prometheus does not answer yet."""
    try:
        return _empty_panels(port)
    except OSError:
        return None


def _empty_panels(port):
    return {
        panel.title
        for board in BOARDS
        for row in board.rows
        for panel in row.panels
        if not any(ask(port, "/api/v1/query", query=filled(query.expr))["data"]["result"] for query in panel.queries)
    }


def test_every_panel_has_data_of_a_real_run(tmp_path, free_port):
    port = free_port()
    with served(device="simulated") as server:
        ports = server.options.ports
        targets = {
            "forwardplane-scheduler": [f"127.0.0.1:{ports.metrics_port}", f"127.0.0.1:{ports.edge_metrics_port}"],
            "forwardplane-worker": [f"127.0.0.1:{ports.worker_metrics_port}"],
        }
        config = prometheus_config(targets, alertmanager=None, interval="1s")
        with prometheus(tmp_path, config, port):
            end = time.monotonic() + LIMIT_S
            empty = None
            while empty is None or not empty <= EMPTY:
                assert time.monotonic() < end, f"without data: {empty}"
                asyncio.run(traffic(server.target))
                time.sleep(1)
                empty = empty_panels(port)
            up = ask(port, "/api/v1/query", query="up")["data"]["result"]
            assert [sample["value"][1] for sample in up] == ["1", "1", "1"]
            rules = ask(port, "/api/v1/rules")["data"]["groups"]
            broken = [rule["name"] for group in rules for rule in group["rules"] if rule.get("lastError")]
            assert not broken
            firing = [alert["labels"]["alertname"] for alert in ask(port, "/api/v1/alerts")["data"]["alerts"]]
            assert "ForwardplaneNoServingWorker" not in firing
