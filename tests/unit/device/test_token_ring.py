import numpy as np
import pytest
import torch

from protos.wire.enums import RowStatus
from protos.wire.result import ResultColumns
from tests.support.plans import i32, u8, u32, u64
from worker_svc.device.token_ring import TokenRing, Wanted

GIVEN = {"seqs": 5, "rows": 1, "handles": 71, "attempts": 2, "positions": 31}
"""What plan 5 gave in row 1: token 901."""


def columns(token_ids=(900, 901, 0), statuses=("TOKEN", "TOKEN", "FAILED")):
    return ResultColumns(
        handles=u64(70, 71, 72)[: len(token_ids)],
        attempts=u32(2, 2, 2)[: len(token_ids)],
        positions=i32(20, 30, 40)[: len(token_ids)],
        statuses=u8(*(RowStatus[status] for status in statuses)),
        token_ids=i32(*token_ids),
    )


def ring_of(*seqs, num_plans=4):
    ring = TokenRing(num_plans=num_plans, max_rows=8, device=torch.device("cpu"))
    for seq in seqs:
        ring.keep(seq, columns())
    return ring


def wanted(*references):
    dtypes = {"seqs": np.uint64, "rows": np.uint32, "handles": np.uint64, "attempts": np.uint32, "positions": np.int64}
    return Wanted(
        **{name: np.array([reference[name] for reference in references], kind) for name, kind in dtypes.items()}
    )


def test_tokens_of_several_plans_come_in_the_order_of_the_references():
    ring = ring_of(4, 5)
    first = GIVEN | {"rows": 0, "handles": 70, "positions": 21}
    found = ring.find(wanted(GIVEN, first | {"seqs": 4}, GIVEN | {"seqs": 4}))
    assert found.is_found.tolist() == [True, True, True]
    assert found.ids.tolist() == [901, 900, 901]
    assert found.ids.dtype == torch.int32


@pytest.mark.parametrize(
    "change",
    [
        {"seqs": 4},  # never ran
        {"seqs": 1},  # left the ring: plan 5 has its place
        {"seqs": 9},  # would have that place later
        {"rows": 7},  # no such row in that plan
        {"rows": 2, "handles": 72, "positions": 41},  # failed
        {"handles": 70},
        {"attempts": 1},
        {"positions": 30},
        {"positions": 32},
    ],
)
def test_what_is_not_exactly_the_token_is_not_found_and_its_neighbours_are(change):
    found = ring_of(1, 5).find(wanted(GIVEN, GIVEN | change, GIVEN))
    assert found.is_found.tolist() == [True, False, True]
    assert found.ids.tolist() == [901, 0, 901]


def test_rows_that_sampled_nothing_and_plans_without_rows_give_nothing():
    ring = ring_of()
    ring.keep(5, columns((900, 0), ("TOKEN", "NONE")))
    assert not ring.find(wanted(GIVEN)).is_found.any()
    ring.keep(6, columns((), ()))
    assert not ring.find(wanted(GIVEN | {"seqs": 6})).is_found.any()


def test_the_ring_holds_its_number_of_plans_and_no_more():
    ring = ring_of(*range(1, 10), num_plans=3)
    kept = [seq for seq in range(1, 12) if ring.find(wanted(GIVEN | {"seqs": seq})).is_found[0]]
    assert kept == [7, 8, 9]


def test_a_cleared_ring_holds_nothing():
    ring = ring_of(5)
    ring.clear()
    assert not ring.find(wanted(GIVEN)).is_found.any()


def test_found_ids_are_no_view_of_the_ring():
    ring = ring_of(5)
    found = ring.find(wanted(GIVEN))
    for seq in range(6, 10):
        ring.keep(seq, columns((1, 2, 3)))
    assert found.ids.tolist() == [901]
