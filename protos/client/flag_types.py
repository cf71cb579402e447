"""Types of the command's flags whose values are checked before anything is done, beside what the parser offers."""

import os
import re
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter, validators

from protos.wire.limits import MAX_TEMPERATURE

_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_SCHEMES = ("unix:", "unix-abstract:", "dns:", "ipv4:", "ipv6:", "xds:", "vsock:")
_MAX_PORT = 65535
MAX_SEED = (1 << 64) - 1


def check_target(_type: Any, value: str) -> None:
    """Refuse what is no address.

    Raises:
        ValueError: neither HOST:PORT nor one of gRPC's schemes.
    """
    match = _ADDRESS.fullmatch(value)
    is_address = match is not None and 1 <= int(match[2]) <= _MAX_PORT
    if not is_address and not value.startswith(_SCHEMES):
        raise ValueError(f"Must be HOST:PORT, with a port of 1 to {_MAX_PORT}.")


def check_new_file(_type: Any, value: Path | None) -> None:
    """Refuse a path at which no file can be written.

    Raises:
        ValueError: it is a folder, or its folder is not there or not ours to write in.
    """
    if value is None:
        return
    folder = value.absolute().parent
    if value.is_dir():
        raise ValueError("Must be a file, not a folder.")
    if not folder.is_dir():
        raise ValueError("Must be in a folder that exists.")
    if not os.access(value if value.exists() else folder, os.W_OK):
        raise ValueError("Must be a file that may be written.")


def check_temperature(_type: Any, value: float | None) -> None:
    """Refuse what no server takes.

    Raises:
        ValueError: not from 0 to the limit.
    """
    if value is not None and not 0 <= value <= MAX_TEMPERATURE:
        raise ValueError(f"Must be >= 0 and <= {MAX_TEMPERATURE:g}.")


Target = Annotated[str, Parameter(validator=check_target)]
"""HOST:PORT of a scheduler."""
NewFile = Annotated[Path, Parameter(validator=check_new_file)]
"""A file that is to be written."""
OldFile = Annotated[Path, Parameter(validator=validators.Path(exists=True, dir_okay=False))]
"""A file that is read."""
