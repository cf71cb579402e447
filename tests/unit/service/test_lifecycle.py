import asyncio
import logging
import os
import signal
import subprocess
import sys
import time

import pytest

from protos.service.lifecycle import SAME_SIGNAL_S, ExitCode, Lifecycle, Part
from protos.wire import errors


class Parts:
    """Records the order of steps; each part may be told what its steps do."""

    def __init__(self):
        self.lifecycle, self.events = Lifecycle(), []

    def add(self, name, *, start=None, stop=None, limit_s=5.0):
        async def begin():
            self.events.append(f"+{name}")
            if start is not None:
                await start()

        async def end():
            self.events.append(f"-{name}")
            if stop is not None:
                await stop()

        self.lifecycle.add(Part(name=name, start=begin, stop=end, start_limit_s=limit_s, stop_limit_s=limit_s))


def raising(error):
    async def step():
        raise error

    return step


async def forever():
    await asyncio.Event().wait()


async def run_until_started(parts):
    async def stop():
        parts.lifecycle.request_stop("test")

    parts.lifecycle.add(Part(name="last", start=stop))
    return await parts.lifecycle.run()


async def test_parts_stop_in_reverse_order():
    parts = Parts()
    parts.add("a")
    parts.add("b")

    assert await run_until_started(parts) is ExitCode.OK
    assert parts.events == ["+a", "+b", "-b", "-a"]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.PortInUse("port 1 is in use"), ExitCode.CANNOT_LISTEN),
        (errors.InvalidModelFile("bad"), ExitCode.BAD_INPUT),
        (errors.NoServer("nobody"), ExitCode.FAILURE),
        (errors.DeviceFault("gone"), ExitCode.FAULT),
        (KeyError("bug"), ExitCode.FAULT),
    ],
)
async def test_a_failed_start_stops_what_runs_and_names_the_reason(error, code, caplog):
    parts = Parts()
    parts.add("a")
    parts.add("b", start=raising(error))
    parts.add("never")

    assert await parts.lifecycle.run() is code
    assert parts.events == ["+a", "+b", "-b", "-a"]
    assert any(record.getMessage() == "a part failed" and record.part == "b" for record in caplog.records)


async def test_a_slow_start_is_given_up():
    parts = Parts()
    parts.add("slow", start=forever, limit_s=0.01)

    assert await parts.lifecycle.run() is ExitCode.FAULT
    assert parts.events == ["+slow", "-slow"]


@pytest.mark.parametrize("stop", [forever, raising(KeyError("bug")), raising(errors.DataFault("x"))])
async def test_a_bad_stop_does_not_keep_others_from_stopping(stop):
    parts = Parts()
    parts.add("a")
    parts.add("bad", stop=stop, limit_s=0.01)

    assert await run_until_started(parts) is ExitCode.FAULT
    assert parts.events == ["+a", "+bad", "-bad", "-a"]


async def test_a_stop_during_start_abandons_the_step():
    parts = Parts()
    parts.add("a", start=forever)
    parts.add("never")
    asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), signal.SIGTERM)

    assert await parts.lifecycle.run() is ExitCode.OK
    assert parts.events == ["+a", "-a"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_stops_in_order(number):
    parts = Parts()
    parts.add("a")
    asyncio.get_running_loop().call_later(0.01, os.kill, os.getpid(), number)

    assert await parts.lifecycle.run() is ExitCode.OK
    assert parts.events == ["+a", "-a"]
    assert not asyncio.get_running_loop().remove_signal_handler(number)


async def test_a_failed_background_task_stops_the_process(caplog):
    parts = Parts()
    parts.add("a")
    parts.lifecycle.spawn("pump", raising(ZeroDivisionError())())

    assert await parts.lifecycle.run() is ExitCode.FAULT
    assert parts.events in (["+a", "-a"], [])
    assert any(record.levelno == logging.ERROR and record.exc_info for record in caplog.records)


async def test_background_tasks_end_before_parts_stop():
    parts = Parts()
    parts.add("a")

    async def pump():
        try:
            await forever()
        finally:
            parts.events.append("pump ended")

    parts.lifecycle.spawn("pump", pump())

    assert await run_until_started(parts) is ExitCode.OK
    assert parts.events == ["+a", "pump ended", "-a"]


async def test_the_worst_code_of_several_requests_counts():
    lifecycle = Lifecycle()
    lifecycle.request_stop("fault", ExitCode.FAULT)
    lifecycle.request_stop("signal")

    assert await lifecycle.run() is ExitCode.FAULT


SECOND_SIGNAL = """
import asyncio
from protos.service.lifecycle import Lifecycle, Part

async def forever():
    print("stopping", flush=True)
    await asyncio.Event().wait()

async def main():
    lifecycle = Lifecycle()
    async def ready():
        print("ready", flush=True)
    lifecycle.add(Part(name="stubborn", stop=forever))
    lifecycle.add(Part(name="ready", start=ready))
    await lifecycle.run()

asyncio.run(main())
"""


def test_a_second_signal_ends_at_once_with_a_code_that_says_so():
    with subprocess.Popen([sys.executable, "-c", SECOND_SIGNAL], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGTERM)
        time.sleep(SAME_SIGNAL_S + 0.1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)

        assert process.wait(30) == 128 + signal.SIGTERM
