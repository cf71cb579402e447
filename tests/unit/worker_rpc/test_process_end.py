"""How a worker's process ends beside a thread that compiles a graph and cannot be stopped."""

import subprocess
import sys
import textwrap

import pytest

from tests.support.code_measures import ROOT
from worker_svc.executor import PREPARATION_THREAD


@pytest.mark.parametrize("code", [0, 3])
@pytest.mark.parametrize("is_compiling", [True, False])
def test_a_compile_that_is_under_way_is_not_torn_down_at_the_end(code, is_compiling):
    """Ended by the interpreter in the middle of C++ it would abort the process: exit code 134 after a clean stop."""
    name = PREPARATION_THREAD if is_compiling else "another"
    program = f"""
        import atexit, logging, threading, time
        from worker_svc.__main__ import end
        threading.Thread(target=lambda: time.sleep(600), name={name!r}, daemon=True).start()
        atexit.register(print, "torn down")
        logging.basicConfig(format="%(message)s")
        logging.getLogger("x").warning("stopped")
        print("said", end=" ")
        end({code})
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code
    assert done.stdout.split() == (["said"] if is_compiling else ["said", "torn", "down"])
    assert done.stderr.strip() == "stopped"
