"""Sets up logging once per process: one format, UTC times, `extra` values as fields, content of requests kept out.

Everybody else calls `logging.getLogger(__name__)` with a constant message. Knows nothing of what is logged.
"""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Mapping, MutableMapping
from enum import StrEnum
from typing import Any, TextIO

import structlog
from structlog.typing import EventDict, Processor


class LogLevel(StrEnum):
    """What is logged; the type of each process's `log_level` setting."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


LEVELS = tuple(LogLevel)

_CONTENT = frozenset(
    {
        *("prompt", "prompts", "text", "content", "chat", "messages", "completion", "output", "delta"),
        *("token_ids", "input_ids", "output_ids", "prompt_ids", "ids", "tokens_text", "stop", "stop_strings"),
        *("request", "reply", "chunk", "logprobs"),
    }
)
"""Names of fields that could hold what a caller wrote or was answered."""
_HIDDEN = "[hidden]"

logger = logging.getLogger(__name__)


def configure_logs(*, level: str, json_lines: bool, process: str, stream: TextIO | None = None) -> None:
    """Send the root logger's records to `stream` (absent: standard error).

    Args:
        level: a LogLevel or its text.
        json_lines: one JSON object a line, or text for people.
        process: name of this process, a field of every line.
        stream: for tests.
    """
    target = stream or sys.stderr
    handler = logging.StreamHandler(target)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=_record_processors(process),
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                *_renderers(target, json_lines=json_lines),
            ],
        )
    )
    logging.getLogger().handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    """Change the level of the whole process while it runs."""
    assert level in LEVELS, level
    logging.getLogger().setLevel(level.upper())


def install_level_signals(loop: asyncio.AbstractEventLoop) -> None:
    """SIGUSR1 makes the log one level more verbose, SIGUSR2 one less."""
    loop.add_signal_handler(signal.SIGUSR1, _shift_level, -1)
    loop.add_signal_handler(signal.SIGUSR2, _shift_level, +1)


def _shift_level(steps: int) -> None:
    now = logging.getLevelName(logging.getLogger().level).lower()
    index = LEVELS.index(LogLevel(now)) if now in LEVELS else LEVELS.index(LogLevel.INFO)
    level = LEVELS[min(max(index + steps, 0), len(LEVELS) - 1)]
    logger.warning("log level changed", extra={"level_now": level})
    set_level(level)


def _record_processors(process: str) -> list[Processor]:
    def add_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
        event["process"], event["pid"] = process, os.getpid()
        return event

    return [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.ExtraAdder(),
        hide_content,
        add_process,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]


def _renderers(target: TextIO, *, json_lines: bool) -> list[Processor]:
    if json_lines:
        return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(default=str)]
    renderer = structlog.dev.ConsoleRenderer(
        colors=target.isatty(), exception_formatter=structlog.dev.plain_traceback, pad_event_to=0
    )
    return [renderer]


def hide_content(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Replace the value of every field, at any depth, whose name says that it may hold a caller's text."""
    _hide(event)
    return event


def _hide(fields: MutableMapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in _CONTENT:
            fields[name] = _HIDDEN
        elif isinstance(value, Mapping):
            fields[name] = dict(value)
            _hide(fields[name])
