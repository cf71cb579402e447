"""Which processes `forwardplane serve` starts, and with which flags."""

from dataclasses import replace
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from protos.client.command import app
from protos.client.serve_command import ServeOptions, ServePorts, SimulatedOptions, service_commands, simulated_flags
from protos.service.model_files import ModelFolder
from protos.wire.errors import InvalidRequest
from tests.support.edge_harness import tiny_card


@pytest.fixture(autouse=True)
def _free_ports(monkeypatch):
    """No test here listens, so that somebody may serve on the default ports meanwhile."""
    monkeypatch.setattr("protos.client.serve_command.prove_port_free", lambda *_: None)


@pytest.fixture
def folder(tmp_path: Path) -> ModelFolder:
    return ModelFolder(
        path=tmp_path, weights=tmp_path, tokenizer=tmp_path, chat_template=None, card=tiny_card(eos_id=2)
    )


def parsed(*arguments: str) -> ServeOptions:
    _, bound, _ = app.parse_args(["serve", *arguments], exit_on_error=False)
    return bound.arguments.get("options", ServeOptions())


def flag(commands, name: str) -> str | None:
    arguments = commands[-1].arguments
    return arguments[arguments.index(name) + 1] if name in arguments else None


def test_ports_are_flags_of_the_command():
    options = parsed("--host", "0.0.0.0", "--port", "5", "--http-port", "0", "--worker-port", "7", "--workers", "2")
    assert options == ServeOptions(workers=2, ports=ServePorts(host="0.0.0.0", port=5, http_port=0, worker_port=7))


@pytest.mark.parametrize(("http_port", "passed"), [(None, None), (0, None), (8123, "8123")])
def test_the_http_front_is_started_when_it_has_a_port(folder, http_port, passed):
    options = ServeOptions(ports=ServePorts(http_port=http_port))
    assert flag(service_commands(options, folder), "--http-port") == passed


@pytest.mark.parametrize("policy", ["fcfs", "lpm", "priority"])
def test_the_policy_reaches_the_scheduler_alone(folder, policy):
    commands = service_commands(parsed("--schedule-policy", policy), folder)
    assert flag(commands, "--schedule-policy") == policy
    assert (
        flag(commands[:-1], "--schedule-policy")
        is flag(service_commands(parsed(), folder), "--schedule-policy")
        is None
    )


def test_a_port_that_is_asked_for_twice_is_refused(folder):
    options = ServeOptions(workers=2, ports=ServePorts(http_port=50101))
    with pytest.raises(InvalidRequest, match=r"port 50101 .* http_port and worker_port \+ 1"):
        service_commands(options, folder)
    service_commands(replace(options, workers=1), folder)


def test_choices_of_graphs_reach_every_worker(folder):
    options = parsed(
        *("--graph", "decode", "--decode-buckets", "1,3,9", "--prefill-buckets", "16"),
        *("--decode-graph-backend", "breakable", "--prefill-graph-backend", "full", "--debug-graph", "--workers", "2"),
    )
    *workers, _ = service_commands(options, folder)
    wanted = {
        "--graph": "decode",
        "--decode-buckets": "1,3,9",
        "--prefill-buckets": "16",
        "--decode-graph-backend": "breakable",
        "--prefill-graph-backend": "full",
        "--debug-graph": "true",
    }
    for worker in workers:
        assert {name: worker.arguments[worker.arguments.index(name) + 1] for name in wanted} == wanted
    plain = service_commands(ServeOptions(), folder)[0].arguments
    assert not set(wanted) & set(plain)


def test_what_computes_reaches_every_worker(folder):
    """Each option with another value than its default, so that none is left out."""
    wanted = {
        "--kernels": "torch",
        "--prefill-attention": "torch",
        "--decode-attention": "native",
        "--window": "1",
        "--kv-canary": "count",
        "--memory-fraction": "0.5",
    }
    options = parsed(*(part for pair in wanted.items() for part in pair), "--workers", "2")
    *workers, _ = service_commands(options, folder)
    for worker in workers:
        assert {name: worker.arguments[worker.arguments.index(name) + 1] for name in wanted} == wanted
    assert not set(wanted) & set(service_commands(ServeOptions(), folder)[0].arguments)
    with pytest.raises(Exception, match="memory-fraction"):
        parsed("--memory-fraction", "1.5")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("record", "/nothing/here.fprec", "in a folder that exists"),
        ("record", "/tmp", "not a folder"),
        ("simulated-steps", "/nothing/here.toml", "exist"),
        ("simulated-steps", "/tmp", "director"),
        ("resume-key-file", "/nothing/here.key", "exist"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_before_a_process_is_started(name, value, says):
    with pytest.raises(CycloptsError, match=f"(?s){name}.*{says}"):
        parsed(f"--{name}", value)


@pytest.mark.parametrize(
    "simulated",
    [{"simulated_step_ms": 5.0}, {"simulated_eos_ratio": 0.0}, {"simulated_steps": Path(__file__)}],
    ids=lambda given: next(iter(given)),
)
def test_what_only_a_simulated_device_has_is_refused_for_others(simulated):
    options = ServeOptions(simulated=SimulatedOptions(**simulated))
    flag = f"--{next(iter(simulated)).replace('_', '-')}"
    with pytest.raises(InvalidRequest, match=f"^{flag} needs --device simulated; it is cpu") as caught:
        simulated_flags(options)
    assert caught.value.field == flag
    assert simulated_flags(replace(options, device="simulated")) == {flag: str(next(iter(simulated.values())))}
