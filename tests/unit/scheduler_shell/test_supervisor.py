import asyncio
import socket
import sys
from contextlib import contextmanager

import pytest

from protos.service.config import EX_CONFIG
from protos.service.lifecycle import SAME_SIGNAL_S, ExitCode
from protos.wire.errors import InvalidRequest, PortInUse
from scheduler_svc.config import EdgeConfig, ProcessConfig, Role, SchedulerConfig
from scheduler_svc.parent import Supervisor, run_parent

LIMIT_S = 30.0
# Each script notes what happens to it in a file of its own name.
SERVES = (
    "import signal, time; note('up')\n"
    "signal.signal(signal.SIGRTMIN, lambda *_: (note('asked'), exit(0))); time.sleep(60)"
)
DEAF = "import signal, time; signal.signal(signal.SIGRTMIN, signal.SIG_IGN); note('up'); time.sleep(60)"
SLOW_TO_DRAIN = (
    "import signal, time\n"
    "signal.signal(signal.SIGRTMIN, lambda *_: (note('asked'), time.sleep(0.2), note('drained'), exit(0)))\n"
    "note('up'); time.sleep(60)"
)


def exits(code, after_s=0.0):
    return f"import time; note('up'); time.sleep({after_s}); exit({code})"


class Children:
    """Scripts instead of processes, and the notes they leave, in order of time."""

    def __init__(self, folder, *, core=SERVES, edge=SERVES, edge_scripts=()):
        self.path = folder / "notes"
        self.scripts = {Role.CORE: [core], Role.EDGE: [*edge_scripts, edge]}

    def command(self, role, index):
        left = self.scripts[role]
        script = left.pop(0) if len(left) > 1 else left[0]
        prelude = f"""from sys import exit
def note(what):
    open({str(self.path)!r}, "a").write("{role.value} {index} " + what + "\\n")
"""
        return [sys.executable, "-I", "-S", "-c", prelude + script]

    def notes(self):
        return self.path.read_text().splitlines() if self.path.exists() else []

    async def until(self, note, count=1):
        async with asyncio.timeout(LIMIT_S):
            while self.notes().count(note) < count:
                await asyncio.sleep(0.005)


def supervisor(children, **settings):
    values = {"drain_timeout_s": 5.0, "edge_restarts": 2}
    return Supervisor(ProcessConfig(**(values | settings)), command=children.command)


async def test_a_stop_ends_edges_first_and_then_the_core(tmp_path):
    children = Children(tmp_path, edge=SLOW_TO_DRAIN)
    parent = supervisor(children, edges=2)
    running = asyncio.create_task(parent.run())
    await children.until("core 0 up")
    await children.until("edge 0 up")
    await children.until("edge 1 up")
    parent.request_stop()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    ends = children.notes()[3:]
    assert sorted(ends[:4]) == ["edge 0 asked", "edge 0 drained", "edge 1 asked", "edge 1 drained"]
    assert ends[4:] == ["core 0 asked"]


@pytest.mark.parametrize(("code", "expected"), [(3, 3), (0, ExitCode.FAULT), (EX_CONFIG, EX_CONFIG)])
async def test_when_the_core_ends_everything_ends_non_zero(tmp_path, code, expected):
    children = Children(tmp_path, core=exits(code, after_s=0.2))
    assert await asyncio.wait_for(supervisor(children).run(), LIMIT_S) == expected
    assert children.notes()[-1] == "edge 0 asked"


async def test_a_killed_core_ends_everything_non_zero(tmp_path):
    children = Children(tmp_path, core="import os, time; note('up'); time.sleep(0.1); os.kill(os.getpid(), 9)")
    assert await asyncio.wait_for(supervisor(children).run(), LIMIT_S) != 0


async def test_an_edge_that_dies_is_started_again(tmp_path):
    children = Children(tmp_path, edge_scripts=[exits(1), exits(0)])
    parent = supervisor(children)
    running = asyncio.create_task(parent.run())
    await children.until("edge 0 up", count=3)
    parent.request_stop()
    assert await asyncio.wait_for(running, LIMIT_S) == 0
    assert children.notes().count("core 0 up") == 1


async def test_an_edge_that_dies_too_often_ends_everything(tmp_path):
    children = Children(tmp_path, edge=exits(5))
    assert await asyncio.wait_for(supervisor(children, edge_restarts=1).run(), LIMIT_S) == 5
    assert children.notes().count("edge 0 up") == 2
    assert children.notes()[-1] == "core 0 asked"


@pytest.mark.parametrize("code", [EX_CONFIG, ExitCode.CANNOT_LISTEN, ExitCode.BAD_INPUT])
async def test_an_edge_that_can_never_run_is_not_started_again(tmp_path, code):
    children = Children(tmp_path, edge=exits(int(code)))
    assert await asyncio.wait_for(supervisor(children).run(), LIMIT_S) == code
    assert children.notes().count("edge 0 up") == 1


async def test_a_stop_while_an_edge_is_to_be_started_again_does_not_wait_for_it(tmp_path):
    children = Children(tmp_path, edge=exits(1))
    parent = supervisor(children, edge_restarts=9)
    running = asyncio.create_task(parent.run())
    await children.until("core 0 up")
    await children.until("edge 0 up", count=2)
    parent.request_stop()
    await asyncio.wait_for(running, LIMIT_S)
    assert children.notes()[-1] == "core 0 asked"


async def test_an_edge_that_does_not_drain_in_time_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr("scheduler_svc.parent._MARGIN_S", 0.1)
    monkeypatch.setattr("scheduler_svc.parent._END_LIMIT_S", 0.1)
    children = Children(tmp_path, edge=DEAF)
    parent = supervisor(children, drain_timeout_s=0.1)
    running = asyncio.create_task(parent.run())
    await children.until("edge 0 up")
    await children.until("core 0 up")
    parent.request_stop()
    assert await asyncio.wait_for(running, LIMIT_S) == ExitCode.FAULT
    assert children.notes()[-1] == "core 0 asked"


async def test_a_second_signal_kills(tmp_path):
    children = Children(tmp_path, edge=DEAF, core=DEAF)
    parent = supervisor(children, drain_timeout_s=60.0)
    running = asyncio.create_task(parent.run())
    await children.until("edge 0 up")
    await children.until("core 0 up")
    parent.request_stop()
    parent.request_stop()
    await asyncio.sleep(SAME_SIGNAL_S + 0.1)
    assert not running.done()
    parent.request_stop()
    assert await asyncio.wait_for(running, LIMIT_S) != 0


@contextmanager
def taken_port():
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        yield holder.getsockname()[1]


async def test_several_edges_do_not_join_a_port_that_somebody_shares():
    with taken_port() as port:
        config = SchedulerConfig(process=ProcessConfig(edges=2), edge=EdgeConfig(port=port))
        with pytest.raises(PortInUse, match=str(port)):
            await run_parent(config, [])


async def test_a_socket_folder_that_is_too_deep_is_refused(tmp_path):
    deep = tmp_path / ("d" * 90)
    deep.mkdir()
    with pytest.raises(InvalidRequest, match="limit is 107"):
        await run_parent(SchedulerConfig(process=ProcessConfig(socket_dir=deep)), [])
    assert list(deep.iterdir()) == []


async def test_a_socket_folder_that_is_absent_is_refused(tmp_path):
    with pytest.raises(InvalidRequest) as caught:
        await run_parent(SchedulerConfig(process=ProcessConfig(socket_dir=tmp_path / "absent")), [])
    assert caught.value.field == "socket_dir"
