"""Finds distributions that install a package under one of our top-level names. Hugging Face ships a `kernels`.

Reads file lists only and imports nothing: about 20 ms, where importlib.metadata takes 200. Checked before a service
starts, since a mixed package fails later and far from its cause.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import protos
from protos.wire.errors import ForeignPackage

OUR_DISTRIBUTIONS = frozenset({"forwardplane", "forwardplane-worker"})
OUR_PACKAGES = ("protos", "kernels")


def assert_package_owner() -> None:
    """Make sure that `protos` and `kernels` are ours alone.

    Raises:
        ForeignPackage: naming the package and who installs it.
    """
    root = Path(protos.__path__[0]).resolve().parent
    for name, owner in foreign_owners(OUR_PACKAGES, [Path(entry or ".") for entry in sys.path], root=root):
        raise ForeignPackage(f"the package {name} is also installed by {owner}; remove that", field=name)


def foreign_owners(names: Sequence[str], search_path: Sequence[Path], *, root: Path) -> list[tuple[str, str]]:
    """Each of `names` that somebody else provides on `search_path`, with the distribution or file that does.

    Args:
        names: top-level packages of ours.
        search_path: as `sys.path`.
        root: folder in which our packages lie.
    """
    found: list[tuple[str, str]] = []
    for folder in dict.fromkeys(entry.resolve() for entry in search_path):
        found += _listed(names, folder)
        if folder != root:
            found += [(name, str(place)) for name in names for place in _modules(folder, name)]
    return found


def _listed(names: Sequence[str], folder: Path) -> list[tuple[str, str]]:
    """What the file lists of the distributions in `folder` claim."""
    found = []
    for record in sorted(folder.glob("*.dist-info/RECORD")):
        distribution = record.parent.name.removesuffix(".dist-info").rpartition("-")[0]
        if distribution.lower().replace("_", "-") not in OUR_DISTRIBUTIONS:
            lines = b"\n" + record.read_bytes()
            found += [(name, distribution) for name in names if f"\n{name}/".encode() in lines]
    return found


def _modules(folder: Path, name: str) -> list[Path]:
    """A package or module `name` in `folder`. Folders without `__init__.py` lose to ours and do no harm."""
    places = (folder / name / "__init__.py", folder / f"{name}.py")
    return [place for place in places if place.is_file()]
