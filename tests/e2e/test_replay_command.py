"""`serve --record` and `forwardplane replay`: a served run replays equal, each file alone; a changed one does not."""

import contextlib
import random
import re
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.serve_command import SimulatedOptions
from protos.client.serve_execution import WorkerOptions
from protos.client.serve_files import ServeFiles
from protos.client.simulated_model import SIMULATED_MODEL
from protos.service.plan_recording import Entry, EntryKind, RecordingWriter, read_entries, read_header
from tests.support.recorded_runs import replayed, with_other_token, with_result
from tests.support.served import scrape, served, total
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor

pytestmark = pytest.mark.timeout(120)
OK, FAILURE, REFUSED = 0, 1, 3
COMMAND = (sys.executable, "-m", "protos.client.command", "replay")
FLIPPED_PLAN = 20
UNTIL_FLUSHED_S = 1.5


class Killed(Exception):
    """Of the server: what is stopped then has no exit code to check."""


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


def ask_roughly(target):
    """Shared beginnings, few pages, callers that leave in the middle."""

    def ask(number):
        draw = random.Random(number)
        options = GenerateOptions(
            max_tokens=draw.randint(5, 60),
            temperature=0.8 * (number % 2),
            ignore_eos=True,
            frequency_penalty=0.5 if number % 5 == 0 else None,
        )
        prompt = TokenIds((*range(100, 100 + 16 * draw.randint(1, 6)), *(draw.randrange(900) for _ in range(9))))
        stream = client.stream(prompt, options)
        for count, _ in enumerate(stream):
            if number % 4 == 0 and count == 3:
                stream.close()
                return

    with GenerationClient(target) as client, ThreadPoolExecutor(12) as pool:
        list(pool.map(ask, range(70)))


@pytest.fixture(scope="module")
def rotated(model_cache, tmp_path_factory):
    """Files of about 9,000 bytes each, newest first; the server was killed."""
    path = tmp_path_factory.mktemp("rotated") / "run"
    simulated = SimulatedOptions(simulated_step_ms=1.0)
    flags = ("--record-bytes", "9000", "--record-files", "500", "--budget-tokens", "64")
    with (
        contextlib.suppress(Killed),
        served(
            device="simulated",
            model_cache=model_cache,
            simulated=simulated,
            files=ServeFiles(record=path),
            limits=WorkerOptions(num_pages=70),
            scheduler_flags=flags,
        ) as server,
    ):
        ask_roughly(server.target)
        hits = total(scrape(server.options.ports.metrics_port), "forwardplane_scheduler_prefix_cache_hit_tokens_total")
        time.sleep(UNTIL_FLUSHED_S)
        for process in server.processes():
            process.kill()
        raise Killed
    assert hits > 100
    return sorted(path.parent.iterdir(), key=lambda found: (len(found.name), found.name))


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
    uncompared = replay(path, model_cache, "--no-compare")
    assert uncompared.returncode == OK
    assert "not compared" in uncompared.stdout


def test_what_cannot_be_replayed_is_said_in_one_line(recording, model_cache, tmp_path):
    graph = replay(recording, model_cache, "--runner", "graph")
    assert graph.returncode == REFUSED
    assert graph.stderr.strip() == "forwardplane: runner graph: the recorded device captures no graphs"
    other = tmp_path / "other"
    other.write_text("no recording")
    assert replay(other, model_cache).returncode == REFUSED


def test_every_rotated_file_of_a_killed_server_replays_alone(rotated, model_cache):
    assert len(rotated) > 5
    card = fetch_model(SIMULATED_MODEL, cache=model_cache).card
    executor = build_simulated_executor(card, SimulatedSettings(num_pages=70, step_ms=1e-6, max_rows=256))
    plans = 0
    for path in rotated:
        worker = next(entry.worker for entry in read_entries(path) if entry.worker)
        replayer = replayed(path, executor, worker=worker)
        assert replayer.first is None, path.name
        assert (replayer.cut is not None) == (path == rotated[0])
        plans += replayer.counts.plans
    assert plans > 100
    done = replay(rotated[len(rotated) // 2], model_cache)
    assert done.returncode == OK, done.stdout + done.stderr
    assert "plans that differ    0" in done.stdout
    assert "compared up to there" in replay(rotated[0], model_cache).stdout


def test_a_recording_that_was_cut_off_is_compared_up_to_there(recording, model_cache, tmp_path):
    cut = tmp_path / "cut"
    size = recording.stat().st_size * 2 // 3
    cut.write_bytes(recording.read_bytes()[:size])
    done = replay(cut, model_cache)
    assert done.returncode == OK, done.stdout + done.stderr
    found = re.search(r"cut off +at byte (\d+), after \d+ entries: compared up to there", done.stdout)
    assert 0 < int(found[1]) <= size
    assert int(re.search(r"plans, rows, tokens +(\d+)", done.stdout)[1]) > 20


def test_a_recording_of_which_nothing_is_left_to_compare_is_no_success(recording, model_cache, tmp_path):
    path = tmp_path / "attached"
    writer = RecordingWriter(path, read_header(recording))
    for entry in read_entries(recording):
        if entry.kind is EntryKind.ATTACH:
            writer.add(entry)
    writer.close()
    done = replay(path, model_cache)
    assert done.returncode == FAILURE, done.stdout + done.stderr
    assert "nothing was compared" in done.stdout


def test_a_changed_bit_in_the_file_is_named_with_its_place(recording, model_cache, tmp_path):
    flipped = tmp_path / "flipped"
    content = bytearray(recording.read_bytes())
    place = len(content) // 2
    content[place] ^= 4
    flipped.write_bytes(content)
    done = replay(flipped, model_cache)
    assert done.returncode == FAILURE
    assert len(done.stderr.strip().splitlines()) == 1
    begin = int(re.search(r"flipped is damaged in what begins at byte (\d+)", done.stderr)[1])
    assert begin <= place


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
