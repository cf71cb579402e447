"""Where advice comes from: a worker's own exposition, recordings, and what is said of sources that cannot be used."""

import io

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from rich.console import Console

from protos.client.bucket_sources import Observed, add_metrics, add_plans
from protos.client.buckets_command import AdviceOptions, buckets_advise
from protos.client.command import app
from protos.client.exit_codes import WrongUsage
from protos.service.histogram_buckets import FORWARD_TOKENS_BUCKETS
from protos.service.plan_recording import EntryKind, RecordingHeader, RecordingWriter, read_entries
from protos.wire.bucket_lists import DECODE_SIZES, PREFILL_SIZES
from protos.wire.enums import GraphPhase, GraphRefusal
from protos.wire.errors import DataFault, InvalidRequest
from protos.wire.worker_info import Buckets
from tests.support.fake_worker import FakeWorker
from tests.support.plan_driver import Request
from tests.support.plans import make_info
from tests.support.recorded_runs import recorded_run
from worker_svc.executor import CaptureProgress
from worker_svc.metrics import create_metrics

DECODE, PREFILL = GraphPhase.DECODE, GraphPhase.PREFILL


@pytest.fixture
def exposed(tmp_path):
    """A worker's metrics as text: 3 replays of 3 rows, 2 of 1 row, and two eager prefills."""
    registry = CollectorRegistry()
    metrics = create_metrics(registry)
    metrics.describe(device="cpu", dtype="float32", numerics="fast", kernels="torch")
    buckets = (
        Buckets(phase=DECODE, sizes=(1, 4, 8), live=(8,)),
        Buckets(phase=PREFILL, sizes=(16, 32), live=(), dead=(16,)),
    )
    metrics.read_captures(lambda: CaptureProgress(buckets=buckets, is_done=False))
    for _ in range(3):
        metrics.graph_replayed(DECODE, 4, real=3, padded=1)
    for _ in range(2):
        metrics.graph_missed(DECODE, GraphRefusal.NOT_CAPTURED_YET, real=1)
    for tokens in (16, 31):
        metrics.graph_missed(PREFILL, GraphRefusal.CAPTURE_FAILED, real=tokens)
    path = tmp_path / "metrics.txt"
    path.write_bytes(generate_latest(registry))
    return path, registry


def said(**options):
    console = Console(width=200, file=io.StringIO())
    assert buckets_advise(AdviceOptions(**options), console) == 0
    return console.file.getvalue()


def test_a_worker_exports_what_the_advice_needs(exposed):
    path, registry = exposed
    observed = Observed()
    add_metrics(observed, str(path))
    assert observed.forwards == {DECODE: {1: 2, 3: 3}, PREFILL: {16: 1, 32: 1}}
    assert observed.sizes() == {DECODE: (1, 4, 8), PREFILL: (16, 32)}
    assert observed.device == "cpu"
    live = {
        labels: registry.get_sample_value(
            "forwardplane_worker_graph_bucket_live", {"phase": labels[0], "bucket": labels[1]}
        )
        for labels in (("decode", "4"), ("decode", "8"), ("prefill", "16"))
    }
    assert live == {("decode", "4"): 0, ("decode", "8"): 1, ("prefill", "16"): 0}


def test_the_histogram_tells_every_default_bucket_apart_and_is_bounded():
    assert set(DECODE_SIZES) | set(PREFILL_SIZES) <= set(FORWARD_TOKENS_BUCKETS)
    assert list(FORWARD_TOKENS_BUCKETS) == sorted(set(FORWARD_TOKENS_BUCKETS))
    assert len(FORWARD_TOKENS_BUCKETS) < 150


def test_several_workers_are_added_up(exposed):
    path, _ = exposed
    observed = Observed()
    add_metrics(observed, str(path))
    add_metrics(observed, str(path))
    assert observed.forwards[DECODE] == {1: 4, 3: 6}


def test_the_advice_names_the_saving_and_flags_that_serve_takes(exposed):
    path, _ = exposed
    text = said(from_metrics=(str(path),))
    assert "saves 3 of 62 computed tokens (4.8%)" in text
    assert "--decode-buckets 1,3 --prefill-buckets 16,32" in text
    assert "decode: nothing above 3 was seen" in text
    assert "prefill: nothing above" not in text
    fewer = said(from_metrics=(str(path),), max_graphs=2)
    assert "--decode-buckets 3 --prefill-buckets 32" in fewer


def test_where_nothing_is_captured_the_advice_says_what_it_compares_with(tmp_path, exposed):
    path, _ = exposed
    assert "no graphs are captured there" not in said(from_metrics=(str(path),))
    eager = tmp_path / "eager.txt"
    eager.write_text(
        "".join(line for line in path.read_text().splitlines(keepends=True) if "graph_bucket_live" not in line)
    )
    text = said(from_metrics=(str(eager),))
    assert "no graphs are captured there now: default is what would be" in text
    assert " default " in text


@pytest.fixture
def recording(tmp_path):
    """Two prompts that arrive together, and what the worker captured."""
    buckets = (Buckets(phase=DECODE, sizes=(8,), live=(8,)), Buckets(phase=PREFILL, sizes=(64,), live=(64,), slots=4))
    info = make_info(buckets=buckets)
    requests = [Request(prompt_ids=tuple(range(5, 5 + size)), max_new=4) for size in (9, 20)]
    (path,) = recorded_run(tmp_path / "run.fprec", FakeWorker(info), [requests])
    return path


def test_recorded_plans_are_counted_by_phase(recording):
    observed = Observed()
    add_plans(observed, recording)
    assert observed.sizes() == {DECODE: (8,), PREFILL: (64,)}
    assert observed.forwards[PREFILL] == {29: 1}
    assert observed.forwards[DECODE] == {2: 3}
    text = said(from_plans=(recording,))
    assert "--decode-buckets 2 --prefill-buckets 29" in text


def test_a_recording_that_was_cut_off_counts_as_far_as_it_goes(recording, tmp_path):
    whole, cut = tmp_path / "whole.fprec", tmp_path / "cut.fprec"
    writer = RecordingWriter(whole, RecordingHeader(model="m", weights_fingerprint="w", part=0))
    entries = [entry for entry in read_entries(recording) if entry.kind in (EntryKind.ATTACH, EntryKind.PLAN)]
    for entry in entries[:4]:
        writer.add(entry)
    writer.flush()
    cut.write_bytes(whole.read_bytes())
    writer.close()
    cut.write_bytes(cut.read_bytes() + b"begun")
    text = said(from_plans=(cut,))
    assert "cut.fprec is cut off at byte" in text
    assert "2 of 2" in text
    content = bytearray(cut.read_bytes())
    content[len(content) // 2] ^= 1
    cut.write_bytes(content)
    with pytest.raises(DataFault, match="damaged"):
        said(from_plans=(cut,))


def test_without_a_source_or_with_two_kinds_it_is_wrong_usage(exposed, recording):
    for options in ({}, {"from_metrics": (str(exposed[0]),), "from_plans": (recording,)}):
        with pytest.raises(WrongUsage, match="--from-metrics or --from-plans"):
            said(**options)


def test_sources_that_cannot_be_used_are_refused_by_name(exposed, tmp_path):
    path, _ = exposed
    cases = {
        str(tmp_path / "absent"): "cannot be read",
        "http://127.0.0.1:1/metrics": "cannot be read",
    }
    for source, message in cases.items():
        with pytest.raises(InvalidRequest, match=message):
            said(from_metrics=(source,))
    other = tmp_path / "other.txt"
    for text, message in (("a b c d {", "is no text of metrics"), ("up 1\n", "holds no forwards")):
        other.write_text(text)
        with pytest.raises(InvalidRequest, match=message):
            said(from_metrics=(str(other),))
    with pytest.raises(InvalidRequest, match="2 phases have forwards"):
        said(from_metrics=(str(path),), max_graphs=1)


def test_the_command_takes_urls_files_and_a_number_of_graphs():
    flags = ("--from-metrics", "http://h:1/metrics", "--from-metrics", "m.txt", "--max-graphs", "3", "--max-rows", "9")
    _, bound, _ = app.parse_args(["buckets", "advise", *flags], exit_on_error=False)
    assert bound.arguments["options"] == AdviceOptions(
        from_metrics=("http://h:1/metrics", "m.txt"), max_graphs=3, max_rows=9
    )
