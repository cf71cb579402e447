import math
import random
from dataclasses import replace

import pytest

from protos.wire.result import PlanTimings
from scheduler_svc.core.budget import budget_rule
from scheduler_svc.core.cost_model import CostModel, PlanShape
from scheduler_svc.core.events import PlanTimed, ResultReceived
from scheduler_svc.core.plan_deadline import plan_budget_ms
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, small_info
from tests.support.plans import full_sub_pool, make_info, window_sub_pool


def true_s(shape: PlanShape) -> float:
    return 0.004 + 0.0009 * shape.tokens + 2e-7 * shape.context


def trained(*, noise: float = 0.0, results: int = 200, most_tokens: int = 300) -> CostModel:
    rng, model = random.Random(1), CostModel()
    for _ in range(results):
        shape = PlanShape(rng.randint(1, most_tokens), rng.randint(1, 20_000))
        model.observe(shape, true_s(shape) * (1 + noise * rng.uniform(-1, 1)))
    return model


def test_the_model_finds_the_three_costs():
    model = trained()

    for shape in (PlanShape(1, 10), PlanShape(250, 100), PlanShape(16, 16_000)):
        assert model.predict_s(shape) == pytest.approx(true_s(shape), rel=0.02)
    assert model.tokens_within(0.25, context=1000) == pytest.approx((0.25 - 0.0042) / 0.0009, rel=0.02)
    assert model.error_ratio < 0.02


def test_noise_is_averaged_out_and_reported():
    model = trained(noise=0.3)

    assert model.predict_s(PlanShape(100, 1000)) == pytest.approx(true_s(PlanShape(100, 1000)), rel=0.1)
    assert 0.05 < model.error_ratio < 0.3


def test_a_worker_that_slows_down_is_noticed():
    model = trained()
    rng = random.Random(2)
    for _ in range(400):
        shape = PlanShape(rng.randint(1, 300), rng.randint(1, 20_000))
        model.observe(shape, 3 * true_s(shape))

    assert model.predict_s(PlanShape(100, 1000)) == pytest.approx(3 * true_s(PlanShape(100, 1000)), rel=0.1)


def test_one_kind_of_plan_for_long_does_no_harm():
    model = CostModel()
    for _ in range(5000):
        model.observe(PlanShape(1, 100), 0.005)

    assert model.predict_s(PlanShape(1, 100)) == pytest.approx(0.005, rel=0.01)
    assert model.error_ratio < 0.01


def test_times_that_were_not_measured_teach_nothing():
    model = CostModel()
    for _ in range(100):
        model.observe(PlanShape(10, 10), 1e-9)

    assert not model.is_ready


def rule(*, device: str = "cpu", window: int = 2, token_limit: int = 8192, pools=(), **settings: object):
    info = make_info(device=device, sub_pools=pools)
    return budget_rule(CoreSettings(**settings), info, token_limit=token_limit, window=window)


@pytest.mark.parametrize(("fixed", "budget"), [(1, 16), (100, 100), (9999, 8192)])
def test_a_fixed_budget_ignores_measurements_and_clamps(fixed, budget):
    assert rule(budget_tokens=fixed).tokens(trained()) == budget


def test_the_budget_is_what_fits_the_target_in_whole_pages():
    model = trained(most_tokens=2000)

    assert rule().tokens(CostModel()) == 256
    assert rule().tokens(model) == pytest.approx(250 / 0.9, abs=24)
    assert rule(target_step_ms=1000.0).tokens(model) == pytest.approx(1000 / 0.9, abs=40)
    assert rule().tokens(model) % 16 == 0
    assert rule(target_step_ms=1.0).tokens(model) == 64
    assert rule(target_step_ms=60_000.0).tokens(model) == 2048
    assert rule(device="cuda:0", target_step_ms=1.0).tokens(model) == 256
    assert rule(token_limit=48).tokens(model) == 48


def test_the_budget_grows_step_by_step():
    assert rule(target_step_ms=60_000.0).tokens(trained(most_tokens=200)) <= 400


def test_a_small_window_sub_pool_bounds_the_budget():
    pools = (full_sub_pool(), window_sub_pool(num_pages=257, window_tokens=64))

    assert rule(pools=pools).most == (256 * 16 // 4 - 64) // 2


def test_results_change_the_budget_of_later_plans():
    harness = CoreHarness(CoreSettings(target_step_ms=20.0, first_budget_tokens=16))
    harness.attach(info=small_info(num_pages=400, max_tokens=512))
    worker = harness.state.workers["w0"]
    timings = PlanTimings(forward_ns=1_000_000)
    for _ in range(40):
        worker.measured(PlanShape(16, 100), timings.forward_ns / 1e9)

    assert worker.budget_tokens == 32
    harness.submit(make_spec(1, prompt=60))
    assert harness.plans[0][1].rows.extend_lens.tolist() == [32]
    assert harness.state.gauges().workers[0].budget_tokens == 32


def test_a_request_that_would_be_late_anyway_is_refused_with_a_hint():
    harness = CoreHarness()
    harness.attach(info=small_info(max_rows=1))
    for tokens in range(1, 21):
        harness.state.workers["w0"].measured(PlanShape(tokens, 100), 0.1 + 0.001 * tokens)
    harness.submit(*[make_spec(stream, max_tokens=30) for stream in range(1, 20)])
    waiting = harness.state.waiting.tokens
    harness.submit(make_spec(50, deadline_s=harness.now + 1.0), make_spec(51, deadline_s=harness.now + 1000.0))

    error = harness.end(50).error
    assert (error.reason, error.field) == ("QUEUE_FULL", "deadline")
    assert error.retry_after_ms > 1000
    assert harness.end(51) is None
    assert harness.state.waiting.tokens == waiting + 5


def test_the_deadline_of_a_plan_is_generous_and_fixed_until_measured():
    model = trained()
    shape = PlanShape(100, 1000)

    assert plan_budget_ms(CostModel(), shape, device="cuda:0", unmeasured_ms=30_000) == 30_000
    slowest_ms = 1e3 * model.slowest_s
    assert slowest_ms == pytest.approx(1e3 * true_s(PlanShape(300, 20_000)), rel=0.1)
    assert plan_budget_ms(model, shape, device="cuda:0", unmeasured_ms=30_000) == math.ceil(3 * slowest_ms + 2000)
    assert plan_budget_ms(model, shape, device="cpu", unmeasured_ms=30_000) == math.ceil(3 * slowest_ms + 20_000)
    large = PlanShape(590, 20_000)
    assert plan_budget_ms(model, large, device="cuda:0", unmeasured_ms=30_000) == pytest.approx(
        3e3 * true_s(large) + 2000, rel=0.02
    )


@pytest.mark.parametrize("shape", [PlanShape(601, 1000), PlanShape(16, 40_001)])
def test_a_plan_far_larger_than_those_measured_gets_the_fixed_deadline(shape):
    assert plan_budget_ms(trained(most_tokens=300), shape, device="cuda:0", unmeasured_ms=1234) == 1234


def test_a_slow_plan_of_late_counts_for_a_while():
    model = CostModel()
    model.observe(PlanShape(16, 100), 8.0)
    times = []
    for _ in range(1400):
        model.observe(PlanShape(16, 100), 0.01)
        times.append(plan_budget_ms(model, PlanShape(16, 100), device="cuda:0", unmeasured_ms=30_000) / 1e3)

    assert times[20] == pytest.approx(3 * 8 + 2, rel=0.03)
    assert times[-1] == pytest.approx(3 * 2 + 2, rel=0.05)


class Device:
    """A worker whose plans take exactly what `true_s` says."""

    def __init__(self, harness: CoreHarness) -> None:
        self.harness = harness
        self.timed: list[PlanTimed] = []

    def run(self) -> None:
        while self.harness.pending["w0"]:
            plan = self.harness.pending["w0"][0]
            result = self.harness.execute()
            seconds = true_s(PlanShape(len(plan.tokens.ids), int(plan.rows.seq_lens.sum())))
            timed = replace(result, timings=PlanTimings(forward_ns=int(seconds * 1e9)))
            out = self.harness.step(ResultReceived("w0", timed))
            self.timed += [said for said in out if isinstance(said, PlanTimed)]


def test_plans_of_a_core_carry_the_deadline_of_their_own_shape_and_are_compared_with_what_they_took():
    harness = CoreHarness(CoreSettings(plan_budget_ms=9999))
    harness.attach(info=small_info(num_pages=800, max_tokens=512, device="cuda:0"))
    device = Device(harness)
    harness.submit(make_spec(1, prompt=100, max_tokens=30))
    device.run()
    harness.submit(make_spec(2, prompt=90, max_tokens=30), make_spec(3, prompt=180, max_tokens=30))
    device.run()

    budgets = [plan.identity.budget_ms for _, plan in harness.plans]
    sizes = [len(plan.tokens.ids) for _, plan in harness.plans]
    assert budgets[:16] == [9999] * 16
    assert budgets[17] == math.ceil(3e3 * 0.999**16 * true_s(PlanShape(100, 100)) + 2000)
    second = next(index for index, size in enumerate(sizes) if index and size > 2)
    assert sizes[second] > 200
    assert budgets[second] == 9999, "far more tokens than in any plan before"
    assert len(budgets) - 17 >= len(device.timed) >= 40
    assert all(said.worker == "w0" for said in device.timed)
    for said in device.timed[-10:]:
        assert said.predicted_s == pytest.approx(said.measured_s, rel=0.03)
