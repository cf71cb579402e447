"""10,000 requests on a simulated worker: what each leaves behind. And where others want the processors twice over.

python -m pytest -m bench -s tests/bench/test_bench_soak.py
"""

import time

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.serve_command import SimulatedOptions
from protos.client.serve_execution import ServeExecution
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.busy_processors import busy_processors
from tests.support.served import served_for_figures
from tests.support.soak import TOKENS, soak

pytestmark = [pytest.mark.bench, pytest.mark.timeout(1200)]
REQUESTS = 10_000
BUSY_TIMES, BUSY_S = 2, 90.0
STEPS = SimulatedOptions(simulated_step_ms=1.0)


async def test_bench_soak(tmp_path, capsys):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    with served_for_figures(device="simulated", model_cache=tmp_path, simulated=STEPS, numerics="fast") as server:
        report = await soak(server, most_requests=REQUESTS)
    with capsys.disabled():
        print(f"\n{report.text()}")
    assert not report.wrong()


async def test_bench_busy_soak_simulated(tmp_path, capsys):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    choices = {"device": "simulated", "workers": 3, "model_cache": tmp_path, "simulated": STEPS, "numerics": "fast"}
    with served_for_figures(**choices) as server, busy_processors(BUSY_TIMES):
        report = await soak(server, most_requests=REQUESTS, until=time.monotonic() + BUSY_S)
    with capsys.disabled():
        print(f"\n{BUSY_TIMES} others for each processor: {report.text()}")
    assert not report.losses


@pytest.mark.model
async def test_bench_busy_soak_while_graphs_are_captured(capsys):
    """Of the real model, from the moment it serves: pieces of a capture run between plans."""
    execution = ServeExecution(kernels="torch", graph="all")
    with served_for_figures(numerics="fast", execution=execution) as server, busy_processors(BUSY_TIMES):
        report = await soak(server, most_requests=REQUESTS, warm_up_tokens=TOKENS, until=time.monotonic() + BUSY_S)
    with capsys.disabled():
        print(f"\n{BUSY_TIMES} others for each processor, captures: {report.text()}")
    assert not report.losses
