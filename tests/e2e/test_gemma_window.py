"""Real Gemma 3 under the real scheduling core: known answers, windows that give pages up early, pools that balance."""

import numpy as np
import pytest

from protos.wire.enums import SubPoolKind
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import make_spec
from tests.support.executor_core import ExecutorCore, listed_window_pages
from tests.support.golden import assert_free_run, cases
from tests.support.model import GEMMA3, model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
CASES = cases("gemma3_greedy.json")
WINDOW, PAGE = 512, 16
LONG = 4000


def built(**changes):
    settings = {"num_pages": 400, "max_rows": 16, "max_tokens": 1024, "threads": 2}
    return build_tp_model_worker(model_folder(GEMMA3), ExecutorSettings(**(settings | changes)))


@pytest.fixture(scope="module")
def fast():
    """On the native kernels."""
    worker = built(numerics="fast", kernels="native")
    yield worker
    worker.close()


@pytest.fixture(scope="module")
def reproducible():
    """With every read proved by the canary."""
    worker = built(numerics="reproducible", num_pages=100, threads=1, kv_canary="refuse")
    yield worker
    worker.close()


def most_window_pages(core: ExecutorCore, *, chunk: int) -> int:
    """DESIGN.md 6: window + plans in flight x chunk + 2 pages."""
    in_flight = core.state.workers["w0"].window
    return -(-(WINDOW + in_flight * chunk) // PAGE) + 2


def specs(max_tokens: int):
    return [
        make_spec(index, prompt=case["prompt_ids"], max_tokens=max_tokens) for index, case in enumerate(CASES, start=1)
    ]


def test_the_worker_offers_a_full_and_a_window_sub_pool(fast):
    full, window = fast.worker_info().sub_pools
    assert (full.kind, full.window_tokens, window.kind, window.window_tokens) == (
        SubPoolKind.FULL,
        0,
        SubPoolKind.WINDOW,
        WINDOW,
    )
    assert (full.bytes_per_page, window.bytes_per_page) == (3 * 16 * 256 * 2 * 2, 15 * 16 * 256 * 2 * 2)


@pytest.mark.parametrize(("budget", "max_tokens"), [(512, 20), (64, 4), (16, 4)])
def test_free_runs_batched_and_in_chunks_follow_the_known_ids(reproducible, budget, max_tokens):
    core = ExecutorCore(reproducible, CoreSettings(budget_tokens=budget))
    core.submit(*specs(max_tokens))
    core.run()
    for index, case in enumerate(CASES, start=1):
        known = {name: case[name][:max_tokens] for name in ("greedy_ids", "top5_logprobs")}
        assert_free_run(known, core.output(index))
    core.assert_balanced()


def test_a_free_run_alone_follows_the_known_ids(reproducible):
    index = 3
    core = ExecutorCore(reproducible, CoreSettings(budget_tokens=256))
    core.submit(specs(12)[index - 1])
    core.run()
    assert_free_run({name: CASES[index - 1][name][:12] for name in ("greedy_ids", "top5_logprobs")}, core.output(index))


def test_a_free_run_in_bfloat16_follows_the_known_ids_in_chunks():
    worker = built(numerics="fast", kernels="torch", dtype="bfloat16", num_pages=100, threads=1)
    core = ExecutorCore(worker, CoreSettings(budget_tokens=16))
    core.submit(specs(6)[0])
    core.run()
    assert_free_run({name: CASES[0][name][:6] for name in ("greedy_ids", "top5_logprobs")}, core.output(1))
    core.assert_balanced()


def test_a_long_sequence_holds_few_window_pages_and_gives_all_back(fast):
    """4,000 tokens of prompt and some more, in chunks, beside a short request; then the same prompt again."""
    chunk = 256
    core = ExecutorCore(fast, CoreSettings(budget_tokens=chunk))
    limit = most_window_pages(core, chunk=chunk)
    held: list[int] = []
    core.watch = lambda: held.extend(core.window_pages())
    prompt = np.random.default_rng(8).integers(300, 200_000, LONG)
    core.submit(make_spec(1, prompt=prompt, max_tokens=20), make_spec(2, prompt=CASES[0]["prompt_ids"], max_tokens=20))
    core.run()

    listed = np.concatenate([listed_window_pages(plan) for _, plan in core.plans])
    assert max(held) <= limit
    assert listed.max() <= limit
    assert limit < LONG // PAGE // 3
    longest = max(int(plan.rows.seq_lens.max()) for _, plan in core.plans)
    assert longest == LONG + 19
    core.assert_balanced()

    before, plans = core.output(1), len(core.plans)
    core.submit(make_spec(3, prompt=prompt, max_tokens=20))
    core.run()
    assert core.output(3) == before
    again = [plan for _, plan in core.plans[plans:]]
    assert again[0].rows.first_positions[0] > 0, "no prefix hit"
    core.assert_balanced()


def test_a_pool_that_cannot_hold_all_windows_retracts_and_gives_the_same_ids(fast):
    """Admission is by the scarcer sub-pool: more requests than windows fit, all with the ids that they get alone."""
    prompts = np.random.default_rng(9).integers(300, 200_000, (4, 560))
    alone = []
    for index, prompt in enumerate(prompts):
        core = ExecutorCore(fast, CoreSettings(budget_tokens=256))
        core.submit(make_spec(index, prompt=prompt, max_tokens=6))
        core.run()
        alone.append(core.output(index))
    small = built(numerics="fast", kernels="native", num_pages=120)
    try:
        core = ExecutorCore(small, CoreSettings(budget_tokens=256))
        core.submit(*[make_spec(index, prompt=prompt, max_tokens=6) for index, prompt in enumerate(prompts)])
        core.run()
        assert [core.output(index) for index in range(len(prompts))] == alone
        assert max(len(plan.rows.handles) for _, plan in core.plans) < len(prompts)
        core.assert_balanced()
    finally:
        small.close()
