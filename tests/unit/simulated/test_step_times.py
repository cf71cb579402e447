"""Step times: the default table equals its derivation, interpolation is plain, bad tables are named, sleep is exact."""

import tomllib

import numpy as np
import pytest

from protos.service.step_times import FixedStep, StepShape, read_step_times
from protos.wire.errors import InvalidRequest
from worker_svc.simulated.build import DEFAULT_TABLE
from worker_svc.simulated.device_clock import StepPacer

WEIGHTS, KV_TOKEN, BANDWIDTH, FLOPS, OTHER_MS = 16.06e9, 131_072, 0.80 * 3.35e12, 0.55 * 989.4e12, 0.4
SMALL = """
name = "small"
derivation = "made up"
kv_bytes = 1000000
kv_bytes_per_token = 10
[decode]
rows = [1, 3]
context_tokens = [0, 100]
step_ms = [[1.0, 2.0], [3.0, 6.0]]
[prefill]
tokens = [10, 20]
step_ms = [1.0, 5.0]
"""


@pytest.fixture
def small(tmp_path):
    path = tmp_path / "small.toml"
    path.write_text(SMALL)
    return path


def test_the_default_table_is_what_its_derivation_says():
    table = read_step_times(DEFAULT_TABLE, field="simulated_steps")
    rows, contexts = np.array(table.decode.rows)[:, None], np.array(table.decode.context_tokens)[None, :]
    decode = OTHER_MS + (WEIGHTS + rows * contexts * KV_TOKEN) / BANDWIDTH * 1e3
    np.testing.assert_allclose(table.decode.step_ms, decode, atol=1e-3)
    tokens = np.array(table.prefill.tokens)
    prefill = OTHER_MS + np.maximum(WEIGHTS / BANDWIDTH, tokens * WEIGHTS / FLOPS) * 1e3
    np.testing.assert_allclose(table.prefill.step_ms, prefill, atol=1e-3)
    assert (table.kv_bytes, table.kv_bytes_per_token) == (0.9 * 80e9 - WEIGHTS - 2e9, KV_TOKEN)


@pytest.mark.parametrize(
    ("shape", "milliseconds"),
    [
        (StepShape(rows=1, tokens=1, context=0), 1.0),
        (StepShape(rows=1, tokens=1, context=50), 1.5),
        (StepShape(rows=2, tokens=2, context=200), 4.0),
        (StepShape(rows=3, tokens=3, context=600), 9.0),
        (StepShape(rows=5, tokens=5, context=500), 10.0),
        (StepShape(rows=1, tokens=15, context=15), 3.0),
        (StepShape(rows=1, tokens=30, context=30), 9.0),
        (StepShape(rows=0, tokens=0, context=0), 0.0),
    ],
)
def test_steps_lie_on_the_lines_between_and_beyond_the_entries(small, shape, milliseconds):
    assert read_step_times(small, field="simulated_steps").step_s(shape) == pytest.approx(milliseconds / 1e3)


def test_a_fixed_step_is_fixed_and_an_idle_plan_is_free():
    cost = FixedStep(5.0)
    assert cost.step_s(StepShape(rows=9, tokens=900, context=9000)) == 0.005
    assert cost.step_s(StepShape(rows=0, tokens=0, context=0)) == 0.0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        (SMALL.replace("[1, 3]", "[3, 1]"), "rows must rise"),
        (SMALL.replace("[3.0, 6.0]", "[3.0]"), "2 lists of 2"),
        (SMALL.replace("[1.0, 5.0]", "[1.0]"), "2 numbers"),
        (SMALL.replace("[1.0, 5.0]", "[1.0, -5.0]"), "prefill.step_ms"),
        (SMALL.replace("[1.0, 5.0]", "[1.0, nan]"), "prefill.step_ms"),
        (SMALL + "extra = 1", "extra"),
        (SMALL.replace('name = "small"', ""), "name"),
        ("not toml", "no TOML"),
    ],
)
def test_a_bad_table_is_refused_by_the_entry(small, wrong, named):
    small.write_text(wrong)
    with pytest.raises(InvalidRequest, match=named):
        read_step_times(small, field="simulated_steps")


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(InvalidRequest, match=r"none\.toml cannot be read"):
        read_step_times(tmp_path / "none.toml", field="simulated_steps")
    assert tomllib.loads(SMALL)["name"] == "small"


class FakeClock:
    """Sleeps `late_s` too long each time."""

    def __init__(self, late_s=0.0):
        self.time_s = 100.0
        self.late_s = late_s
        self.slept = []

    def now_s(self):
        return self.time_s

    def sleep_s(self, seconds):
        self.slept.append(seconds)
        self.time_s += seconds + self.late_s


def test_a_step_ends_at_its_deadline_whatever_the_host_did_meanwhile():
    clock = FakeClock()
    pacer = StepPacer(clock)
    pacer.begin()
    clock.time_s += 0.002
    assert pacer.finish(0.005) == pytest.approx(0.005)
    assert clock.slept == [pytest.approx(0.003)]


def test_a_late_wake_up_is_taken_from_the_next_step_and_a_gap_is_not():
    clock = FakeClock(late_s=0.0001)
    pacer = StepPacer(clock)
    begun_s = clock.now_s()
    for _ in range(100):
        pacer.begin()
        pacer.finish(0.005)
    assert clock.now_s() - begun_s == pytest.approx(0.5, abs=0.0002)
    clock.time_s += 1.0
    pacer.begin()
    assert pacer.finish(0.005) == pytest.approx(0.005, abs=0.0002)


def test_host_work_beyond_the_step_lengthens_it_once():
    clock = FakeClock()
    pacer = StepPacer(clock)
    pacer.begin()
    clock.time_s += 0.02
    assert pacer.finish(0.005) == pytest.approx(0.02)
    pacer.begin()
    assert pacer.finish(0.005) == pytest.approx(0.005)
