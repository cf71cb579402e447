"""A recorded run of the real model replays bit for bit, from the first file and from one that opens in the middle."""

import pytest

from tests.support.model import model_folder
from tests.support.plan_driver import Request
from tests.support.recorded_runs import recorded_run, replayed
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.model, pytest.mark.timeout(120)]


@pytest.fixture(scope="module")
def executor():
    settings = ExecutorSettings(numerics="fast", num_pages=64, max_rows=8, max_tokens=64, threads=1)
    return build_tp_model_worker(model_folder(), settings)


def test_the_real_model_replays_to_the_same_tokens_and_log_probabilities(executor, tmp_path):
    waves = [
        [
            Request(
                prompt_ids=[40 + 7 * n + k for k in range(18 + n)],
                max_new=6,
                temperature=0.8 * (n % 2),
                seed=n,
                top_logprobs=2,
            )
            for n in range(first, first + 5)
        ]
        for first in range(0, 25, 5)
    ]
    files = recorded_run(tmp_path / "rec", executor, waves, max_file_bytes=1024)
    assert len(files) >= 2
    rebuilt_pages = 0
    for path in files:
        replayer = replayed(path, executor)
        assert replayer.first is None
        assert replayer.counts.plans >= 3
        rebuilt_pages += replayer.counts.rebuilt_pages
    assert rebuilt_pages
