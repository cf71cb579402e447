"""Capacity planning on made-up steps and loads with known answers: fit, simulated life, search, files."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from protos.client.bench_workload import parse_lengths
from protos.client.capacity_bench_fit import fit_bench_runs
from protos.client.capacity_costs import (
    LinearCost,
    MeasuredSteps,
    PlanShape,
    TableCost,
    fit_cost,
    non_negative_solution,
)
from protos.client.capacity_plan import Demand, Targets, bucket_use, expect, fewest_workers
from protos.client.capacity_simulation import (
    TURNAROUND_S,
    SimulatedLoad,
    SimulatedRequest,
    SimulatedTimes,
    WorkerShape,
    simulate,
)
from protos.client.capacity_sources import BenchRun, read_bench_run, read_recordings, source_kind, turn_s
from protos.service.plan_recording import EntryKind, RecordingHeader, RecordingWriter, read_entries
from protos.service.step_times import StepTimes
from protos.wire.errors import DataFault, InvalidRequest
from protos.wire.result import PlanTimings
from tests.support.plan_driver import Request
from tests.support.recorded_runs import recorded_run
from tests.support.simulated import card
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor

TRUE = LinearCost(base_s=0.005, decode_row_s=0.0015, prefill_token_s=0.001, context_token_s=1e-6)
FLAT = LinearCost(base_s=0.01, decode_row_s=0.0, prefill_token_s=0.0, context_token_s=0.0)
EASY = Targets(inter_token_p95_s=10.0, first_token_p95_s=10.0)


def steps(*, count=400, noise=None, seed=3):
    random = np.random.default_rng(seed)
    rows = random.integers(1, 17, size=count)
    tokens = np.where(random.random(count) < 0.2, random.integers(16, 128, size=count), 0)
    contexts = rows * random.integers(20, 600, size=count)
    shapes = [
        PlanShape(int(row), int(token), int(held)) for row, token, held in zip(rows, tokens, contexts, strict=True)
    ]
    seconds = np.array([TRUE.step_s(shape) for shape in shapes])
    if noise is not None:
        seconds = seconds * noise(random, count)
    return MeasuredSteps(decode_rows=rows, prefill_tokens=tokens, contexts=contexts, seconds=seconds)


def request(prompt=8, output=10, cached=0):
    return SimulatedRequest(prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)


def closed(count, concurrency, *, warm_up=0, **lengths):
    return SimulatedLoad(requests=(request(**lengths),) * count, concurrency=concurrency, warm_up=warm_up)


def demand(**changes):
    values = {"prompt": parse_lengths("32", flag="p"), "output": parse_lengths("20", flag="o"), **changes}
    return Demand(**values)


def test_exact_steps_give_back_their_prices():
    fit = fit_cost(steps())
    found = fit.cost
    assert (found.base_s, found.decode_row_s, found.prefill_token_s, found.context_token_s) == pytest.approx(
        (TRUE.base_s, TRUE.decode_row_s, TRUE.prefill_token_s, TRUE.context_token_s), rel=1e-3
    )
    assert fit.steps == 400
    assert fit.error_ratio < 1e-3


def test_a_neighbour_who_disturbs_every_fifth_step_moves_the_deviations_and_not_the_prices():
    fit = fit_cost(steps(count=2000, noise=lambda random, count: np.where(random.random(count) < 0.2, 4.0, 1.0)))
    assert fit.cost.step_s(PlanShape(8, 0, 2000)) == pytest.approx(TRUE.step_s(PlanShape(8, 0, 2000)), rel=0.02)
    assert np.mean(fit.cost.deviations(prefills=False)) == pytest.approx(1.6, rel=0.05)
    assert np.median(fit.cost.deviations(prefills=True)) == pytest.approx(1.0, rel=0.02)


def test_no_price_is_below_nothing():
    matrix = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    assert non_negative_solution(matrix, np.array([3.0, 2.0, 1.0])).tolist() == pytest.approx([2.0, 0.0])
    assert non_negative_solution(matrix, np.array([-1.0, -2.0, -1.0])).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: {name: getattr(made, name)[:63] for name in made.__dataclass_fields__}, "63 answered plans"),
        (lambda made: {"prefill_tokens": made.prefill_tokens * 0}, "0 plans with prompt tokens"),
        (lambda made: {"decode_rows": made.decode_rows * 0 + 4}, "same number of rows"),
    ],
)
def test_steps_that_cannot_tell_prices_apart_are_refused(change, said):
    made = steps()
    with pytest.raises(InvalidRequest, match=said) as caught:
        fit_cost(replace(made, **change(made)))
    assert caught.value.field == "sources"


def test_one_request_after_the_other_takes_its_steps_and_the_turnaround():
    times = simulate(closed(11, 1), WorkerShape(), FLAT)
    assert times.request_s == pytest.approx([0.1] * 11), "one prefill step and nine of decode"
    assert times.first_token_s == pytest.approx([0.01] * 11)
    assert times.gaps_s == pytest.approx([0.01] * 90), "of all but the last request"
    assert times.tokens / times.seconds == pytest.approx(10 / (0.1 + TURNAROUND_S))


def test_plans_in_flight_cost_a_place_its_next_steps():
    """A request that ends makes room for the next one behind the plans that were sent meanwhile."""
    load = replace(closed(40, 4, output=20), requests=tuple(request(output=17 + number % 4) for number in range(40)))
    rates = [
        times.tokens / times.seconds
        for window in (1, 2, 3)
        for times in [simulate(load, WorkerShape(window=window), FLAT)]
    ]
    assert rates[0] > rates[1] > rates[2] > 0.8 * rates[0]


def test_decode_rows_ride_in_every_plan_and_chunks_end_on_pages():
    worker = WorkerShape(budget_tokens=40, page_size=16)
    asked = (request(prompt=8, output=30), request(prompt=100, output=2), request())
    three = SimulatedLoad(requests=asked, arrivals_s=(0.0, 0.05, 9.0))
    times = simulate(three, worker, FLAT)
    assert [tokens for tokens in times.prefill_tokens if tokens] == [8, 32, 32, 36]
    assert times.decode_rows[1:30].count(0) == 0
    assert max(times.decode_rows) == 2


def test_requests_wait_for_the_pages_of_others():
    worker = WorkerShape(num_pages=4, page_size=16)
    times = simulate(closed(20, 4, prompt=16, output=16), worker, FLAT)
    assert max(times.pages) == 4
    assert max(times.decode_rows) == 2
    free = simulate(closed(20, 4, prompt=16, output=16), replace(worker, num_pages=None), FLAT)
    assert max(free.decode_rows) == 4


def test_the_same_load_gives_the_same_life():
    cost = replace(TRUE, decode_deviations=(0.8, 1.0, 3.0), prefill_deviations=(0.5, 1.5))
    runs = [simulate(closed(30, 3), WorkerShape(), cost, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]


def test_expectations_follow_from_the_simulated_life():
    found = expect(demand(concurrency=8), 2, worker=WorkerShape(), cost=FLAT)
    assert found.inter_token_p50_s == pytest.approx(0.01)
    assert 3.0 < found.rows_mean <= 4.0
    assert found.output_tokens_per_s == pytest.approx(2 * found.rows_mean / 0.01, rel=0.1)
    assert found.pages_peak == 4 * 4, "52 tokens are four pages"
    assert found.utilisation_ratio == pytest.approx(1.0, abs=0.05)


def test_the_fewest_workers_keep_the_promises_and_one_less_does_not():
    targets = Targets(inter_token_p95_s=0.05, first_token_p95_s=1.0)
    asked = demand(concurrency=100)
    found = fewest_workers(asked, targets, worker=WorkerShape(), cost=TRUE)
    assert found.workers > 1
    assert found.meets(targets)
    assert not expect(asked, found.workers - 1, worker=WorkerShape(), cost=TRUE).meets(targets)
    more = fewest_workers(replace(asked, headroom_ratio=0.5), targets, worker=WorkerShape(), cost=TRUE)
    assert more.workers > found.workers


def test_a_rate_above_what_a_worker_gives_needs_another():
    asked, targets = demand(rate=6.0), Targets(inter_token_p95_s=1.0, first_token_p95_s=0.5)
    alone = expect(asked, 1, worker=WorkerShape(max_rows=1), cost=FLAT)
    assert alone.first_token_p95_s > 1.0
    assert fewest_workers(asked, targets, worker=WorkerShape(max_rows=1), cost=FLAT).workers >= 2


@pytest.mark.parametrize(
    ("targets", "field"),
    [
        (Targets(inter_token_p95_s=0.001, first_token_p95_s=9.0), "inter_token_ms"),
        (Targets(inter_token_p95_s=9.0, first_token_p95_s=0.001), "first_token_ms"),
    ],
)
def test_a_promise_that_nobody_can_keep_is_refused_with_what_is_possible(targets, field):
    with pytest.raises(InvalidRequest, match=f"{field} 1 cannot be kept .* percentile of") as caught:
        fewest_workers(demand(concurrency=2), targets, worker=WorkerShape(), cost=FLAT)
    assert caught.value.field == field


def test_a_request_that_no_worker_can_hold_is_refused():
    with pytest.raises(InvalidRequest, match=r"request of 52 tokens does not fit a worker's 3 pages \(48 tokens\)"):
        expect(demand(concurrency=1), 1, worker=WorkerShape(num_pages=3), cost=FLAT)


def test_buckets_are_those_that_plans_choose():
    times = SimulatedTimes(decode_rows=[1, 3, 3, 5], prefill_tokens=[0, 0, 0, 27])
    uses, padding = bucket_use(times)
    assert [(use.phase, use.size, use.share) for use in uses] == [
        ("decode", 1, 0.25),
        ("decode", 4, 0.5),
        ("prefill", 32, 0.25),
    ]
    assert padding == pytest.approx(2 / 41)
    too_wide = SimulatedTimes(decode_rows=[0], prefill_tokens=[7])
    assert bucket_use(too_wide) == ((), 0.0)


def test_a_table_is_read_as_the_simulated_device_reads_it():
    table = StepTimes.model_validate(
        {
            "name": "small",
            "derivation": "made up",
            "kv_bytes": 1,
            "kv_bytes_per_token": 1,
            "decode": {"rows": [1, 3], "context_tokens": [0, 100], "step_ms": [[1, 2], [3, 6]]},
            "prefill": {"tokens": [10, 20], "step_ms": [1, 5]},
        }
    )
    cost = TableCost(table)
    assert cost.step_s(PlanShape(3, 0, 300)) == pytest.approx(0.006)
    assert cost.step_s(PlanShape(1, 14, 50)) == pytest.approx(0.003)
    assert cost.deviations(prefills=True) == (1.0,)


def figures(*, concurrency=4, workers=1, gap=0.02, rate=150.0, prompt=640, output=640, measured=10):
    return {
        "context": {"workers": workers, "load": {"rate": None, "concurrency": concurrency}},
        "measured": measured,
        "prompt_tokens": prompt,
        "cached_tokens": 0,
        "output_tokens": output,
        "latencies": {"inter_token_s": {"p50": gap}},
        "throughput": {"output_tokens_per_s": rate, "steady_output_tokens_per_s": None},
    }


def test_figures_of_two_concurrencies_give_back_the_cost_that_made_them():
    true = LinearCost(base_s=0.006, decode_row_s=0.002, prefill_token_s=0.001, context_token_s=0.0)
    runs = []
    for concurrency in (2, 12):
        times = simulate(closed(300, concurrency, warm_up=concurrency, prompt=64, output=64), WorkerShape(), true)
        gap, rate = float(np.median(np.repeat(times.gaps_s, times.gap_rows))), times.tokens / times.seconds
        runs.append(BenchRun.model_validate(figures(concurrency=concurrency, gap=gap, rate=rate)))
    found = fit_bench_runs(runs, WorkerShape()).cost
    for shape in (PlanShape(2, 0, 0), PlanShape(12, 0, 0), PlanShape(4, 100, 0)):
        assert found.step_s(shape) == pytest.approx(true.step_s(shape), rel=0.15)


def test_figures_of_one_concurrency_are_refused():
    with pytest.raises(InvalidRequest, match=r"2 figures of one concurrency \(4 requests a worker\)"):
        fit_bench_runs([BenchRun.model_validate(figures())] * 2, WorkerShape())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda made: made.update(measured=0), "measured: Input should be greater than or equal to 1"),
        (lambda made: made.pop("latencies"), "latencies: Field required"),
        (lambda made: made["context"]["load"].update(rate=3.0, concurrency=0), "--rate 3: a fit needs --concurrency"),
        (lambda made: made["latencies"]["inter_token_s"].update(p50=None), "p50: Input should be a valid number"),
    ],
)
def test_a_file_of_other_figures_is_refused_by_the_field(tmp_path, change, said):
    made, path = figures(), tmp_path / "figures.json"
    change(made)
    path.write_text(json.dumps(made))
    with pytest.raises(InvalidRequest, match=said):
        read_bench_run(path)


def test_a_file_is_known_by_its_content_and_name(tmp_path):
    for name, kind in (("a.json", "bench"), ("b.toml", "table")):
        (tmp_path / name).write_text("{}")
        assert source_kind(tmp_path / name) == kind
    (tmp_path / "c.txt").write_text("words")
    for path in (tmp_path / "c.txt", tmp_path / "none.fprec", Path(tmp_path)):
        with pytest.raises(InvalidRequest, match=path.name):
            source_kind(path)
    (tmp_path / "d.json").write_text("[")
    with pytest.raises(InvalidRequest, match=r"d\.json is no result of `bench --json`: no JSON"):
        read_bench_run(tmp_path / "d.json")


@pytest.fixture(scope="module")
def recording(tmp_path_factory):
    executor = build_simulated_executor(card(context_tokens=512), SimulatedSettings(step_ms=0.5, num_pages=100))
    wave = [Request(prompt_ids=range(40), max_new=6) for _ in range(3)]
    return recorded_run(tmp_path_factory.mktemp("recordings") / "run", executor, [wave])[0]


def test_recorded_plans_become_steps(recording):
    recorded = read_recordings([recording])
    made = recorded.steps
    assert made.prefill_tokens.sum() == 3 * 40
    assert set(made.decode_rows[made.prefill_tokens == 0]) <= {1, 2, 3}
    assert (made.seconds > 0).all()
    assert made.contexts.max() <= 3 * 46
    assert recorded.info.sub_pools[0].num_pages == 100


def test_a_turn_is_the_plans_time_on_the_device_and_the_devices_wait_for_it():
    timings = PlanTimings(
        receive_ns=1 << 40, parse_ns=1 << 41, wait_ns=1 << 42, host_to_device_ns=1, forward_ns=20, sample_ns=300,
        device_to_host_ns=4000, bubble_ns=50000,
    )  # fmt: skip
    assert turn_s(timings) == pytest.approx(54321e-9)


def test_a_recording_that_was_cut_off_counts_as_far_as_it_goes(recording, tmp_path):
    whole = read_recordings([recording]).steps
    writer = RecordingWriter(tmp_path / "unended", RecordingHeader(model="m", weights_fingerprint="w", part=0))
    for entry in read_entries(recording):
        if entry.kind not in (EntryKind.HEADER, EntryKind.END):
            writer.add(entry)
    writer.flush()
    both = read_recordings([recording, tmp_path / "unended"]).steps
    assert len(both.seconds) == 2 * len(whole.seconds)
    writer.close()
    damaged = tmp_path / "damaged"
    content = bytearray(recording.read_bytes())
    content[100] ^= 1
    damaged.write_bytes(content)
    with pytest.raises(DataFault, match="damaged"):
        read_recordings([damaged])
    empty = RecordingWriter(tmp_path / "empty", RecordingHeader(model="m", weights_fingerprint="w", part=0))
    empty.close()
    with pytest.raises(InvalidRequest, match="no answered plan"):
        read_recordings([tmp_path / "empty"])
