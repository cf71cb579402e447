"""What steps of a simulated device take: the default table equals its derivation, sleep is exact."""

import numpy as np
import pytest

from protos.service.step_times import read_step_times
from worker_svc.simulated.build import DEFAULT_TABLE
from worker_svc.simulated.device_clock import StepPacer

WEIGHTS, KV_TOKEN, BANDWIDTH, FLOPS, OTHER_MS = 16.06e9, 131_072, 0.80 * 3.35e12, 0.55 * 989.4e12, 0.4


def test_the_default_table_is_what_its_derivation_says():
    table = read_step_times(DEFAULT_TABLE, field="simulated_steps")
    rows, contexts = np.array(table.decode.rows)[:, None], np.array(table.decode.context_tokens)[None, :]
    decode = OTHER_MS + (WEIGHTS + rows * contexts * KV_TOKEN) / BANDWIDTH * 1e3
    np.testing.assert_allclose(table.decode.step_ms, decode, atol=1e-3)
    tokens = np.array(table.prefill.tokens)
    prefill = OTHER_MS + np.maximum(WEIGHTS / BANDWIDTH, tokens * WEIGHTS / FLOPS) * 1e3
    np.testing.assert_allclose(table.prefill.step_ms, prefill, atol=1e-3)
    assert (table.kv_bytes, table.kv_bytes_per_token) == (0.9 * 80e9 - WEIGHTS - 2e9, KV_TOKEN)


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
