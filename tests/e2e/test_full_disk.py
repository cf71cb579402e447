"""A full disk: nothing on the way of a request writes to one, and neither does a process that is started again."""

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.fault_cycles import FaultCycles, Strike
from tests.support.small_disk import NoSmallDisk, is_full
from tests.support.struck_group import Ways, struck_group

pytestmark = pytest.mark.timeout(120)
WORKERS = 2


async def test_a_full_tmpfs_costs_no_caller_a_token(tmp_path):
    fetch_model(SIMULATED_MODEL, cache=tmp_path)
    try:
        with struck_group(workers=WORKERS, cache=tmp_path, ways=Ways.SMALL_DISK) as group:
            report = await FaultCycles(group, seed=3).run([Strike.FULL_DISK, Strike.VANISH])
            assert is_full(group.disk)
    except NoSmallDisk as error:
        pytest.skip(str(error))
    assert not report.wrong, report.text() + "\n" + "\n".join(report.wrong)
    assert report.requests
