"""A hung device ends its process, whoever holds the interpreter."""

import subprocess
import sys
import textwrap
import time

import pytest

from protos.service.lifecycle import ExitCode
from worker_svc.rpc.device_work import DeviceProgress
from worker_svc.rpc.watchdog import DeviceWatchdog, Verdict, WatchdogLimits

LIMITS = WatchdogLimits()
SECOND_NS = 1_000_000_000


@pytest.mark.parametrize(
    ("busy_s", "verdict"),
    [(0.0, Verdict.FINE), (1.9, Verdict.FINE), (2.0, Verdict.LATE), (5.9, Verdict.LATE), (6.0, Verdict.HUNG)],
)
def test_half_of_the_budget_is_late_and_two_seconds_past_it_is_hung(busy_s, verdict):
    progress = DeviceProgress().taken(7, budget_ms=4000)
    assert LIMITS.verdict(progress, 7 + int(busy_s * SECOND_NS)) is verdict


def test_an_idle_device_is_fine_for_ever():
    idle = DeviceProgress().taken(0, budget_ms=1).finished(1)
    assert LIMITS.verdict(idle, 10**6 * SECOND_NS) is Verdict.FINE


def test_work_without_a_budget_has_a_long_one():
    progress = DeviceProgress().taken(0)
    assert LIMITS.verdict(progress, 29 * SECOND_NS) is Verdict.FINE
    assert LIMITS.verdict(progress, 62 * SECOND_NS) is Verdict.HUNG
    assert LIMITS.alarm_s(progress) == LIMITS.alarm_s(DeviceProgress()) == 62.0


def test_a_watched_process_that_works_lives_on():
    watchdog = DeviceWatchdog(DeviceProgress, WatchdogLimits(look_s=0.01, unbudgeted_s=0.2, hard_margin_s=0.1))
    watchdog.start()
    time.sleep(0.5)
    watchdog.stop()


HELD = "re.match('(a+)+$', 'a' * 64 + 'b')"
WAITS = "time.sleep(60)"


@pytest.mark.parametrize(
    ("device", "code"), [(HELD, 1), (WAITS, int(ExitCode.FAULT))], ids=["holds the interpreter", "waits"]
)
def test_a_device_that_hangs_ends_the_process(device, code):
    program = f"""
        import re, time
        from worker_svc.rpc.device_work import DeviceProgress
        from worker_svc.rpc.watchdog import DeviceWatchdog, WatchdogLimits

        progress = DeviceProgress(since_ns=time.monotonic_ns()).taken(time.monotonic_ns(), budget_ms=400)
        DeviceWatchdog(lambda: progress, WatchdogLimits(look_s=0.05, hard_margin_s=0.2)).start()
        {device}
    """
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == code
    assert time.monotonic() - begun < 45
    assert 'File "<string>"' in done.stderr, "no stack of the thread that hangs"
