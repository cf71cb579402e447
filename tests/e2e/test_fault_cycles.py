"""A few fault cycles on real processes, as many as fit a test run; `make campaign` runs all kinds, again and again."""

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.fault_cycles import FaultCycles, Strike
from tests.support.struck_group import struck_group

pytestmark = pytest.mark.timeout(240)
WORKERS = 3
STRIKES = {
    "processes": [
        Strike.KILL,
        Strike.STOP_SHORT,
        Strike.SLOW,
        Strike.HELD_INTERPRETER,
        Strike.VANISH,
        Strike.SCHEDULER,
        Strike.POISON,
    ],
    "links": [Strike.STALL, Strike.RESET, Strike.CORRUPT, Strike.HALF_OPEN],
}


@pytest.mark.parametrize("kind", STRIKES)
async def test_single_faults_cost_no_caller_a_token(tmp_path, kind):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    with struck_group(workers=WORKERS, cache=tmp_path, has_proxies=kind == "links") as group:
        cycles = FaultCycles(group.server, workers=WORKERS, seed=7, proxies=group.proxies)
        report = await cycles.run(STRIKES[kind])
    assert not report.wrong, report.text() + "\n" + "\n".join(report.wrong)
    assert report.strikes.total() == len(STRIKES[kind])
