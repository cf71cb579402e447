"""A few fault cycles on real processes, as many as fit a test run; `make campaign` runs all kinds, again and again."""

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.fault_cycles import STRIKES, FaultCycles, Strike
from tests.support.net_spaces import NoNetSpaces
from tests.support.struck_group import Ways, struck_group

pytestmark = pytest.mark.timeout(240)
WORKERS = 3
CHOSEN = {
    Ways.DIRECT: (
        Strike.KILL,
        Strike.STOP_SHORT,
        Strike.SLOW,
        Strike.HELD_INTERPRETER,
        Strike.VANISH,
        Strike.SCHEDULER,
        Strike.POISON,
        Strike.ROLLING,
    ),
    Ways.PROXIES: (Strike.STALL, Strike.RESET, Strike.CORRUPT, Strike.HALF_OPEN),
}


async def struck(tmp_path, ways, strikes):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    with struck_group(workers=WORKERS, cache=tmp_path, ways=ways) as group:
        report = await FaultCycles(group, seed=7).run(list(strikes))
    assert not report.wrong, report.text() + "\n" + "\n".join(report.wrong)
    assert report.strikes.total() == len(strikes)


@pytest.mark.parametrize("ways", CHOSEN, ids=lambda ways: ways.name.lower())
async def test_single_faults_cost_no_caller_a_token(tmp_path, ways):
    await struck(tmp_path, ways, CHOSEN[ways])


async def test_partitions_cost_no_caller_a_token(tmp_path):
    """A worker behind blackhole routes stays there until the streams have ended elsewhere; callers come back."""
    try:
        await struck(tmp_path, Ways.SPACES, STRIKES[Ways.SPACES])
    except NoNetSpaces as error:
        pytest.skip(f"no partitions: {error}")


def test_every_fault_is_struck_in_some_way():
    struck_in = [strike for strikes in STRIKES.values() for strike in strikes]
    assert sorted(struck_in) == sorted(Strike)
