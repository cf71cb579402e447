"""What a busy neighbour costs: the same decode steps quiet, then beside a process that burns one core.

With fixed threads and with the choice from measured times. Prints the share of the quiet speed that is left; the goal
is 0.45 with one neighbour.

    python -m pytest -m bench -s tests/bench/test_bench_neighbour.py
"""

import statistics
import subprocess
import sys
import time
from contextlib import contextmanager

import psutil
import pytest

from kernels.native import ThreadPool
from tests.bench.bare_model import bare_model, native_library, prefilled
from tests.support.model import model_folder
from tests.support.native_cases import step_input
from worker_svc.runners.thread_choice import ThreadChoice

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1200)]

CONTEXT, GOAL = 64, 0.45
STEPS = {1: 150, 16: 80}


@contextmanager
def neighbour():
    burner = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.3)
        yield
    finally:
        burner.kill()
        burner.wait()


def seconds(model, sequences, steps, choice=None):
    """Of each step, its threads chosen as the worker does."""
    taken = []
    for _ in range(steps):
        step = step_input([(sequence, [7]) for sequence in sequences])
        step.wants_logits[:] = False
        if choice is not None:
            model.pool.set_threads(choice.before(len(sequences)))
        begin = time.perf_counter()
        model.step(step)
        taken.append(time.perf_counter() - begin)
        if choice is not None:
            choice.after(len(sequences), threads=model.pool.threads, seconds=taken[-1])
        for sequence in sequences:
            sequence.length -= 1
    return taken


@pytest.mark.parametrize("rows", STEPS)
def test_decode_beside_a_neighbour(capsys, rows):
    most = psutil.cpu_count(logical=False) or 1
    with ThreadPool(native_library(), threads=most) as pool, bare_model(model_folder().weights, pool) as model:
        sequences = prefilled(model, rows, CONTEXT, room=1)
        for name, choice in ((f"{most} threads", None), ("threads by measured times", ThreadChoice(most))):
            quiet = seconds(model, sequences, STEPS[rows], choice)
            with neighbour():
                busy = seconds(model, sequences, STEPS[rows], choice)
            share = statistics.median(quiet) / statistics.median(busy)
            with capsys.disabled():
                print(
                    f"\n{rows} rows, {name}: {1e3 * statistics.median(quiet):.1f} ms quiet, "
                    f"{1e3 * statistics.median(busy):.1f} beside one neighbour: {share:.2f} is left, goal {GOAL}"
                )
            pool.set_threads(most)
