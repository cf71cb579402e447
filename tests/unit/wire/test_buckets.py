import json
from pathlib import Path

import pytest

from protos.wire.buckets import choose_bucket
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets

VECTORS = json.loads((Path(__file__).parents[2] / "golden" / "execution_vectors.json").read_text())["bucket"]
REFUSALS = {"over_max": GraphRefusal.OVER_MAX_TOKENS, "bucket_too_large": GraphRefusal.BUCKET_TOO_LARGE}

DECODE = Buckets(phase=GraphPhase.DECODE, sizes=(1, 2, 4, 8), live=(1, 2, 4))
PREFILL = Buckets(phase=GraphPhase.PREFILL, sizes=(16, 32, 64), live=(16, 32), slots=4)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: str(case["real_tokens"]))
def test_prefill_vectors(case):
    sizes = tuple(case["prefill_buckets"])
    buckets = [Buckets(phase=GraphPhase.PREFILL, sizes=sizes, live=sizes, slots=8)]
    expected = REFUSALS.get(case["refusal"]) or GraphChoice(phase=GraphPhase.PREFILL, bucket=case["bucket"])
    for mode in (ForwardMode.EXTEND, ForwardMode.MIXED):
        assert choose_bucket(buckets, mode=mode, num_rows=3, num_tokens=case["real_tokens"]) == expected


@pytest.mark.parametrize(
    ("mode", "num_rows", "num_tokens", "expected"),
    [
        (ForwardMode.DECODE, 1, 1, 1),
        (ForwardMode.DECODE, 3, 3, 4),
        (ForwardMode.DECODE, 8, 8, GraphRefusal.NOT_CAPTURED_YET),
        (ForwardMode.DECODE, 9, 9, GraphRefusal.OVER_MAX_ROWS),
        (ForwardMode.EXTEND, 1, 8, 16),
        (ForwardMode.EXTEND, 1, 7, GraphRefusal.BUCKET_TOO_LARGE),
        (ForwardMode.MIXED, 4, 17, 32),
        (ForwardMode.MIXED, 5, 17, GraphRefusal.TOO_MANY_SLOTS),
        (ForwardMode.EXTEND, 1, 40, GraphRefusal.NOT_CAPTURED_YET),
        (ForwardMode.EXTEND, 1, 65, GraphRefusal.OVER_MAX_TOKENS),
        (ForwardMode.IDLE, 0, 0, GraphRefusal.MODE),
        (ForwardMode.TARGET_VERIFY, 2, 8, GraphRefusal.MODE),
    ],
)
def test_choice_or_reason(mode, num_rows, num_tokens, expected):
    choice = choose_bucket([DECODE, PREFILL], mode=mode, num_rows=num_rows, num_tokens=num_tokens)
    assert (choice.bucket if isinstance(choice, GraphChoice) else choice) == expected


def test_without_graphs_the_reason_is_disabled():
    empty = Buckets(phase=GraphPhase.DECODE, sizes=(), live=())
    for buckets in ([], [PREFILL], [empty, PREFILL]):
        choice = choose_bucket(buckets, mode=ForwardMode.DECODE, num_rows=1, num_tokens=1)
        assert choice is GraphRefusal.DISABLED
    assert choose_bucket([], mode=ForwardMode.IDLE, num_rows=0, num_tokens=0) is GraphRefusal.DISABLED
