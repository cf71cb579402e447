import subprocess
import sys
import time

import psutil
import pytest

from protos.client.exit_codes import REFUSED, exit_code
from protos.client.process_group import MAX_RESTARTS, ProcessGroup, ServiceCommand
from protos.wire.errors import FaultError, InvalidRequest


def command(*arguments: str, restarts: bool = False) -> ServiceCommand:
    return ServiceCommand(
        name="part", arguments=arguments, health_target="127.0.0.1:1", health_service="none", restarts=restarts
    )


def until_ended(group: ProcessGroup) -> None:
    for child in group._children:
        child.process.wait(30)


@pytest.fixture
def group():
    notices: list[str] = []
    made = ProcessGroup(notice=notices.append)
    yield made, notices
    made.kill()
    made.stop()


def test_a_part_that_a_fault_ends_is_started_again_and_that_is_said(group):
    made, notices = group
    made.start([command("-c", "raise SystemExit(70)", restarts=True)])
    (first,) = made.pids()
    until_ended(made)
    made.supervise()
    assert made.pids() != [first]
    assert notices == ["part ended with exit code 70; starting it again"]


@pytest.mark.parametrize("code", [65, 69, 78])
def test_a_part_that_would_end_the_same_way_again_ends_all(group, code):
    made, _ = group
    made.start([command("-c", f"raise SystemExit({code})", restarts=True)])
    until_ended(made)
    for look in (made.supervise, made.check_alive):
        with pytest.raises(InvalidRequest, match=f"part ended with exit code {code}: it was refused") as caught:
            look()
        assert exit_code(caught.value) == REFUSED


def test_restarts_are_limited(group):
    made, notices = group
    made.start([command("-c", "raise SystemExit(1)", restarts=True)])
    for _ in range(MAX_RESTARTS):
        until_ended(made)
        made.supervise()
    until_ended(made)
    with pytest.raises(FaultError):
        made.supervise()
    assert len(notices) == MAX_RESTARTS


def test_a_part_that_may_not_be_restarted_ends_all(group):
    made, _ = group
    made.start([command("-c", "pass")])
    until_ended(made)
    with pytest.raises(FaultError):
        made.supervise()


def test_a_part_that_is_stopped_before_it_listens_to_signals_ended_well(group):
    made, _ = group
    made.start([command("-c", "import time; time.sleep(60)")])
    assert made.stop() == 0


def test_a_part_that_somebody_else_ended_did_not(group):
    made, _ = group
    made.start([command("-c", "import time; time.sleep(60)")])
    psutil.Process(*made.pids()).terminate()
    until_ended(made)
    assert made.stop() != 0


def test_kill_ends_a_part_that_does_not_listen_while_stop_waits(group):
    made, _ = group
    deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
    made.start([command("-c", deaf)])
    time.sleep(0.3)
    begin = time.monotonic()
    made.kill()
    assert made.stop() != 0
    assert time.monotonic() - begin < 40


def test_a_part_ends_when_the_process_that_started_it_is_killed():
    code = (
        "import os, sys\n"
        "from protos.client.process_group import ProcessGroup, ServiceCommand\n"
        "group = ProcessGroup()\n"
        "sleep = ('-c', 'import time; time.sleep(60)')\n"
        "part = ServiceCommand(name='p', arguments=sleep, health_target='', health_service='')\n"
        "group.start([part])\n"
        "print(group.pids()[0], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        pid = int(parent.stdout.readline())
        part = psutil.Process(pid)
        while "tethered" in " ".join(part.cmdline()):
            time.sleep(0.01)
        parent.kill()
    _, alive = psutil.wait_procs([part], timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
