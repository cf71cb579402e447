"""`forwardplane bench` against a simulated worker: both loops, every token checked, files, Ctrl-C, clear errors."""

import json
import signal
import subprocess
import sys
import time

import pytest

from protos.client.fetch_model import fetch_model
from protos.client.serve_command import SimulatedOptions
from protos.client.simulated_model import SIMULATED_MODEL
from tests.support.served import served

pytestmark = pytest.mark.timeout(120)
OK, FAILURE, INTERRUPTED = 0, 1, 130
COMMAND = (sys.executable, "-m", "protos.client.command", "bench")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    cache = tmp_path_factory.mktemp("models")
    fetch_model(SIMULATED_MODEL, cache=cache)
    simulated = SimulatedOptions(simulated_step_ms=2.0)
    with served(device="simulated", model_cache=cache, simulated=simulated, numerics="fast") as running:
        yield running


def bench(*arguments):
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, check=False)


def test_a_closed_loop_measures_every_request_and_checks_every_token(server, tmp_path):
    path = tmp_path / "figures.json"
    load = ("--concurrency", "6", "--requests", "40", "--processes", "2", "--prompt-tokens", "20-60")
    done = bench("--target", server.target, *load, "--output-tokens", "12", "--verify", "--json", str(path))
    assert done.returncode == OK, done.stderr
    assert "time to first token" in done.stdout
    content = json.loads(path.read_text())
    assert (content["measured"], content["warm_up"], content["outcomes"]) == (34, 6, {"done": 34})
    assert (content["output_tokens"], content["wrong"], content["reasons"]) == (34 * 12, 0, {"LENGTH": 34})
    assert content["context"]["load"]["processes"] == 2
    assert content["context"]["is_verified"] is True
    assert f"all {34 * 12} output tokens" in done.stdout
    latencies = content["latencies"]
    assert 0.001 < latencies["first_token_s"]["p50"] < latencies["request_s"]["p50"] < 5


def test_an_open_loop_is_cut_by_ctrl_c_and_shows_what_was_measured(server, tmp_path):
    path = tmp_path / "figures.json"
    load = ("--rate", "30", "--warm-up", "0", "--output-tokens", "10", "--prompt-tokens", "30")
    process = subprocess.Popen(
        [*COMMAND, "--target", server.target, *load, "--json", str(path)], stdout=subprocess.PIPE, text=True
    )
    time.sleep(4.5)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == INTERRUPTED
    assert "inter-token" in output
    content = json.loads(path.read_text())
    assert content["context"]["was_cut"] is True
    assert content["outcomes"]["done"] >= 5


def test_refusals_are_counted_and_exit_with_1(server, tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"text": "a", "max_tokens": 10**9}))
    done = bench("--target", server.target, "--requests", "3", "--warm-up", "0", "--prompts", str(path))
    assert done.returncode == FAILURE
    assert "3 refused" in done.stdout
    assert "INVALID_REQUEST 3" in done.stdout


def test_a_missing_server_is_one_line(free_port):
    done = bench("--target", f"127.0.0.1:{free_port()}")
    assert done.returncode == FAILURE
    assert len(done.stderr.strip().splitlines()) == 1
