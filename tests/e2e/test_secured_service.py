"""Real processes with TLS on every link and known callers: what is emitted, who is served, what the command says."""

import itertools
import json
import re
import subprocess
import sys
import urllib.request

import grpc
import pytest

from protos.client.exit_codes import OK, REFUSED
from protos.client.generation_client import GenerationClient
from protos.client.messages import Chat, GenerateOptions
from protos.client.serve_command import ServeSecurity
from protos.client.server_access import CallerCredentials
from protos.service.config import EX_CONFIG
from protos.wire.errors import EngineError, PermissionDenied, Unauthenticated, UnavailableError
from tests.support.callers import caller_entry
from tests.support.certificates import Authority
from tests.support.served import Served, served

TOKEN = "token-CANARYTOKEN-7f3a"
CANARIES = ("CANARYPROMPT", "CANARYTAG", "CANARYSALT", "CANARYTOKEN", "CANARYSTOP", "CANARYGRAMMAR", "CANARYMODEL")
ADDRESS = re.compile(r"0x[0-9a-f]{8,}")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = tmp_path_factory.mktemp("secured")
    authority = Authority.new()
    for role in ("worker", "scheduler", "edge", "caller/alice"):
        authority.role(made, role)
    callers = made / "callers.toml"
    callers.write_text(caller_entry("alice", TOKEN) + caller_entry("root", "token-root", operator=True))
    (made / "token").write_text(TOKEN + "\n")
    return made


def serving(folders, **choices):
    return served(
        device="simulated",
        security=ServeSecurity(tls_dir=folders / "edge", callers=folders / "callers.toml", hardened=True),
        worker_flags=("--tls-dir", str(folders / "worker"), "--log-level", "info"),
        scheduler_flags=("--tls-dir", str(folders / "scheduler"), "--log-level", "info"),
        **choices,
    )


def client_of(server: Served, folders, token: str | None) -> GenerationClient:
    authority = (folders / "edge" / "ca.crt").read_bytes()
    return GenerationClient(
        server.target, credentials=CallerCredentials(uses_tls=True, authority=authority, token=token)
    )


def command(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "protos.client.command", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def provoke(server, folders) -> list[str]:
    """Calls that end well and badly, with canaries wherever a caller may put text; what they were answered."""
    said: list[str] = []
    prompts = ["CANARYPROMPT one", "", "CANARYPROMPT " * 100_000]
    options = [
        {"client_tag": "CANARYTAG", "cache_salt": "CANARYSALT", "stop_strings": ("CANARYSTOP",)},
        {"temperature": -1.0},
        {"client_tag": "CANARYTAG" * 100},
        {"cache_salt": "CANARYSALT" * 100},
        {"stop_strings": ("CANARYSTOP" * 100,)},
        {"regex": "(CANARYGRAMMAR"},
        {"json_schema": '{"type": "CANARYGRAMMAR"}'},
        {"ebnf": "CANARYGRAMMAR"},
        {"model": "CANARYMODEL"},
    ]
    with client_of(server, folders, TOKEN) as client:
        for prompt, choice in itertools.product(prompts, options):
            try:
                made = client.generate([prompt], GenerateOptions(max_tokens=2, **choice))
                assert made[0].token_ids
            except EngineError as error:
                said.append(f"{error.message} {error.field}")
        try:
            client.generate([Chat.user("CANARYPROMPT")], GenerateOptions(max_tokens=2))
        except EngineError as error:
            said.append(error.message)
        for call in (client.load, client.flush_cache):
            with pytest.raises(PermissionDenied) as refused:
                call()
            said.append(refused.value.message)
    with client_of(server, folders, "CANARYTOKEN-of-nobody") as stranger, pytest.raises(Unauthenticated) as turned_away:
        stranger.model()
    return [*said, turned_away.value.message]


def metrics_of(server) -> str:
    ports = server.options.ports
    texts = []
    for port in (ports.metrics_port, ports.edge_metrics_port, ports.worker_metrics_port):
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            texts.append(reply.read().decode())
    return "".join(texts)


def test_s16_nothing_that_the_processes_emit_holds_what_callers_sent_nor_where_things_are(folders, capfd):
    """Statuses, logs and metrics of all processes are searched after calls that end well and badly."""
    with serving(folders) as server:
        said = provoke(server, folders)
        metrics = metrics_of(server)
        with pytest.raises(grpc.RpcError):
            reflection_of(server, folders)
        the_command_asks_as_a_caller(server, folders)
        arguments = [" ".join(line) for line in server.command_lines().values()]
    assert not any(TOKEN in line for line in arguments)
    logs = capfd.readouterr().err

    assert len(said) > 10
    assert "worker attached" in logs
    for canary in CANARIES:
        assert canary not in logs, canary
        assert canary not in metrics, canary
    # What is wrong with a grammar, and which model is not served, is told to its caller alone.
    told = {"CANARYGRAMMAR", "CANARYMODEL"}
    for text in said:
        assert not any(canary in text for canary in CANARIES if canary not in told), text
    for text in (*said, metrics):
        assert str(folders) not in text
        assert "/home/" not in text
        assert "site-packages" not in text
        assert not ADDRESS.search(text), text
    settings = [line for line in logs.splitlines() if "tls_dir" in line or "callers" in line or "/" in line]
    assert not any(TOKEN in line for line in settings)


def the_command_asks_as_a_caller(server, folders) -> None:
    ask = ("generate", "--raw", "hello", "--max-tokens", 3, "--json", "--target", server.target)
    trusted = ("--tls-ca", folders / "edge" / "ca.crt")
    answered = command(*ask, *trusted, "--token-file", folders / "token")
    assert answered.returncode == OK, answered.stderr
    assert len(json.loads(answered.stdout.splitlines()[-1])["token_ids"]) == 3
    refused = command("status", "--target", server.target, *trusted, "--token-file", folders / "token")
    assert (refused.returncode, refused.stderr.strip()) == (REFUSED, "forwardplane: this peer may not call this method")
    with client_of(server, folders, "token-root") as operator:
        assert [worker.state.name for worker in operator.load().workers] == ["SERVING"]
    with GenerationClient(server.target) as plain, pytest.raises(UnavailableError):
        plain.model()


def reflection_of(server, folders) -> None:
    security = client_of(server, folders, TOKEN)
    with security:
        method = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        call = security._channel.stream_stream(method)(iter([b""]), timeout=5, metadata=security._who)
        for _ in call:
            pass


def test_serving_other_machines_in_plain_text_has_to_be_asked_for():
    refused = command("serve", "--device", "simulated", "--host", "0.0.0.0")
    assert refused.returncode == EX_CONFIG
    for word in ("--tls-dir", "--callers", "127.0.0.1", "--insecure"):
        assert word in refused.stderr
