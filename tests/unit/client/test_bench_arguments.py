"""Every argument of `bench` is checked before a server is asked: one message with name, value, range; exit code 2."""

from dataclasses import fields
from pathlib import Path

import pytest
from cyclopts import CycloptsError
from rich.console import Console

from protos.client import exit_codes
from protos.client.bench_options import LoadOptions, PromptOptions, ResultOptions
from protos.client.command import app, run

NUMBERS = ["nan", "inf", "-inf", "-1", "1e400", "x", "", "9" * 400]
BAD = {
    "target": ["x", ":1", "h:0", "h:65536", "h:p", "", "h :1", "h:-1"],
    "rate": [*NUMBERS, "0", "100001"],
    "concurrency": [*NUMBERS, "0", "100001"],
    "requests": [*NUMBERS, "0", "10000001"],
    "duration-s": [*NUMBERS, "0", "86401"],
    "warm-up": [*NUMBERS, "10000001"],
    "processes": [*NUMBERS, "0", "65"],
    "timeout-s": [*NUMBERS, "0", "86401"],
    "prompt-tokens": [*NUMBERS, "0", "2-1", "1048577", "lognormal:5:9", "lognormal:9999999:1"],
    "output-tokens": [*NUMBERS, "0", "2-1", "1048577", "lognormal:5:9"],
    "shared-prefix-tokens": [*NUMBERS, "1048577"],
    "prompts": ["/nothing/here", "/tmp"],
    "temperature": [*NUMBERS, "101"],
    "seed": [*NUMBERS, str(1 << 64)],
    "json": ["/nothing/here.json", "/tmp"],
    "plot": ["/nothing/here.png", "/tmp", "/tmp/a.svg"],
}
SWITCHES = {"verify"}


def outcome(*arguments: str, capsys) -> tuple[int, str]:
    """Exit code and what was said of a run that would ask no server that there is."""
    console = Console(width=400)
    code = run(lambda: app(["bench", "--target", "127.0.0.1:1", *arguments], exit_on_error=False), console)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_every_argument_is_known_here() -> None:
    groups = (LoadOptions, PromptOptions, ResultOptions)
    names = {field.name.replace("_", "-") for group in groups for field in fields(group)}
    assert names | {"target"} == set(BAD) | SWITCHES


@pytest.mark.parametrize("name", BAD)
def test_a_bad_value_is_wrong_usage_that_names_it(name: str, capsys) -> None:
    for value in BAD[name]:
        code, said = outcome(f"--{name}={value}", capsys=capsys)
        assert code == exit_codes.USAGE, (value, said)
        assert f"--{name}" in said, (value, said)
        assert "Traceback" not in said


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--rate", "1", "--concurrency", "1"), "exclude each other"),
        (("--verify", "--prompts", __file__), "--verify needs made-up prompts"),
        (("--warm-up", "20", "--requests", "20"), "--warm-up 20 leaves nothing of --requests 20"),
    ],
)
def test_what_contradicts_itself_is_wrong_usage(arguments: tuple[str, ...], says: str, capsys) -> None:
    code, said = outcome(*arguments, capsys=capsys)
    assert (code, says in said) == (exit_codes.USAGE, True), said


def test_a_file_without_prompts_is_refused_before_a_server_is_asked(tmp_path: Path, capsys) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("[]")
    code, said = outcome("--prompts", str(path), capsys=capsys)
    assert code == exit_codes.REFUSED
    assert "prompts.jsonl line 1 holds no object" in said


@pytest.mark.parametrize("target", ["h:1", "127.0.0.1:65535", "[::1]:50051", "unix:/a/b", "dns:///a.b:1"])
def test_addresses_are_taken(target: str, capsys) -> None:
    app.parse_args(["bench", "--target", target], exit_on_error=False)


@pytest.mark.parametrize("command", ["generate", "embed", "status"])
def test_other_commands_check_their_address_too(command: str) -> None:
    with pytest.raises(CycloptsError):
        app.parse_args([command, "--target", "h"], exit_on_error=False, print_error=False)


def test_good_values_reach_the_server(capsys) -> None:
    good = ("--rate", "2.5", "--requests", "3", "--temperature", "0.5", "--seed", str((1 << 64) - 1))
    code, said = outcome(*good, capsys=capsys)
    assert (code, "no server answers" in said) == (exit_codes.FAILURE, True), said
