"""`serve --record` and `forwardplane replay`: a served run replays equal, a changed file does not."""

import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import ServeFiles, SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from protos.service.plan_recording import Entry, EntryKind, RecordingWriter, read_entries, read_header
from tests.support.recorded_runs import with_other_token, with_result
from tests.support.served import served

pytestmark = pytest.mark.timeout(120)
OK, FAILURE, REFUSED = 0, 1, 3
COMMAND = (sys.executable, "-m", "protos.client.command", "replay")
FLIPPED_PLAN = 20


@pytest.fixture(scope="module")
def model_cache(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    fetch_model(SIMULATED_MODEL, cache=cache)
    return cache


def ask_all(target):
    with GenerationClient(target) as client, ThreadPoolExecutor(6) as pool:

        def ask(number):
            options = GenerateOptions(
                max_tokens=40,
                temperature=0.7 * (number % 2),
                ignore_eos=True,
                repetition_penalty=1.3 if number % 3 == 0 else None,
                logprobs=1,
            )
            first = 100 * (number % 4)
            prompt = TokenIds(tuple(range(first, first + 50 + number)))
            return sum(len(chunk.token_ids) for chunk in client.stream(prompt, options))

        assert list(pool.map(ask, range(18))) == [40] * 18


@pytest.fixture(scope="module")
def recording(model_cache, tmp_path_factory):
    path = tmp_path_factory.mktemp("recordings") / "run"
    simulated = SimulatedOptions(simulated_step_ms=1.0)
    with served(
        device="simulated", model_cache=model_cache, simulated=simulated, files=ServeFiles(record=path)
    ) as server:
        ask_all(server.target)
    return path


def replay(path, model_cache, *arguments):
    command = [*COMMAND, str(path), "--model-cache", str(model_cache), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_a_served_run_replays_to_the_same_results(recording, model_cache):
    assert stat.S_IMODE(recording.stat().st_mode) == 0o600
    done = replay(recording, model_cache)
    assert done.returncode == OK, done.stdout + done.stderr
    assert "plans that differ    0" in done.stdout
    assert "0 without a result" in done.stdout


def test_a_flipped_token_is_reported_at_its_plan_and_row(recording, model_cache, tmp_path):
    path = tmp_path / "flipped"
    writer = RecordingWriter(path, read_header(recording))
    for entry in read_entries(recording):
        if entry.kind not in (EntryKind.HEADER, EntryKind.END):
            writer.add(with_result(entry, FLIPPED_PLAN, lambda result: with_other_token(result, 0)))
    writer.close()
    done = replay(path, model_cache)
    assert done.returncode == FAILURE
    assert f"first difference: plan {FLIPPED_PLAN}, row 0, handle" in done.stdout
    assert "rows.token_ids: recorded" in done.stdout
    assert replay(path, model_cache, "--no-compare").returncode == OK


def test_what_cannot_be_replayed_is_said_in_one_line(recording, model_cache, tmp_path):
    graph = replay(recording, model_cache, "--runner", "graph")
    assert graph.returncode == REFUSED
    assert graph.stderr.strip() == "forwardplane: runner graph: this release captures no graphs"
    cut = tmp_path / "cut"
    cut.write_bytes(recording.read_bytes()[: recording.stat().st_size // 2])
    done = replay(cut, model_cache)
    assert done.returncode == FAILURE
    assert "cut ends after" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    other = tmp_path / "other"
    other.write_text("no recording")
    assert replay(other, model_cache).returncode == REFUSED


def test_a_recording_names_its_workers(recording, model_cache, tmp_path):
    done = replay(recording, model_cache, "--worker", "nobody:1")
    assert done.returncode == REFUSED
    assert "does not hold worker nobody:1" in done.stderr
    both = tmp_path / "both"
    writer = RecordingWriter(both, read_header(recording))
    for entry in read_entries(recording):
        if entry.kind is EntryKind.ATTACH:
            writer.add(entry)
            writer.add(Entry(EntryKind.ATTACH, "second:2", entry.payload))
    writer.close()
    done = replay(both, model_cache)
    assert done.returncode == REFUSED
    assert "second:2: name one" in done.stderr
