"""A core that gets no processor for seconds: its worker is not to blame, and no stream notices more than the pause."""

import threading
import time
from pathlib import Path

import psutil
import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.served import Served, scrape, served, total

pytestmark = pytest.mark.timeout(120)
STREAMS, TOKENS = 12, 120


def core_of(running: Served) -> psutil.Process:
    (core,) = [process for process, line in running.command_lines().items() if "core" in line]
    return core


def test_a_core_that_stands_still_keeps_its_worker(tmp_path: Path) -> None:
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    simulated = SimulatedOptions(simulated_step_ms=20.0)
    with served(device="simulated", model_cache=tmp_path, simulated=simulated, numerics="fast") as running:
        counts: list[int] = []

        def read(index: int) -> None:
            options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)
            with GenerationClient(running.target) as client:
                counts.append(sum(len(chunk.token_ids) for chunk in client.stream(TokenIds((1, index)), options)))

        readers = [threading.Thread(target=read, args=(index,)) for index in range(STREAMS)]
        for reader in readers:
            reader.start()
        time.sleep(0.5)
        core = core_of(running)
        # From about 2.5 s on the worker's pings are missed and the connection is cut, while plans are being written.
        for stop_s in (2.5, 3.2):
            core.suspend()
            time.sleep(stop_s)
            core.resume()
            time.sleep(0.7)
        for reader in readers:
            reader.join(30)
        assert counts == [TOKENS] * STREAMS
        samples = scrape(running.options.ports.metrics_port)
        assert "forwardplane_scheduler_worker_losses_total" not in samples
        assert total(samples, "forwardplane_scheduler_migrations_total") == 0
