"""What can be said of a settings schema without any value: its fields, their flags and variables, and the help text.

Knows nothing of where values come from.
"""

import argparse
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

ENVIRONMENT_PREFIX = "FORWARDPLANE_"
CONFIG_VARIABLE = ENVIRONMENT_PREFIX + "CONFIG"
NO_VALUE = "\0no value"
"""What the parser leaves for a flag that was given without a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingField:
    """One setting: its group, name and pydantic field."""

    group: str
    name: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        """`--field-name`."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """`FORWARDPLANE_FIELD_NAME`."""
        return ENVIRONMENT_PREFIX + self.name.upper()


def setting_fields(schema: type[BaseModel]) -> dict[str, SettingField]:
    """Every setting by name, in the order of the groups. Names are unique across groups."""
    fields: dict[str, SettingField] = {}
    for group_name, group in setting_groups(schema).items():
        for name, info in group.model_fields.items():
            assert name not in fields, f"{name} is in two groups"
            assert name != "config", "--config names the file"
            fields[name] = SettingField(group=group_name, name=name, info=info)
    return fields


def setting_groups(schema: type[BaseModel]) -> dict[str, type[BaseModel]]:
    """The groups by name."""
    groups: dict[str, type[BaseModel]] = {}
    for name, info in schema.model_fields.items():
        assert isinstance(info.annotation, type), f"{name} is not a group"
        assert issubclass(info.annotation, BaseModel), f"{name} is not a group"
        groups[name] = info.annotation
    return groups


def flag_parser(schema: type[BaseModel]) -> argparse.ArgumentParser:
    """A parser that leaves each given flag as text, and absent ones out.

    A flag without a value is NO_VALUE, so that it can be reported with all other problems.
    """
    return _add_flags(_empty_parser("", ""), schema, nargs="?")


def help_text(schema: type[BaseModel], *, program: str, description: str = "") -> str:
    """The flags of `schema` by group, with defaults, limits and variables."""
    return _add_flags(_empty_parser(program, description), schema, nargs=None).format_help()


def _empty_parser(program: str, description: str) -> argparse.ArgumentParser:
    return argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [flags]",
        description=description,
        add_help=False,
        allow_abbrev=False,
        exit_on_error=False,
        argument_default=argparse.SUPPRESS,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=36, width=118),
        epilog=f"Order: defaults < file < environment ({ENVIRONMENT_PREFIX}*) < flags.",
    )


def _add_flags(
    parser: argparse.ArgumentParser, schema: type[BaseModel], *, nargs: str | None
) -> argparse.ArgumentParser:
    value: dict[str, Any] = {"nargs": nargs, "const": NO_VALUE if nargs else None}
    parser.add_argument("--help", "-h", action="store_true", help="show this and exit")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file of settings [env {CONFIG_VARIABLE}]", **value)
    sections = {name: parser.add_argument_group(name, group.__doc__) for name, group in setting_groups(schema).items()}
    for entry in setting_fields(schema).values():
        sections[entry.group].add_argument(
            entry.flag, dest=entry.name, metavar=_metavar(entry.info), help=_help(entry), **value
        )
    return parser


def _inner(annotation: Any) -> Any:
    """`annotation` without `| None` and metadata."""
    if get_origin(annotation) is Annotated:
        return _inner(get_args(annotation)[0])
    members = [member for member in get_args(annotation) if member is not type(None)]
    is_optional = type(None) in get_args(annotation) and get_origin(annotation) not in (tuple, list)
    return _inner(members[0]) if is_optional and members else annotation


def is_list(annotation: Any) -> bool:
    """Whether text for this annotation is comma-separated."""
    return get_origin(_inner(annotation)) in (tuple, list, frozenset)


def _metavar(info: FieldInfo) -> str:
    inner = _inner(info.annotation)
    if is_list(inner):
        return "VALUE,..."
    if isinstance(inner, type) and issubclass(inner, Enum):
        return "|".join(str(member.value) for member in inner)
    if isinstance(inner, type) and issubclass(inner, Path):
        return "PATH"
    return {int: "INT", float: "NUMBER", bool: "true|false"}.get(inner, "TEXT")


def _help(entry: SettingField) -> str:
    default = "required" if entry.info.is_required() else f"default {as_text(entry.info.get_default())}"
    limits = ", ".join(_limits(entry.info))
    notes = "; ".join(part for part in (default, limits, f"env {entry.variable}") if part)
    return f"{entry.info.description or ''} [{notes}]".replace("%", "%%")


def _limits(info: FieldInfo) -> list[str]:
    signs = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    found = []
    for constraint in info.metadata:
        for attribute, sign in signs.items():
            limit = getattr(constraint, attribute, None)
            if limit is not None:
                found.append(f"{sign} {limit}")
    return found


def as_text(value: Any) -> str:
    """`value` as a person would write it on the command line."""
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, tuple | list | frozenset):
        return ",".join(as_text(item) for item in value) or "(none)"
    if value is None:
        return "(none)"
    if isinstance(value, bool):
        return str(value).lower()
    return str(value)
