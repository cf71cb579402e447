"""A worker with graphs, built from settings: sizes, back-ends, memory of the last start, refusals, debug mode."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire.enums import Feature, ForwardMode, GraphPhase
from protos.wire.errors import InvalidRequest, UnsupportedFeature
from tests.support.graph_driver import capture_all, graph_driver, replayed
from tests.support.inline_tape import InlineTapeDevice
from tests.support.plan_driver import PlanDriver, Request
from tests.support.tiny_llama import tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.device.device_graph import CaptureError
from worker_svc.forward_context import ForwardContext
from worker_svc.runners import stack_graphs
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings
from worker_svc.runners.graph_tools import GraphTools

SETTINGS = {"numerics": "reproducible", "num_pages": 60, "max_rows": 16, "max_tokens": 64, "threads": 1}
GRAPHS = GraphSettings(graph="all", decode_buckets=(1, 4), prefill_buckets=(16, 32))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def built(folder, graphs=GRAPHS, **changes):
    worker = build_tp_model_worker(folder, ExecutorSettings(**(SETTINGS | changes), graphs=graphs))
    return worker


def requests(seed=0, count=5):
    draw = np.random.default_rng(seed)
    return [Request(prompt_ids=draw.integers(0, 250, 3 + 4 * index).tolist(), max_new=6) for index in range(count)]


def sizes(worker):
    return {entry.phase: entry.sizes for entry in worker.captures.progress.buckets}


def test_nothing_is_captured_unless_it_is_asked_for(folder):
    worker = built(folder, GraphSettings())
    assert worker.worker_info().buckets == ()
    assert Feature.GRAPHS not in worker.worker_info().features
    assert worker.captures is None


def test_settings_beside_the_usual_ones_are_known_by_name():
    assert GraphSettings().special() == GraphSettings(graph="all").special() == {}
    assert GraphSettings(graph="off", debug_graph=True).special() == {}
    asked = GraphSettings(graph="prefill", prefill_buckets=(16,), graph_memory_file="x")
    assert asked.special() == {"graph": "prefill", "prefill_buckets": (16,)}


@pytest.mark.parametrize("phase", [GraphPhase.DECODE, GraphPhase.PREFILL])
def test_one_phase_alone(folder, phase):
    worker = built(folder, replace(GRAPHS, graph=phase.name.lower()))
    assert set(sizes(worker)) == {phase}
    assert Feature.GRAPHS in worker.worker_info().features


def test_the_default_sizes_end_where_plans_do(folder):
    worker = built(folder, GraphSettings(graph="all"), max_rows=11, max_tokens=100)
    assert sizes(worker) == {
        GraphPhase.DECODE: (1, 2, 4, 8, 11),
        GraphPhase.PREFILL: (16, 32, 48, 64, 80, 96, 100),
    }


@pytest.mark.parametrize(
    ("changes", "field", "words"),
    [
        ({"decode_buckets": (4, 1)}, "decode_buckets", ("is 4,1,", "do not ascend", "1,4")),
        ({"decode_buckets": (1, 4, 4)}, "decode_buckets", ("is 1,4,4,", "twice", "1,4")),
        ({"prefill_buckets": (0, 16)}, "prefill_buckets", ("below 1", "is 16")),
        ({"decode_buckets": (8, 64)}, "decode_buckets", ("is 8,64, but plans go to 16", "is 8")),
        ({"decode_buckets": (999_999,)}, "decode_buckets", ("is 999999, but plans go to 16", "sizes from 1 to 16")),
        ({"decode_buckets": (0,)}, "decode_buckets", ("is 0, but a size is below 1: sizes from 1 to 16 would work",)),
        ({"prefill_buckets": (16, 32, 500, 100)}, "prefill_buckets", ("16,32",)),
        ({"graph": "some"}, "graph", ("off, decode, prefill, all",)),
        ({"decode_graph_backend": "magic"}, "decode_graph_backend", ("full, breakable, compiled",)),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_would(folder, changes, field, words):
    with pytest.raises((InvalidRequest, UnsupportedFeature)) as caught:
        built(folder, replace(GRAPHS, **changes))
    assert caught.value.field == field
    assert all(word in caught.value.message for word in words), caught.value.message


def test_sizes_without_memory_are_refused_with_the_largest_that_fit(folder, monkeypatch):
    monkeypatch.setattr(stack_graphs, "free_bytes", lambda device: 40_000)
    with pytest.raises(InvalidRequest, match=r"decode_buckets: a graph of 16 .* what would fit is 1,2$") as caught:
        built(folder, replace(GRAPHS, decode_buckets=(1, 2, 16)))
    assert caught.value.field == "decode_buckets"
    monkeypatch.setattr(stack_graphs, "free_bytes", lambda device: 1)
    with pytest.raises(InvalidRequest, match=r"decode_buckets: a graph of 16 .* without decode graphs it works$"):
        built(folder, replace(GRAPHS, decode_buckets=(16,)))


def test_compiled_without_a_compiler_is_refused_by_name(folder, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(UnsupportedFeature, match=r"compiled cannot be had.*compiler") as caught:
        built(folder, replace(GRAPHS, prefill_graph_backend="compiled"))
    assert caught.value.field == "prefill_graph_backend"


class Fixes:
    """Attention that has plans at fixed addresses for decode steps of up to four rows."""

    def why_not_fixed(self, mode, *, max_reqs):
        return None if mode is ForwardMode.DECODE and max_reqs <= 4 else f"{mode.name} of {max_reqs} rows"


@pytest.mark.parametrize(
    ("phase", "mode", "max_reqs", "name"),
    [
        (GraphPhase.DECODE, ForwardMode.DECODE, 4, "full"),
        (GraphPhase.DECODE, ForwardMode.DECODE, 5, "breakable"),
        (GraphPhase.PREFILL, ForwardMode.EXTEND, 1, "breakable"),
    ],
)
def test_where_graphs_hold_marked_calls_full_ones_need_attention_at_fixed_addresses(
    caplog, phase, mode, max_reqs, name
):
    full = replace(GRAPHS, prefill_graph_backend="full")
    tools = GraphTools(torch.device("cpu"), context=ForwardContext(Fixes()))
    assert tools.backend(full, phase, mode=mode, max_reqs=max_reqs).name == "full", "the tape calls them"
    tools.device = InlineTapeDevice()
    assert tools.backend(full, phase, mode=mode, max_reqs=max_reqs).name == name
    told = [record for record in caplog.records if "full graphs cannot be had" in record.message]
    assert [record.why for record in told] == ([] if name == "full" else [f"{mode.name} of {max_reqs} rows"])


@pytest.mark.parametrize("is_debugged", [False, True])
def test_replayed_plans_give_the_eager_tokens(folder, is_debugged):
    worker = built(folder, replace(GRAPHS, debug_graph=is_debugged))
    eager = PlanDriver(worker, budget_tokens=24).run(*requests())
    capture_all(worker)
    driver = graph_driver(worker, budget_tokens=24)
    assert driver.run(*requests()) == eager
    assert {graph.phase for graph in replayed(driver)} == set(GraphPhase)
    for result in driver.results:
        for forward in result.forwards:
            if forward.graph in replayed(driver):
                assert forward.padded_tokens == forward.graph.bucket - forward.real_tokens
            else:
                assert forward.padded_tokens == 0


def test_debug_mode_runs_the_whole_forward_eagerly_in_one_break(folder):
    worker = built(folder, replace(GRAPHS, debug_graph=True))
    capture_all(worker)
    for runner in worker.captures.runners:
        for key in runner._backend._captured:
            assert runner._backend.num_pieces(key) == 3


def test_plans_run_at_every_pause_of_every_capture_and_give_the_same_tokens(folder):
    worker = built(folder)
    expected = PlanDriver(worker).run(*requests(seed=4, count=2))
    pauses = 0

    def give_way(_):
        nonlocal pauses
        pauses += 1
        if pauses % 3 == 1:
            assert graph_driver(worker).run(*requests(seed=4, count=2)) == expected

    capture_all(worker, give_way)
    assert pauses > 6
    driver = graph_driver(worker)
    assert driver.run(*requests(seed=4, count=2)) == expected
    assert replayed(driver)


def test_a_row_that_the_canary_refuses_writes_nothing_under_a_replay(folder):
    worker = built(folder, kv_canary="refuse")
    capture_all(worker)
    driver = graph_driver(worker)
    request, mate = requests(count=2)
    spoiled = False

    def spoil(plan):
        nonlocal spoiled
        plan = driver_change(plan)
        if (
            plan.rows.first_positions is not None
            and int(plan.rows.seq_lens[0]) > len(request.prompt_ids) + 2
            and not spoiled
        ):
            spoiled = True
            hashes = plan.rows.canary_hashes.copy()
            hashes[0] ^= 1
            plan = replace(plan, rows=replace(plan.rows, canary_hashes=hashes))
        return plan

    driver_change = driver.change
    driver.change = spoil
    alone = graph_driver(built(folder)).run(requests(count=2)[1])
    driver.run(request, mate)
    assert spoiled
    assert request.failure is not None
    assert mate.token_ids == alone[0]
    assert replayed(driver)


def test_a_bucket_that_cannot_be_captured_is_dead_and_the_others_live(folder, monkeypatch, caplog):
    worker = built(folder)
    decode = next(runner for runner in worker.captures.runners if runner.shapes.phase is GraphPhase.DECODE)
    capture = decode.capture

    def fails_at_one(bucket, **options):
        if bucket == 1:
            raise CaptureError("no memory for this one")
        capture(bucket, **options)

    monkeypatch.setattr(decode, "capture", fails_at_one)
    capture_all(worker)
    entry = next(entry for entry in worker.captures.progress.buckets if entry.phase is GraphPhase.DECODE)
    assert (entry.live, entry.dead) == ((4,), (1,))
    assert worker.captures.progress.totals[GraphPhase.DECODE].failed == 1
    assert "could not be captured" in caplog.text
    driver = graph_driver(worker)
    assert driver.run(*requests(count=1)) == PlanDriver(worker).run(*requests(count=1))


def test_the_second_start_sets_aside_what_the_first_measured(folder, tmp_path, caplog):
    graphs = replace(GRAPHS, graph_memory_file=str(tmp_path / "graphs.json"))
    plain = {"num_pages": None, "memory_fraction": None}

    def planned():
        (record,) = [record for record in caplog.records if record.message == "kv pools"]
        caplog.clear()
        return record.graph_bytes

    caplog.set_level("INFO")
    worker = built(folder, graphs, **plain)
    estimated = planned()
    capture_all(worker)
    measured = sum(entry.graph_bytes for entry in worker.captures.progress.totals.values())
    assert 0 < measured != estimated > 0
    assert "graphs captured" in caplog.text
    caplog.clear()
    built(folder, graphs, **plain)
    assert planned() == measured
    built(folder, replace(graphs, decode_buckets=(1, 2)), **plain)
    assert planned() != measured, "other buckets are another worker"
