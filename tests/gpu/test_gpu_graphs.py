"""Graphs on a GPU: speed beside eager, memory at replay, and a clean run under compute-sanitizer. `make gpu` prints it.

What needs a GPU is skipped by name without one; its parts run on the CPU here as well, so that they do not rot.
"""

import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.gpu.replay_rounds import main as replay_rounds
from tests.support.graph_figures import figures_table, prefill_figure, prefill_worker
from tests.support.model import model_folder
from tests.support.tiny_llama import tiny_folder
from worker_svc.device.break_points import BreakPoints
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors
from worker_svc.runners.executor_settings import ExecutorSettings

ROOT = Path(__file__).resolve().parents[2]
GOALS = {"breakable": 1.70, "full": 1.93}
TOKENS = (16, 64, 256)


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.timeout(900)
def test_prefill_replays_beside_eager_runs(capsys):
    settings = ExecutorSettings(device="cuda", dtype="bfloat16", numerics="fast", num_pages=400)
    figures = []
    for backend in GOALS:
        for tokens in TOKENS:
            worker = prefill_worker(model_folder(), settings, backend=backend, tokens=tokens)
            figures.append(prefill_figure(worker, backend=backend, tokens=tokens, rounds=40))
    with capsys.disabled():
        print(f"\n{torch.cuda.get_device_name()}: SmolLM2 bfloat16, one prompt; the goals are for 64 tokens")
        print(figures_table(figures, goals=GOALS))


def test_the_figures_are_made_on_any_device(tmp_path):
    settings = ExecutorSettings(numerics="reproducible", num_pages=40, threads=1)
    worker = prefill_worker(tiny_folder(tmp_path), settings, backend="full", tokens=16)
    figure = prefill_figure(worker, backend="full", tokens=16, rounds=1)
    assert figure.ran == "full"
    assert min(figure.eager_ms, figure.replay_ms, figure.capture_s, figure.graph_bytes) > 0
    header, line = figures_table([replace(figure, ran="breakable")], goals=GOALS).splitlines()
    assert line.split()[:4] == ["full", "(ran", "breakable)", "16"]
    assert "speed-up" in header
    assert "1.93" in line


@pytest.mark.gpu
def test_a_replay_allocates_nothing():
    device, breaks = CudaGraphDevice(torch.device("cuda")), BreakPoints()
    backend = FullBackend(device, kept=KeptTensors(device), breaks=breaks)
    values = torch.ones(64, 64, device="cuda")
    with torch.inference_mode():
        backend.capture(64, lambda: ((values @ values).softmax(-1), values.sum(-1)))
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for _ in range(5):
            backend.replay(64)
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_a_side_stream_that_was_forked_is_joined():
    device = CudaGraphDevice(torch.device("cuda"))
    values, doubled = torch.ones(8, device="cuda"), torch.zeros(8, device="cuda")
    with device.session() as session:
        capture = session.begin()
        try:
            with capture.beside():
                doubled.copy_(values).mul_(2)
            graph = capture.end()
        finally:
            capture.abandon()
    values.fill_(4)
    graph.replay()
    device.synchronise()
    assert doubled.tolist() == [8.0] * 8


def test_replays_in_many_orders_equal_eager_runs():
    with torch.inference_mode():
        assert replay_rounds("cpu") == 0


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_compute_sanitizer_finds_nothing():
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not installed")
    command = [sanitizer, "--error-exitcode", "99", sys.executable, "-m", "tests.gpu.replay_rounds", "cuda"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500, check=False)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
