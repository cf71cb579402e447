"""A recorded run replays on captured graphs with the same results, and a run on graphs replays eagerly."""

import json

import numpy as np
import pytest

from protos.service.config import load_config
from protos.service.plan_recording import EntryKind, RecordingHeader, RecordingWriter, read_entries
from protos.wire.enums import GraphPhase
from protos.wire.errors import UnsupportedFeature
from tests.support.fake_worker import FakeWorker
from tests.support.graph_driver import with_graphs
from tests.support.plan_driver import Request
from tests.support.plans import make_info
from tests.support.recorded_runs import recorded_run, replayed
from tests.support.tiny_llama import tiny_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.replay.__main__ import EQUAL, ReplayProgram, replay
from worker_svc.replay.graph_choice import capture_all
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_settings import GraphSettings

GRAPHS = GraphSettings(graph="all", decode_buckets=(1, 4), prefill_buckets=(16, 32, 64))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_folder(tmp_path_factory.mktemp("model"))


def built(folder, graphs):
    settings = ExecutorSettings(
        numerics="reproducible", num_pages=60, max_rows=16, max_tokens=64, threads=1, graphs=graphs
    )
    return build_tp_model_worker(folder, settings)


@pytest.fixture(scope="module")
def eager(folder):
    return built(folder, GraphSettings())


def waves():
    draw = np.random.default_rng(3)
    return [
        [
            Request(prompt_ids=draw.integers(0, 250, 5 + 7 * index).tolist(), max_new=5, top_logprobs=2)
            for index in range(4)
        ]
        for _ in range(6)
    ]


def test_a_recording_replays_on_graphs_bit_for_bit_and_one_of_graphs_eagerly(folder, eager, tmp_path):
    graphed = built(folder, GRAPHS)
    counted = []
    buckets = capture_all(graphed, progress=counted.append)
    assert counted == [1, 2, 3, 4, 5]
    assert all(entry.live == entry.sizes for entry in buckets)

    files = recorded_run(tmp_path / "eager", eager, waves(), max_file_bytes=256)
    assert len(files) > 1
    rebuilt_pages = 0
    for path in files:
        replayer = replayed(path, graphed, graphs=buckets)
        assert replayer.first is None
        assert replayer.counts.replays > len(replayer.counts.misses)
        assert set(replayer.counts.misses) <= {"bucket_too_large"}
        rebuilt_pages += replayer.counts.rebuilt_pages
    assert rebuilt_pages

    (path, *_) = recorded_run(tmp_path / "graphs", graphed, waves(), change=lambda plan: with_graphs(plan, graphed))
    replayer = replayed(path, eager)
    assert replayer.first is None
    assert (replayer.counts.replays, set(replayer.counts.misses)) == (0, {"disabled"})


def test_forwards_that_no_live_graph_holds_run_eagerly_with_their_reason(folder, eager, tmp_path):
    graphed = built(folder, GraphSettings(graph="decode", decode_buckets=(1,)))
    buckets = capture_all(graphed, progress=lambda count: None)
    (path,) = recorded_run(tmp_path / "eager", eager, waves()[:1])
    replayer = replayed(path, graphed, graphs=buckets)
    assert replayer.first is None
    assert {entry.phase for entry in buckets} == {GraphPhase.DECODE}
    assert set(replayer.counts.misses) == {"over_max_rows", "disabled"}


def test_a_device_without_graphs_is_refused():
    with pytest.raises(UnsupportedFeature, match="captures no graphs"):
        capture_all(FakeWorker(make_info()), progress=lambda count: None)


def test_the_program_captures_the_asked_buckets_first_and_says_what_replayed(folder, eager, tmp_path, capsys):
    (made,) = recorded_run(tmp_path / "eager", eager, waves()[:1])
    path = tmp_path / "run"
    header = RecordingHeader(model="tiny", weights_fingerprint=folder.card.weights_fingerprint, part=0)
    writer = RecordingWriter(path, header)
    for entry in read_entries(made):
        if entry.kind not in (EntryKind.HEADER, EntryKind.END):
            writer.add(entry)
    writer.close()
    flags = {
        "--recording": path,
        "--runner": "graph",
        "--model": folder.path,
        "--numerics": "reproducible",
        "--num-pages": 60,
        "--max-rows": 16,
        "--max-tokens": 64,
        "--threads": 1,
        "--decode-buckets": "4",
        "--prefill-buckets": "16,64",
        "--graph-memory-file": tmp_path / "graphs.json",
    }
    arguments = [part for flag, value in flags.items() for part in (flag, str(value))]
    assert replay(load_config(ReplayProgram, arguments=arguments).value) == EQUAL
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["captured"] for line in said[:3]] == [1, 2, 3]
    assert said[-1]["first_difference"] is None
    assert said[-1]["counts"]["replays"] == 5
