from enum import StrEnum
from pathlib import Path

import pytest
from pydantic import Field, model_validator

from protos.service import config
from protos.service.config import (
    ConfigError,
    ConfigGroup,
    UserPath,
    environment,
    load_config,
    load_or_exit,
    prefer_environment,
)
from protos.service.config_schema import help_text


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


class EdgeConfig(ConfigGroup):
    """The door."""

    port: int = Field(default=50051, ge=0, le=65535, description="Port of callers.")
    workers: tuple[str, ...] = Field(default=("127.0.0.1:50100",), description="Workers, HOST:PORT each.")
    colour: Colour = Field(default=Colour.RED, description="Colour of the door.")


class CoreConfig(ConfigGroup):
    """The core."""

    target_step_ms: float = Field(default=50.0, gt=0, description="Length of a step, 100% of the time.")
    budget_tokens: int | None = Field(default=None, ge=16, description="Fixed budget.")
    cache: UserPath = Field(default=Path("~/cache"), description="Folder.")
    name: str = Field(description="Name of this core.")
    eager: bool = Field(default=False, description="No graphs.")

    @model_validator(mode="after")
    def _check(self) -> "CoreConfig":
        if self.name == "edge":
            raise ValueError("name must not be edge")
        return self


class Config(ConfigGroup):
    edge: EdgeConfig
    core: CoreConfig


def load(*arguments, environment=None, file=None):
    given = {"FORWARDPLANE_NAME": "c"} | (environment or {})
    return load_config(Config, arguments=arguments, environment=given, file=file)


def problems_of(*arguments, environment=None, file=None):
    with pytest.raises(ConfigError) as raised:
        load(*arguments, environment=environment, file=file)
    return raised.value.problems


def test_defaults_hold_when_nothing_is_given():
    loaded = load()

    assert loaded.value.edge.port == 50051
    assert loaded.sources["port"] == "default"
    assert loaded.value.core.cache == Path("~/cache").expanduser()


def test_each_layer_wins_over_the_one_below(tmp_path):
    path = tmp_path / "settings.toml"
    path.write_text('[edge]\nport = 1\ncolour = "blue"\n[core]\ntarget_step_ms = 2\neager = true\n')

    loaded = load("--port", "3", environment={"FORWARDPLANE_PORT": "2", "FORWARDPLANE_TARGET_STEP_MS": "7"}, file=path)

    assert loaded.value.edge.port == 3
    assert loaded.value.core.target_step_ms == 7.0
    assert loaded.value.edge.colour is Colour.BLUE
    assert loaded.value.core.eager is True
    assert loaded.sources == {
        "port": "flag --port",
        "workers": "default",
        "colour": f"file {path}",
        "target_step_ms": "environment FORWARDPLANE_TARGET_STEP_MS",
        "budget_tokens": "default",
        "cache": "default",
        "name": "environment FORWARDPLANE_NAME",
        "eager": f"file {path}",
    }


@pytest.mark.parametrize("given", ["flag", "flag with =", "environment"])
def test_file_may_be_named_by_flag_or_environment(tmp_path, given):
    path = tmp_path / "s.toml"
    path.write_text("[edge]\nport = 9\n")
    arguments = {"flag": ("--config", str(path)), "flag with =": (f"--config={path}",), "environment": ()}[given]
    environment = {"FORWARDPLANE_CONFIG": str(path)} if given == "environment" else {}

    assert load(*arguments, environment=environment).value.edge.port == 9


def test_lists_are_comma_separated_text_or_toml_lists(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('[edge]\nworkers = ["x:1", "y:2"]\n')

    assert load("--workers", "a:1, b:2").value.edge.workers == ("a:1", "b:2")
    assert load(file=path).value.edge.workers == ("x:1", "y:2")


def test_a_negative_number_is_a_value_not_a_flag():
    assert problems_of("--port", "-1") == ("port = -1 (flag --port): Input should be greater than or equal to 0",)


def test_all_problems_are_reported_at_once(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text('top = 1\n[edge]\nprot = 1\n[cor]\nx = 1\n[core]\neager = "maybe"\n')

    problems = problems_of(
        *("--port", "x", "--colour", "green", "--wrkers", "a:1", "stray", "--budget-tokens"),
        environment={"FORWARDPLANE_TARGET_STEP_MS": "nan"},
        file=path,
    )

    assert [problem.split(":")[0] for problem in problems] == [
        "unknown flag --wrkers (did you mean --workers?)",
        "unknown argument stray",
        "flag --budget-tokens needs a value",
        f"file {path}",
        f"file {path}",
        f"file {path}",
        "port = x (flag --port)",
        "colour = green (flag --colour)",
        "target_step_ms = nan (environment FORWARDPLANE_TARGET_STEP_MS)",
        f"eager = maybe (file {path})",
    ]
    assert "unknown group [top]" in problems[3]
    assert "unknown key [edge] prot (did you mean port?)" in problems[4]
    assert "unknown group [cor] (did you mean core?)" in problems[5]


def test_a_missing_setting_says_how_to_give_it():
    with pytest.raises(ConfigError) as raised:
        load_config(Config, environment={})

    assert raised.value.problems == ("name is required: set --name or FORWARDPLANE_NAME",)


def test_a_rule_over_a_whole_group_names_the_group():
    assert problems_of("--name", "edge") == ("[core] name must not be edge",)


@pytest.mark.parametrize(("content", "word"), [(b"[edge\n", "is not TOML"), (b"\xff", "is not TOML")])
def test_a_file_that_is_not_toml_is_a_problem(tmp_path, content, word):
    path = tmp_path / "s.toml"
    path.write_bytes(content)

    assert word in problems_of(file=path)[0]


def test_a_missing_file_is_a_problem(tmp_path):
    assert problems_of("--config", str(tmp_path / "none")) == (
        f"file {tmp_path / 'none'} cannot be read: No such file or directory",
    )


def test_a_boolean_is_no_number(tmp_path):
    path = tmp_path / "s.toml"
    path.write_text("[edge]\nport = true\n")

    assert problems_of(file=path)[0].startswith("port = true")


def test_unknown_variables_of_ours_are_warnings():
    loaded = load(environment={"FORWARDPLANE_PROT": "1", "OTHER": "x"})

    assert loaded.warnings == (
        "environment variable FORWARDPLANE_PROT is not a setting of this process (did you mean FORWARDPLANE_PORT?)",
    )


def test_only_the_names_own_part_makes_two_variables_alike():
    loaded = load(environment={"FORWARDPLANE_PAGE_SIZE": "1"})

    assert loaded.warnings == ()
    assert "FORWARDPLANE_PAGE_SIZE" in loaded.notes[0]


def test_variables_that_are_like_none_of_this_process_are_notes_since_another_may_know_them():
    loaded = load(environment={"FORWARDPLANE_SCHEDULE_POLICY": "lpm"})

    assert loaded.warnings == ()
    assert loaded.notes == ("environment variable FORWARDPLANE_SCHEDULE_POLICY is not a setting of this process",)


def test_description_shows_value_and_source():
    lines = load("--colour=blue").describe().splitlines()

    assert "[edge] colour = blue  (flag --colour)" in lines
    assert "[edge] workers = 127.0.0.1:50100  (default)" in lines
    assert "[core] budget_tokens = (none)  (default)" in lines


def test_settings_are_frozen():
    loaded = load()

    with pytest.raises(ValueError, match="frozen"):
        loaded.value.edge.port = 1


def test_help_has_every_flag_with_default_limits_and_variable():
    text = " ".join(help_text(Config, program="x").split())

    assert "--port INT Port of callers. [default 50051; >= 0, <= 65535; env FORWARDPLANE_PORT]" in text
    assert "--colour red|blue" in text
    assert "100% of the time" in text
    assert "[required; env FORWARDPLANE_NAME]" in text
    assert "The door." in text


def test_help_exits_with_0(capsys):
    with pytest.raises(SystemExit) as raised:
        load_or_exit(Config, ["--port", "bad", "--help"], program="x")

    assert raised.value.code == 0
    assert "--port" in capsys.readouterr().out


def test_problems_exit_with_78_one_line_each(capsys):
    with pytest.raises(SystemExit) as raised:
        load_or_exit(Config, ["--port", "x", "--name", "n", "--nope"], program="x")

    assert raised.value.code == 78
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_the_process_environment_is_read_when_none_is_given(monkeypatch):
    monkeypatch.setenv("FORWARDPLANE_NAME", "from here")

    assert load_config(Config).value.core.name == "from here"
    assert config.environment()["FORWARDPLANE_NAME"] == "from here"


@pytest.mark.parametrize(("given", "expected"), [(None, "ERROR"), ("DEBUG", "DEBUG")])
def test_children_hear_nothing_from_grpc_unless_asked_to(monkeypatch, given, expected):
    monkeypatch.setenv("GRPC_VERBOSITY", given or "")
    if given is None:
        monkeypatch.delenv("GRPC_VERBOSITY")

    assert config.environment()["GRPC_VERBOSITY"] == expected


def test_the_copy_of_the_environment_is_a_copy(monkeypatch):
    config.environment()["FORWARDPLANE_X"] = "1"

    assert "FORWARDPLANE_X" not in config.environment()


def test_a_preferred_variable_gives_way_to_the_users(monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
    monkeypatch.delenv("MKL_SPARE", raising=False)
    prefer_environment({"OMP_WAIT_POLICY": "PASSIVE", "MKL_SPARE": "1"})
    assert environment()["OMP_WAIT_POLICY"] == "ACTIVE"
    assert environment()["MKL_SPARE"] == "1"
    monkeypatch.delenv("MKL_SPARE")
