"""The forwardplane command as a user meets it: JSON answers, one-line errors, exit codes, bad files, taken ports."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from rich.console import Console

from protos.client.serve_command import ServeOptions, resolve_model
from tests.support.hub_models import config_of, make_tensors, write_hub
from tests.support.served import PORT_FIELDS, on_free_ports, served

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]
COMMAND = (sys.executable, "-m", "protos.client.command")
OK, FAILURE, USAGE, REFUSED = 0, 1, 2, 3


def run(*arguments: str, timeout_s: float = 120.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False)


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    ports = on_free_ports(ServeOptions()).ports
    chosen = {"--" + name.replace("_", "-"): getattr(ports, name) for name in PORT_FIELDS}
    flags = [part for flag, port in chosen.items() if flag not in arguments for part in (flag, str(port))]
    return run("serve", *arguments, *flags)


@pytest.fixture(scope="module")
def server():
    with served(numerics="reproducible") as running:
        yield running


@pytest.fixture(scope="module")
def weights() -> Path:
    return resolve_model(ServeOptions(), Console(quiet=True)).weights


def one_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


def test_generate_shows_the_prompts_log_probabilities(server):
    asked = ("--ids", "504,3575,282", "--target", server.target, "--prompt-logprobs", "2", "--max-tokens", "0")
    shown = run("generate", *asked).stdout.strip().splitlines()
    said = json.loads(run("generate", *asked, "--json").stdout)
    assert said["token_ids"] == []
    assert said["usage"] == {"prompt_tokens": 3, "cached_tokens": 0, "output_tokens": 0}
    assert [item["token_id"] for item in said["prompt_logprobs"]] == [3575, 282]
    assert [len(item["top"]) for item in said["prompt_logprobs"]] == [2, 2]
    assert [line.split()[:2] for line in shown] == [["1", "3575"], ["2", "282"]]
    assert run("generate", "x", "--max-tokens", "0", "--target", server.target).returncode == REFUSED


def test_embed_prints_a_vector_a_text(server):
    lines = run("embed", "red", "blue", "--pooling", "mean", "--target", server.target).stdout.splitlines()
    vectors = [json.loads(line)["embedding"] for line in lines]
    assert len(vectors) == 2
    assert all(abs(sum(value * value for value in vector) - 1) < 1e-5 for vector in vectors)
    assert run("embed", "--target", server.target).returncode == USAGE


def test_generate_streams_text_and_json_holds_the_same(server):
    question = ("What is the capital of France?", "--target", server.target, "--temperature", "0")
    plain = run("generate", *question)
    assert (plain.returncode, plain.stdout.strip()) == (OK, "The capital of France is Paris.")
    last = run("generate", *question, "--json", "--logprobs", "2").stdout.strip().splitlines()[-1]
    answer = json.loads(last)
    assert answer["text"] == "The capital of France is Paris."
    assert answer["finish_reason"] == "stop"
    assert answer["usage"] == {"prompt_tokens": 37, "cached_tokens": 32, "output_tokens": len(answer["token_ids"])}
    assert [item["token_id"] for item in answer["logprobs"]] == answer["token_ids"]
    assert all(len(item["top"]) == 2 for item in answer["logprobs"])


def test_ids_in_ids_out_with_a_length_finish(server):
    done = run("generate", "--ids", "504,3575,282", "--target", server.target, "--max-tokens", "3", "--json")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(answer["token_ids"]) == 3
    assert answer["finish_reason"] == "length"


def test_status_shows_a_table_of_workers(server):
    done = run("status", "--target", server.target)
    assert done.returncode == OK
    assert "SERVING" in done.stdout
    assert f"127.0.0.1:{server.options.ports.worker_port}" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("x", "--max-tokens", "999999"), "max_tokens"),
        (("x", "--top-p", "0"), "top_p"),
        (("x", "--temperature", "nan"), "temperature"),
        (("--ids", "49152"), "49152"),
        (("", "--raw"), "text is empty"),
        (("x", "--seed", "-1"), "seed is -1; allowed"),
    ],
)
def test_a_refusal_is_one_line_that_names_the_field_and_exit_code_3(server, arguments, field):
    done = run("generate", *arguments, "--target", server.target)
    assert done.returncode == REFUSED
    assert field in one_line(done.stderr)


def test_wrong_usage_is_exit_code_2():
    assert run("generate", "x", "--no-such-flag").returncode == USAGE
    assert run("generate", "x", "--max-tokens", "many").returncode == USAGE
    for arguments in ((), ("x", "--ids", "1"), ("--ids", "1,b"), ("x", "--raw", "--system", "y")):
        done = run("generate", *arguments)
        assert done.returncode == USAGE
        one_line(done.stderr)
    for value in ("0", "-1", "nan", "1e300"):
        assert run("generate", "x", "--timeout-s", value).returncode == USAGE


def test_the_version_is_the_releases():
    assert run("--version").stdout.strip() == version("forwardplane")


def test_an_unreachable_server_says_so_in_one_line(free_port):
    port = free_port()
    done = run("generate", "x", "--target", f"127.0.0.1:{port}")
    assert done.returncode == FAILURE
    assert f"127.0.0.1:{port}" in one_line(done.stderr)


def test_an_unknown_model_lists_the_known_ones():
    done = run("serve", "--model", "no-such-model")
    assert done.returncode == REFUSED
    assert "smollm2-135m-instruct" in one_line(done.stderr)


def test_a_taken_port_is_named_before_anything_starts(server):
    done = serve("--port", str(server.options.ports.port))
    assert done.returncode != OK
    assert str(server.options.ports.port) in one_line(done.stderr)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "phi3"}, "config.json: model_type is 'phi3', supported: llama, mistral, qwen2, qwen3, gemma3"),
        ({"vocab_size": 97}, "'model.embed_tokens.weight' has 96 rows, vocab_size in config.json is 97"),
        ({"num_hidden_layers": 4}, "tensor 'model.layers.3.input_layernorm.weight' is missing"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn', supported: default, linear, l"),
    ],
)
def test_a_model_that_no_worker_computes_is_refused_before_anything_starts(tmp_path, changes, says):
    config = config_of("llama, grouped queries")
    source = write_hub(tmp_path / "hub", config | changes, make_tensors(config))
    done = run("serve", "--model", str(source), "--model-cache", str(tmp_path / "cache"))
    assert done.returncode == REFUSED
    assert says in one_line(done.stderr)
    assert not (tmp_path / "cache").exists()


def damaged(weights: Path, folder: Path, kind: str) -> Path:
    target = folder / f"{kind}.gguf"
    with weights.open("rb") as file:
        head = file.read(4 << 20)
    if kind == "text":
        target.write_text("This is not a model.\n" * 50)
    elif kind == "empty":
        target.write_bytes(b"")
    elif kind == "truncated":
        target.write_bytes(head)
    elif kind == "short-header":
        target.write_bytes(head[:1000])
    else:
        target.write_bytes(head[:8] + (1 << 60).to_bytes(8, "little") + head[16:])
    return target


@pytest.mark.parametrize("kind", ["text", "empty", "truncated", "short-header", "huge-count"])
def test_a_damaged_gguf_is_refused_in_one_line(weights, tmp_path, kind):
    path = damaged(weights, tmp_path, kind)
    done = run("serve", "--model", str(path), "--model-cache", str(tmp_path / "cache"))
    assert done.returncode == REFUSED
    assert "Traceback" not in done.stderr
    assert path.name in one_line(done.stderr)
