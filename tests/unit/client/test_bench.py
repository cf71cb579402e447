"""The benchmark's arithmetic on made-up records with known answers, its workload and its options."""

import json
from array import array
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from protos.client import bench_report
from protos.client.bench_figures import bench_figures, distribution, inter_token_gaps
from protos.client.bench_options import LoadOptions, PromptOptions, load_plan
from protos.client.bench_records import Outcome, RequestRecord
from protos.client.bench_report import BenchContext, as_json, check_plot, draw_plot
from protos.client.bench_workload import arrival_times, parse_lengths, prompt_source, read_prompts, workload
from protos.client.exit_codes import WrongUsage
from protos.client.messages import Chat, ModelDescription, TokenIds
from protos.wire.errors import DeadlinePassed, InvalidRequest, QueueFull

MODEL = ModelDescription(
    name="m",
    context_tokens=100,
    vocab_size=50,
    logits_width=64,
    eos_token_ids=(2,),
    has_chat_template=True,
    dtype="float32",
    numerics="simulated",
    version="1",
)


def record(number, *chunks, due=0.0, sent=None, end=None, outcome=Outcome.DONE, reason="LENGTH", **more):
    """`chunks` are (arrival, tokens)."""
    return RequestRecord(
        number=number,
        due_s=due,
        sent_s=due if sent is None else sent,
        end_s=(chunks[-1][0] if chunks else due) if end is None else end,
        chunk_times_s=array("d", [at for at, _ in chunks]),
        chunk_tokens=array("l", [tokens for _, tokens in chunks]),
        outcome=outcome,
        reason=reason,
        **more,
    )


def test_percentiles_are_linear_between_neighbours():
    found = distribution(np.arange(1, 102) / 100)
    assert (found.count, found.mean, found.max) == (101, pytest.approx(0.51), pytest.approx(1.01))
    assert [found.p50, found.p90, found.p95, found.p99] == pytest.approx([0.51, 0.91, 0.96, 1.00])
    assert distribution(np.array([1.0, 3.0])).p50 == 2.0
    assert distribution(np.zeros(0)) is None


def test_a_chunk_of_n_tokens_counts_as_n_gaps():
    gaps = inter_token_gaps(record(0, (1.0, 1), (1.5, 1), (2.1, 3)))
    assert gaps.tolist() == pytest.approx([0.5, 0.2, 0.2, 0.2])


def test_figures_of_two_requests_are_those_of_a_calculation_by_hand():
    records = [
        record(0, (9.0, 1), (9.5, 1)),
        record(1, (10.2, 1), (10.4, 1), (10.8, 2), due=10.0, sent=10.1, prompt_tokens=7, cached_tokens=3),
        record(2, (12.5, 2), (14.0, 4), due=12.0, prompt_tokens=9),
    ]
    figures = bench_figures(records, warm_up=1)
    assert (figures.measured, figures.warm_up) == (2, 1)
    assert (figures.prompt_tokens, figures.cached_tokens, figures.output_tokens) == (16, 3, 10)
    latencies = figures.latencies
    assert latencies.first_token_s.mean == pytest.approx((0.2 + 0.5) / 2)
    assert latencies.inter_token_s.count == 3 + 4
    assert latencies.inter_token_s.mean == pytest.approx((0.2 + 0.2 + 0.2 + 4 * 0.375) / 7)
    assert latencies.chunk_gap_s.max == pytest.approx(1.5)
    assert latencies.token_mean_s.mean == pytest.approx((0.6 / 3 + 1.5 / 4) / 2)
    assert latencies.request_s.mean == pytest.approx((0.8 + 2.0) / 2)
    assert latencies.late_s.max == pytest.approx(0.1)
    throughput = figures.throughput
    assert throughput.seconds == pytest.approx(14.0 - 10.1)
    assert throughput.output_tokens_per_s == pytest.approx(10 / 3.9)
    assert throughput.requests_per_s == pytest.approx(2 / 3.9)
    assert throughput.steady_output_tokens_per_s == pytest.approx(4 / (12.0 - 10.1))


def test_refusals_failures_and_cut_requests_are_counted_apart_and_have_no_latency():
    refused, failed = record(1), record(2)
    refused.failed(QueueFull("full"))
    failed.failed(DeadlinePassed("late"))
    cut = record(3, (1.0, 1), outcome=Outcome.CUT, reason="CUT", end=5.0)
    figures = bench_figures([record(0, (1.0, 1), (2.0, 1)), refused, failed, cut], warm_up=0)
    assert figures.outcomes == {"done": 1, "refused": 1, "failed": 1, "cut": 1}
    assert figures.reasons == {"LENGTH": 1, "QUEUE_FULL": 1, "DEADLINE_PASSED": 1, "CUT": 1}
    assert figures.latencies.request_s.count == 1
    assert figures.latencies.first_token_s.count == 2


def test_nothing_measured_gives_no_figures():
    figures = bench_figures([record(0, (1.0, 1))], warm_up=5)
    assert figures.throughput is None
    assert set(asdict(figures.latencies).values()) == {None}


def asked(**options):
    return workload(prompt_source(PromptOptions(**options)), MODEL)


def test_the_same_number_is_the_same_request_and_lengths_follow_their_distribution():
    first, again = asked(prompt_tokens="10-30", output_tokens="5"), asked(prompt_tokens="10-30", output_tokens="5")
    requests = [first.request(number) for number in range(200)]
    assert requests == [again.request(number) for number in range(200)]
    lengths = [len(request.prompt.ids) for request in requests]
    assert (min(lengths), max(lengths)) == (10, 30)
    assert all(request.max_tokens == 5 for request in requests)
    assert all(0 <= token_id < 50 for request in requests for token_id in request.prompt.ids)
    assert asked(seed=1).request(0) != asked(seed=2).request(0)


def test_prompts_and_answers_fit_the_context_and_share_a_prefix_when_told():
    load = asked(prompt_tokens="lognormal:60:2", output_tokens="lognormal:60:2", shared_prefix_tokens=4)
    requests = [load.request(number) for number in range(100)]
    assert all(len(request.prompt.ids) + request.max_tokens <= 100 for request in requests)
    assert len({request.prompt.ids[:4] for request in requests if len(request.prompt.ids) >= 4}) == 1


@pytest.mark.parametrize(
    "text", ["", "0", "5-4", "-3", "x", "lognormal:5", "lognormal:0:1", "lognormal:5:0", "1.5", "1048577", "9" * 400]
)
def test_a_length_that_cannot_be_read_is_wrong_usage(text):
    with pytest.raises(WrongUsage, match="--prompt-tokens takes"):
        parse_lengths(text, flag="--prompt-tokens")


def test_arrivals_are_random_at_the_rate_until_the_end():
    plan = load_plan(LoadOptions(rate=50.0, duration_s=100.0))
    times = list(arrival_times(plan, seed=3))
    gaps = np.array([right - left for left, right in pairwise(times)])
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert gaps.std() == pytest.approx(gaps.mean(), rel=0.05)
    assert times[-1] < 100
    assert len(list(arrival_times(load_plan(LoadOptions(rate=50.0, requests=7)), seed=3))) == 7


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, (8, None, 30.0, 8, 1)),
        ({"concurrency": 256}, (256, None, 30.0, 256, 3)),
        ({"concurrency": 2000, "requests": 50}, (2000, 50, None, 10, 8)),
        ({"rate": 4.5, "duration_s": 100.0}, (0, None, 100.0, 5, 1)),
        ({"rate": 150.0, "requests": 100}, (0, 100, None, 20, 2)),
        ({"concurrency": 2, "processes": 9, "warm_up": 0}, (2, None, 30.0, 0, 2)),
    ],
)
def test_defaults_of_the_load(options, expected):
    plan = load_plan(LoadOptions(**options), cores=8)
    found = (plan.concurrency, plan.max_requests, plan.duration_s, plan.warm_up, plan.processes)
    assert found == expected


def test_open_and_closed_loop_exclude_each_other():
    with pytest.raises(WrongUsage, match="exclude each other"):
        load_plan(LoadOptions(rate=1.0, concurrency=1))


def test_prompts_of_a_file_are_used_in_turn(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"text": "a"}, {"ids": [1, 2], "max_tokens": 9}, {"messages": [{"role": "user", "content": "b"}]}]
    path.write_text("\n\n".join(json.dumps(line) for line in lines))
    load = asked(prompts=path, output_tokens="4")
    requests = [load.request(number) for number in range(4)]
    assert [request.prompt for request in requests] == ["a", TokenIds((1, 2)), Chat((("user", "b"),)), "a"]
    assert [request.max_tokens for request in requests] == [4, 9, 4, 4]
    assert requests[0].seed != requests[3].seed


@pytest.mark.parametrize(
    "line",
    [
        *("{", "[]", "{}", '{"text": 1}', '{"ids": []}', '{"ids": [true]}', '{"messages": []}', '{"messages": [{}]}'),
        *('{"text": "a", "max_tokens": 0}', '{"text": "a", "max_tokens": "9"}', ""),
    ],
)
def test_a_bad_line_is_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(line)
    with pytest.raises(InvalidRequest, match=r"p\.jsonl"):
        list(read_prompts(path))


def test_json_holds_context_and_figures():
    figures = bench_figures([record(0, (1.0, 1), (2.0, 1))], warm_up=0)
    plan = load_plan(LoadOptions(), cores=1)
    context = BenchContext(
        target="t",
        model="m",
        numerics="n",
        dtype="d",
        workers=2,
        load=plan,
        prompts=PromptOptions(prompt_tokens="64-128", prompts=Path("asked.jsonl")),
        was_cut=False,
        is_verified=False,
    )
    content = json.loads(as_json(figures, context))
    assert content["context"]["load"]["concurrency"] == 8
    assert content["context"]["is_verified"] is False
    prompts = content["context"]["prompts"]
    assert (prompts["prompt_tokens"], prompts["output_tokens"], prompts["seed"]) == ("64-128", "128", 0)
    assert prompts["prompts"] == "asked.jsonl"
    assert content["latencies"]["inter_token_s"]["p99"] == 1.0


def test_a_plot_needs_a_png_path_and_its_library(tmp_path, monkeypatch):
    check_plot(None)
    check_plot(tmp_path / "a.png")
    with pytest.raises(WrongUsage, match=r"\.png"):
        check_plot(tmp_path / "a.svg")
    monkeypatch.setattr(bench_report, "_PLOT_LIBRARY", "no_such_library")
    with pytest.raises(WrongUsage, match=r"needs matplotlib: pip install 'forwardplane\[plot\]'"):
        check_plot(tmp_path / "a.png")


def test_a_plot_is_a_png_also_of_nothing(tmp_path):
    path = tmp_path / "a.png"
    for records in ([record(0, (1.0, 1), (2.0, 1))], []):
        draw_plot(path, records, warm_up=0, title="t")
        assert path.read_bytes().startswith(b"\x89PNG")
