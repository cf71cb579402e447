import numpy as np
import pytest

from protos.wire.enums import HiddenMode
from protos.wire.plan import LogprobColumns
from tests.support import plans
from tests.support.plans import i32, u8, u32, with_value
from worker_svc.batch.prompt_rows import prompt_logprob_group
from worker_svc.batch.sampled_rows import hidden_group

MIXED = plans.make_mixed_plan()
STARTS = np.array([0, 1, 2, 18, 27])


def wanting(starts, targets, tops):
    ends = np.cumsum([0, *map(len, targets)])
    columns = LogprobColumns(
        prompt_starts=i32(*starts),
        prompt_top_counts=u8(*tops),
        target_indptr=u32(*ends),
        target_ids=i32(*(token for ids in targets for token in ids)),
    )
    return with_value(MIXED, "logprobs", columns)


def test_positions_are_places_in_the_forwards_own_tokens():
    plan = wanting([21, 34, 30, 6], [[], [], [7, 8], [9, 10]], [0, 0, 3, 4])
    group = prompt_logprob_group(plan, slice(2, 4), token_starts=STARTS)
    assert group.rows.tolist() == [0, 0, 1, 1]
    assert group.token_rows.tolist() == [14, 15, 22, 23]
    assert group.target_ids.tolist() == [7, 8, 9, 10]
    assert group.top_counts.tolist() == [3, 3, 4, 4]
    group.check(num_reqs=2, num_tokens=25)
    assert not group.target_ids.flags.writeable
    assert not np.shares_memory(group.target_ids, plan.logprobs.target_ids)


def test_rows_that_want_nothing_make_no_group():
    plan = wanting([21, 34, 30, 6], [[], [], [7, 8], [9, 10]], [0, 0, 3, 4])
    assert prompt_logprob_group(plan, slice(0, 2), token_starts=STARTS) is None
    assert prompt_logprob_group(MIXED, slice(0, 4), token_starts=STARTS) is None


@pytest.mark.parametrize("server", HiddenMode)
@pytest.mark.parametrize("asked", HiddenMode)
def test_what_is_kept_is_the_maximum_of_server_and_plan(server, asked):
    plan = with_value(MIXED, "rows.hidden_modes", u8(1, asked, 1, 1))
    group = hidden_group(plan, slice(0, 4), server_mode=server)
    expected = max(server, asked)
    if expected is HiddenMode.NULL:
        assert group is None
    else:
        group.check(num_reqs=4)
        assert group.mode is expected
        assert group.modes.tolist() == [1, asked, 1, 1]


def test_a_plan_without_modes_asks_for_nothing():
    assert hidden_group(MIXED, slice(0, 4), server_mode=HiddenMode.NULL) is None
    assert hidden_group(MIXED, slice(0, 4), server_mode=HiddenMode.LAST).modes.tolist() == [1] * 4
