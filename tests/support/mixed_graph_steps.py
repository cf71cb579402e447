"""Decode and prefill steps that take turns, of sizes at the buckets and beside them: replayed, and eagerly beside."""

from collections.abc import Sequence

from protos.wire.buckets import choose_bucket
from protos.wire.enums import ForwardMode, GraphPhase, GraphRefusal
from protos.wire.plan import GraphChoice
from protos.wire.worker_info import Buckets
from tests.support.forwards import ForwardDriver, Row
from tests.support.graph_bench import GraphBench, same

BACKENDS = (("full", "breakable"), ("breakable", "full"))
"""Of decode and of prefill."""
DECODE, PREFILL, SLOTS = (1, 2, 4), (16, 32), 4
STEPS = (
    ("decode", [1] * 4),
    ("prefill", [17]),
    ("decode", [1]),
    ("decode", [1] * 2),
    ("prefill", [10, 5]),
    ("decode", [1] * 3),
    ("prefill", [1, 20, 1, 9]),
    ("decode", [1] * 4),
    ("prefill", [16]),
    ("decode", [1]),
    ("prefill", [2, 30]),
)
"""Every bucket after every other, sizes at a bucket and one to either side of it."""
BEYOND = (("prefill", [33], GraphRefusal.OVER_MAX_TOKENS), ("decode", [1] * 5, GraphRefusal.OVER_MAX_ROWS))
ROOM = 150
"""Tokens that a row needs behind those it has."""


def chosen(phase: str, lens: Sequence[int]) -> GraphChoice | GraphRefusal:
    """The bucket that a scheduler would name."""
    mode = ForwardMode.DECODE if phase == "decode" else ForwardMode.EXTEND
    live = (
        Buckets(phase=GraphPhase.DECODE, sizes=DECODE, live=DECODE, slots=0),
        Buckets(phase=GraphPhase.PREFILL, sizes=PREFILL, live=PREFILL, slots=SLOTS),
    )
    return choose_bucket(live, mode=mode, num_rows=len(lens), num_tokens=sum(lens))


def assert_replays_equal_eager_steps(driver: ForwardDriver, rows: Sequence[Row], backends: tuple[str, str]) -> None:
    """Bit for bit, with garbage in every shared buffer before each replay. `rows` are four, each with `ROOM`."""
    bench = GraphBench(driver=driver, backends=backends, decode=DECODE, prefill=PREFILL, slots=SLOTS)
    bench.capture()
    used = []
    for number, (phase, lens) in enumerate(STEPS):
        choice = chosen(phase, lens)
        assert isinstance(choice, GraphChoice)
        used.append(choice.bucket)
        group = [rows[(number + index) % 4] for index in range(len(lens))]
        batch = bench.batch(group, lens, bucket=choice.bucket)
        known = bench.eager(batch)
        bench.buffers.poison(number + 1)
        assert same(bench.replay(batch), known)
        for row, length in zip(group, lens, strict=True):
            row.kv_len += length
    assert set(used) == {*DECODE, *PREFILL}
    assert all(chosen(phase, lens) is reason for phase, lens, reason in BEYOND)
