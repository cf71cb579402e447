"""Loads frozen settings: defaults < TOML file < environment < flags. The only reader of the environment.

A schema is a frozen pydantic model whose fields are groups (`ConfigGroup`), one per component. Field names are unique
across groups: `port` is the flag `--port`, the variable FORWARDPLANE_PORT and `[group] port` in the file. Every problem
is reported at once. Knows nothing of any component's settings.
"""

import argparse
import difflib
import os
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Generic, NoReturn, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic.fields import FieldInfo

from protos.service.config_schema import (
    CONFIG_VARIABLE,
    ENVIRONMENT_PREFIX,
    NO_VALUE,
    SettingField,
    as_text,
    flag_parser,
    help_text,
    is_list,
    setting_fields,
)

EX_CONFIG = 78

UserPath = Annotated[Path, AfterValidator(Path.expanduser)]
"""A path in which a leading `~` is the user's home."""


class ConfigGroup(BaseModel):
    """Base of one component's settings: frozen, closed, finite numbers, defaults checked like values."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)


ConfigT = TypeVar("ConfigT", bound=BaseModel)


class ConfigError(Exception):
    """Settings that cannot be used; `problems` has one line for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedConfig(Generic[ConfigT]):
    """Resolved settings. Made by `load_config` at start, lives as long as the process."""

    value: ConfigT
    sources: dict[str, str]
    """Where each field's value comes from: `default`, `file PATH`, `environment NAME` or `flag --name`."""
    warnings: tuple[str, ...]
    """Variables with our prefix that this schema does not know, and whose names are close to ones that it knows."""
    notes: tuple[str, ...] = ()
    """Other variables with our prefix: in an environment that processes share, settings of another one."""

    def describe(self) -> str:
        """One line a field: group, name, value and source."""
        lines = []
        for group_name in type(self.value).model_fields:
            group = getattr(self.value, group_name)
            for name in type(group).model_fields:
                lines.append(f"[{group_name}] {name} = {as_text(getattr(group, name))}  ({self.sources[name]})")
        return "\n".join(lines)


@dataclass(slots=True)
class _Merge:
    """Values and their sources as the layers are laid over one another; lives for one `load_config`."""

    fields: dict[str, SettingField]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def put(self, name: str, value: Any, *, source: str) -> None:
        entry = self.fields[name]
        self.values.setdefault(entry.group, {})[name] = _split(value, entry.info)
        self.sources[name] = source


def environment() -> dict[str, str]:
    """A copy of the process's environment, for those who start child processes.

    GRPC_VERBOSITY is ERROR in it unless it was set: gRPC's C core reads it while `grpc` is imported, and would else
    write to the child's standard error what reaches callers as a status anyway.
    """
    return {"GRPC_VERBOSITY": "ERROR", **os.environ}


def prefer_environment(preferred: Mapping[str, str]) -> None:
    """Set variables that a library reads while it is loaded, unless the user has set them. Call before importing it."""
    for name, value in preferred.items():
        os.environ.setdefault(name, value)


def load_config(
    schema: type[ConfigT],
    *,
    arguments: Sequence[str] = (),
    file: Path | None = None,
    environment: Mapping[str, str] | None = None,
) -> LoadedConfig[ConfigT]:
    """The settings of `schema` from all four layers.

    Args:
        schema: a model of `ConfigGroup` fields.
        arguments: flags, without the program's name.
        file: a TOML file; `--config FILE` wins over it, and FORWARDPLANE_CONFIG is used when neither is given.
        environment: absent, the process's own.

    Raises:
        ConfigError: with every problem found.
    """
    variables = os.environ if environment is None else environment
    merge = _Merge(setting_fields(schema))
    flags = _parse(schema, merge, arguments)
    named_file = flags.pop("config", None) or file or variables.get(CONFIG_VARIABLE)
    if named_file:
        _merge_file(merge, Path(named_file).expanduser())
    _merge_environment(merge, variables)
    for name, value in flags.items():
        merge.put(name, value, source=f"flag {merge.fields[name].flag}")
    return _validated(schema, merge)


def _nothing_more(_config: BaseModel) -> Sequence[str]:
    return ()


def load_or_exit(
    schema: type[ConfigT],
    arguments: Sequence[str],
    *,
    program: str,
    description: str = "",
    check: Callable[[ConfigT], Sequence[str]] = _nothing_more,
) -> LoadedConfig[ConfigT]:
    """As `load_config`; answers `--help` with exit 0, and prints every problem and exits 78 when there is one.

    Args:
        schema: as `load_config`.
        arguments: as `load_config`.
        program: named in front of problems.
        description: for the help.
        check: problems of settings that are good each on its own.
    """
    if "--help" in arguments or "-h" in arguments:
        sys.stdout.write(help_text(schema, program=program, description=description))
        raise SystemExit(0)
    try:
        loaded = load_config(schema, arguments=arguments)
        problems = check(loaded.value)
        if problems:
            raise ConfigError(problems)
        return loaded
    except ConfigError as error:
        _exit_with(error, program)


def _exit_with(error: ConfigError, program: str) -> NoReturn:
    for problem in error.problems:
        sys.stderr.write(f"{program}: {problem}\n")
    raise SystemExit(EX_CONFIG) from error


def _parse(schema: type[BaseModel], merge: _Merge, arguments: Sequence[str]) -> dict[str, str]:
    """Flags by field name. Puts unknown arguments and flags without a value among the problems."""
    try:
        found, unknown = flag_parser(schema).parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        merge.problems.append(str(error))
        return {}
    merge.problems.extend(_unknown(unknown, ["--config", *(entry.flag for entry in merge.fields.values())]))
    flags: dict[str, str] = {}
    for name, value in vars(found).items():
        if value == NO_VALUE and merge.fields[name].info.annotation is bool:
            flags[name] = "true"
        elif value == NO_VALUE:
            merge.problems.append(f"flag --{name.replace('_', '-')} needs a value")
        elif name != "help":
            flags[name] = value
    return flags


def _unknown(arguments: Sequence[str], known: Sequence[str]) -> list[str]:
    """A line for each argument the parser did not take; the value behind an unknown flag is not told apart."""
    problems = []
    for before, argument in zip(["", *arguments], arguments, strict=False):
        name = argument.partition("=")[0]
        if argument.startswith("-"):
            problems.append(f"unknown flag {name}{_suggestion(name, known)}")
        elif not before.startswith("-") or "=" in before:
            problems.append(f"unknown argument {argument}")
    return problems


def _merge_file(merge: _Merge, path: Path) -> None:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        merge.problems.append(f"file {path} cannot be read: {error.strerror}")
        return
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        merge.problems.append(f"file {path} is not TOML: {error}")
        return
    groups = {entry.group for entry in merge.fields.values()}
    for group, table in tables.items():
        if group not in groups or not isinstance(table, dict):
            merge.problems.append(f"file {path}: unknown group [{group}]{_suggestion(group, sorted(groups))}")
            continue
        names = [name for name, entry in merge.fields.items() if entry.group == group]
        for name, value in table.items():
            if name in names:
                merge.put(name, value, source=f"file {path}")
            else:
                merge.problems.append(f"file {path}: unknown key [{group}] {name}{_suggestion(name, names)}")


def _merge_environment(merge: _Merge, variables: Mapping[str, str]) -> None:
    by_variable = {entry.variable: name for name, entry in merge.fields.items()}
    for variable in sorted(variables):
        if variable in by_variable:
            merge.put(by_variable[variable], variables[variable], source=f"environment {variable}")
        elif variable.startswith(ENVIRONMENT_PREFIX) and variable != CONFIG_VARIABLE:
            hint = _suggestion(variable, list(by_variable), prefix=ENVIRONMENT_PREFIX)
            told = merge.warnings if hint else merge.notes
            told.append(f"environment variable {variable} is not a setting of this process{hint}")


def _validated(schema: type[ConfigT], merge: _Merge) -> LoadedConfig[ConfigT]:
    given = {group: merge.values.get(group, {}) for group in schema.model_fields}
    try:
        value = schema.model_validate(given)
    except ValidationError as error:
        found = [dict(item) for item in error.errors(include_url=False)]
        problems = [_problem(merge, item) for item in (*found, *_hidden(schema, given, found))]
        raise ConfigError(list(dict.fromkeys([*merge.problems, *problems]))) from None
    if merge.problems:
        raise ConfigError(merge.problems)
    sources = {name: merge.sources.get(name, "default") for name in merge.fields}
    return LoadedConfig(value=value, sources=sources, warnings=tuple(merge.warnings), notes=tuple(merge.notes))


def _hidden(
    schema: type[BaseModel], given: Mapping[str, Mapping[str, Any]], found: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """What rules over several settings say, which are not asked while one of the settings is wrong by itself.

    They are asked with the defaults in place of what is wrong.
    """
    wrong = {tuple(item["loc"][:2]) for item in found}
    sound = {
        group: {name: value for name, value in values.items() if (group, name) not in wrong}
        for group, values in given.items()
    }
    if sound == given:
        return []
    try:
        schema.model_validate(sound)
    except ValidationError as error:
        return [dict(item) for item in error.errors(include_url=False)]
    return []


def _problem(merge: _Merge, item: Mapping[str, Any]) -> str:
    """One line for one pydantic error: field, value, source and what is wrong with it."""
    location = item["loc"]
    message = item["msg"].removeprefix("Value error, ")
    entry = merge.fields.get(str(location[1])) if len(location) > 1 else None
    if not location:
        return str(message)
    if entry is None:
        return f"[{'.'.join(map(str, location))}] {message}"
    if item["type"] == "missing":
        return f"{entry.name} is required: set {entry.flag} or {entry.variable}"
    source = merge.sources.get(entry.name, "default")
    return f"{entry.name} = {as_text(item['input'])} ({source}): {message}"


def _split(value: Any, info: FieldInfo) -> Any:
    """`value` in the form pydantic reads: comma-separated text as a list, a file's scalars as text."""
    if isinstance(value, str) and is_list(info.annotation):
        return [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, bool):
        return str(value).lower()
    return value


def _suggestion(name: str, known: Sequence[str], *, prefix: str = "") -> str:
    """What all of them begin with says nothing of how like two names are."""
    bare = [one.removeprefix(prefix) for one in known]
    near = difflib.get_close_matches(name.removeprefix(prefix), bare, n=1, cutoff=0.75)
    return f" (did you mean {prefix}{near[0]}?)" if near else ""
