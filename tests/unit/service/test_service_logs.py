import asyncio
import io
import json
import logging
import os
import signal
from datetime import UTC, datetime

import pytest

from protos.service.logs import configure_logs, install_level_signals, set_level

SECRET = "the caller's words"


@pytest.fixture
def log():
    """A logger whose lines go into `log.stream`; the root logger is put back."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    logger = logging.getLogger("forwardplane.test")
    logger.stream = io.StringIO()
    yield logger
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(log, *, json_lines=True, level="info"):
    configure_logs(level=level, json_lines=json_lines, process="core", stream=log.stream)
    return log


def lines(log):
    return [json.loads(line) for line in log.stream.getvalue().splitlines()]


def test_a_json_line_holds_every_field(log):
    before = datetime.now(UTC)
    configured(log).info("plan sent", extra={"plan_seq": 7, "worker": "w:1"})

    (line,) = lines(log)
    written = datetime.fromisoformat(line.pop("timestamp"))
    assert before <= written <= datetime.now(UTC)
    assert line == {
        "event": "plan sent",
        "level": "info",
        "logger": "forwardplane.test",
        "plan_seq": 7,
        "worker": "w:1",
        "process": "core",
        "pid": os.getpid(),
    }


def test_a_text_line_holds_the_same(log):
    configured(log, json_lines=False).warning("plan sent", extra={"plan_seq": 7})

    line = log.stream.getvalue()
    for part in ("plan sent", "plan_seq=7", "process=core", "warning", "forwardplane.test"):
        assert part in line
    assert "\x1b" not in line


@pytest.mark.parametrize("json_lines", [True, False])
@pytest.mark.parametrize("name", ["prompt", "text", "content", "messages", "token_ids", "request", "stop_strings"])
def test_content_of_requests_never_gets_out(log, name, json_lines):
    configured(log, json_lines=json_lines).error("odd", extra={name: SECRET, "deep": {"more": {name: [SECRET]}}})

    assert SECRET not in log.stream.getvalue()
    assert "[hidden]" in log.stream.getvalue()


@pytest.mark.parametrize("json_lines", [True, False])
def test_stacks_show_no_local_variables(log, json_lines):
    configured(log, json_lines=json_lines)
    prompt = SECRET.upper()
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        log.exception("failed", extra={"length": len(prompt)})

    assert "ZeroDivisionError" in log.stream.getvalue()
    assert prompt not in log.stream.getvalue()


def test_the_level_can_change_at_run_time(log):
    configured(log)
    log.debug("one")
    set_level("debug")
    log.debug("two")
    set_level("error")
    log.warning("three")

    assert [line["event"] for line in lines(log)] == ["two"]


async def test_signals_move_the_level_one_step_and_stop_at_the_ends(log):
    configured(log, level="info")
    loop = asyncio.get_running_loop()
    install_level_signals(loop)
    seen = []
    try:
        for number in (signal.SIGUSR1, signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR2, signal.SIGUSR2, signal.SIGUSR2):
            os.kill(os.getpid(), number)
            await asyncio.sleep(0.005)
            seen.append(logging.getLevelName(logging.getLogger().level))
    finally:
        loop.remove_signal_handler(signal.SIGUSR1)
        loop.remove_signal_handler(signal.SIGUSR2)

    assert seen == ["DEBUG", "DEBUG", "INFO", "WARNING", "ERROR", "ERROR"]


def test_configuring_twice_does_not_double_the_lines(log):
    configured(configured(log)).info("once")

    assert len(lines(log)) == 1
