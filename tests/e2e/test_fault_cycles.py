"""A few fault cycles on real processes, as many as fit a test run; `make campaign` runs more."""

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.fault_cycles import FaultCycles, Strike
from tests.support.served import served

pytestmark = pytest.mark.timeout(240)
WORKERS = 3


async def test_single_faults_cost_no_caller_a_token(tmp_path):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    simulated = SimulatedOptions(simulated_step_ms=5.0)
    with served(
        device="simulated", workers=WORKERS, model_cache=tmp_path, simulated=simulated, numerics="fast"
    ) as server:
        report = await FaultCycles(server, workers=WORKERS, seed=7).run(list(Strike))
    assert not report.wrong, report.text() + "\n" + "\n".join(report.wrong)
    assert report.strikes.total() == len(Strike)
