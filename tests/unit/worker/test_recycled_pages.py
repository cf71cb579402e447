"""S12: pages that are free hold not-a-number before every plan, and nobody's tokens change: nothing of one request's
reaches another through a page, and no row reads a slot that was not written for it.
"""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from scheduler_svc.core.events import RequestSpec, Sampling
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import make_spec
from tests.support.core_on_executor import CoreOnExecutor
from tests.support.model import model_folder
from tests.support.tiny_llama import tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

STACKS = {"torch": {"numerics": "reproducible"}, "native": {"numerics": "fast", "kernels": "native"}}
SEEDED = Sampling(temperature=0.9, seed=77, top_k=40, top_p=0.95)
FEATURES = (
    {},
    {"sampling": SEEDED},
    {"sampling": Sampling(repetition_penalty=1.4, presence_penalty=0.5)},
    {"sampling": replace(SEEDED, sample_index=2, allowed_ids=tuple(range(30, 200)))},
    {"output_logprobs": True, "top_logprobs": 2},
    {"sampling": replace(SEEDED, bias=((28, 4.0),), banned_ids=(1, 2))},
)


@pytest.fixture(scope="module", params=["torch", pytest.param("native", marks=pytest.mark.model)])
def stack(request, tmp_path_factory):
    folder = tiny_folder(tmp_path_factory.mktemp("recycled")) if request.param == "torch" else model_folder()
    settings = ExecutorSettings(num_pages=64, max_rows=8, max_tokens=256, threads=1, window=2, **STACKS[request.param])
    worker = build_tp_model_worker(folder, settings)
    yield request.param, worker
    worker.close()


class Poisoned:
    """A worker that finds not-a-number in every page that `free` says, before each plan."""

    def __init__(self, stack) -> None:
        self.name, self.worker = stack
        self.free = None
        self.poisoned = 0

    def worker_info(self):
        return self.worker.worker_info()

    def reset(self) -> None:
        self.worker.reset()

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        if self.free is not None:
            pages = self.free()
            self.poisoned += len(pages)
            self.poison(pages)
        return self.worker.execute(plan)

    def poison(self, pages: np.ndarray) -> None:
        runner = self.worker._dispatch._runners[-1]
        if self.name == "native":
            runner._model.kv_pages(0)[:, pages] = np.nan
            return
        pool = runner.context._attention[0].pool
        for layer in range(pool.geometry.num_layers):
            pool.keys(layer)[:, pages] = torch.nan
            pool.values(layer)[:, pages] = torch.nan


def free_pages(harness: CoreOnExecutor) -> np.ndarray:
    """Those that the core holds free, and the sink."""
    (worker,) = harness.state.workers.values()
    allocator = worker.memory.allocators[0]
    return np.concatenate([[0], allocator._stack[: allocator.free]])


def specs() -> list[RequestSpec]:
    draw = np.random.default_rng(4)
    prompts = [draw.integers(0, 256, int(draw.integers(3, 60))).tolist() for _ in range(12)]
    prompts[7] = prompts[1][:]  # finds the other's pages in the cache
    return [
        make_spec(number, prompt=prompt, max_tokens=14, **FEATURES[number % len(FEATURES)])
        for number, prompt in enumerate(prompts, start=1)
    ]


def outcomes(stack, *, poisons: bool, window: int) -> tuple[list[object], int]:
    executor = Poisoned(stack)
    harness = CoreOnExecutor(executor, CoreSettings(budget_tokens=32))
    harness.attach_with(window=window, num_pages=16, max_rows=4)
    if poisons:
        executor.free = partial(free_pages, harness)
    harness.submit(*specs())
    harness.run()
    return [(harness.output(number), harness.end(number).reason) for number in range(1, 13)], executor.poisoned


@pytest.mark.parametrize("window", [1, 2])
def test_s12_what_recycled_pages_held_reaches_nobody(stack, window):
    clean, none = outcomes(stack, poisons=False, window=window)
    poisoned, count = outcomes(stack, poisons=True, window=window)
    assert none == 0 < count
    assert all(len(ids) == 14 for ids, _ in clean)
    assert poisoned == clean
