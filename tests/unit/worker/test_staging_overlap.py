"""The next plan is parsed, validated and staged while the device computes: kernels let go of the interpreter."""

import threading
import time

import numpy as np
import pytest

from protos.wire.codec import decode_plan, encode_plan
from protos.wire.validate import validate_plan
from tests.support import plans
from tests.support.model import model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

PROMPT_TOKENS = 256
ROWS = 64


@pytest.mark.model
def test_plans_are_staged_while_a_forward_runs():
    settings = ExecutorSettings(numerics="fast", kernels="native", num_pages=400, threads=1)
    worker = build_tp_model_worker(model_folder(), settings)
    info = worker.worker_info()
    ids = np.random.default_rng(1).integers(100, 40000, PROMPT_TOKENS).tolist()
    prefill = worker.stage(plans.make_plan([plans.extend(0, PROMPT_TOKENS, ids=ids)], info=info))
    body = encode_plan(plans.make_plan([plans.decode(64) for _ in range(ROWS)], info=info, seq=2))
    ended_at = []
    device = threading.Thread(target=lambda: (prefill(), ended_at.append(time.perf_counter())))
    staged_at = []
    device.start()
    while device.is_alive():
        plan = decode_plan(body)
        validate_plan(plan, info)
        worker.stage(plan)
        staged_at.append(time.perf_counter())
    device.join()
    worker.close()
    assert sum(moment < ended_at[0] for moment in staged_at) >= 5
