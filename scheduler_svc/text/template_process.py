"""The child that renders chat templates: `python -m scheduler_svc.text.template_process`, spoken to through its pipes.

A template is the model maker's code. It runs here, sandboxed, with limits on memory and processor time, so that it can
only end this process. Frames are as in `killable_process`, their content is JSON.
"""

import json
import resource
import signal
import struct
import sys
from datetime import datetime
from types import MappingProxyType
from typing import Any, BinaryIO, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_LENGTH = struct.Struct("<I")
_MEMORY_BYTES = 256 << 20
# Above the parent's limit: ends a child whose parent died while it was rendering.
_ALARM_S = 60
_COMPILE_CPU_S = 0.5
_MAX_MESSAGE_CHARS = 200


class TemplateRefused(Exception):
    """The template called `raise_exception`: it does not accept these messages."""


class Renderer:
    """One compiled template."""

    def __init__(self, source: str, *, special_tokens: dict[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._variables = MappingProxyType({**special_tokens, "tools": None, "documents": None})

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt for `messages`, ready for the assistant's turn."""
        return self._template.render(messages=messages, add_generation_prompt=True, **self._variables)


def answer(renderer: Renderer, messages: list[dict[str, str]]) -> dict[str, str]:
    """What goes back for one call: `text`, or `refused` (the template's own words), or `failed` (what went wrong)."""
    try:
        return {"text": renderer.render(messages)}
    except TemplateRefused as error:
        return {"refused": str(error)[:_MAX_MESSAGE_CHARS]}
    except MemoryError:
        return {"failed": "it used too much memory"}
    except RecursionError:
        return {"failed": "it recursed too deeply"}
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        return {"failed": type(error).__name__}


def serve(source: BinaryIO, sink: BinaryIO) -> None:
    """Compile the greeting's template, then render until the pipe closes."""
    greeting = _read(source)
    if greeting is None:
        return
    # The compiler computes constants. Processor time, since a start on a busy machine is no template's fault; what the
    # timer does to a process that has no handler for it is to end it, in the middle of a computation too.
    signal.setitimer(signal.ITIMER_PROF, _COMPILE_CPU_S)
    try:
        renderer = Renderer(greeting["template"], special_tokens=greeting["special_tokens"])
    except (jinja2.TemplateError, RecursionError, MemoryError) as error:
        _write(sink, {"failed": f"{type(error).__name__}: {error}"[:_MAX_MESSAGE_CHARS]})
        return
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
    _write(sink, {"text": ""})
    while (request := _read(source)) is not None:
        signal.alarm(_ALARM_S)
        reply = answer(renderer, request["messages"])
        signal.alarm(0)
        _write(sink, reply)


def main() -> None:
    """Run as a process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, _MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    serve(sys.stdin.buffer, sys.stdout.buffer)


def _read(source: BinaryIO) -> dict[str, Any] | None:
    prefix = source.read(_LENGTH.size)
    if len(prefix) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(prefix)
    message: dict[str, Any] = json.loads(source.read(length))
    return message


def _write(sink: BinaryIO, message: dict[str, str]) -> None:
    body = json.dumps(message).encode()
    sink.write(_LENGTH.pack(len(body)) + body)
    sink.flush()


def _raise_exception(message: str) -> NoReturn:
    raise TemplateRefused(message)


def _strftime_now(layout: str) -> str:
    # Templates mean the wall clock of the machine, as the library that defined this function does.
    return datetime.now().astimezone().strftime(layout)


def _to_json(value: object, indent: int | None = None) -> str:
    # Unlike jinja2's own filter: nothing is escaped for HTML.
    return json.dumps(value, ensure_ascii=False, indent=indent)


if __name__ == "__main__":
    main()
