"""Builds the two distributions: `python -m k8s.wheels FOLDER`.

`forwardplane` holds the contract, the client and the scheduler, and needs no torch; `forwardplane-worker` holds workers
and kernels. One pyproject.toml describes both for development; here each gets its own in a scratch folder.
"""

import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SHARED = ("LICENSE", "NOTICE", "README.md", "MANIFEST.in")
SCHEDULER = ("protos", "scheduler_svc")
WORKER = ("worker_svc", "kernels")
_WORKER_PROJECT = """
[build-system]
requires = ["setuptools>=77"]
build-backend = "setuptools.build_meta"

[project]
name = "forwardplane-worker"
version = "{version}"
description = "Worker services of forwardplane: they hold weights and KV pages and run forward plans"
readme = "README.md"
license = "Apache-2.0"
requires-python = "{python}"
dependencies = ["forwardplane=={version}", {torch}]

[tool.setuptools.packages.find]
include = ["worker_svc*", "kernels*"]

[tool.setuptools.package-data]
"*" = {data}
"""


def projects() -> dict[str, str]:
    """The pyproject.toml of each distribution, by its name."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    described = tomllib.loads(text)
    project, tools = described["project"], described["tool"]["setuptools"]
    torch = ", ".join(f'"{need}"' for need in project["optional-dependencies"]["worker"])
    include = ", ".join(f'"{name}"' for name in tools["packages"]["find"]["include"])
    own = ", ".join(f'"{name}*"' for name in SCHEDULER)
    scheduler = _replaced(text, f"include = [{include}]", f"include = [{own}]")
    needed = f'worker = ["forwardplane-worker=={project["version"]}"]'
    scheduler = _replaced(scheduler, f"worker = [{torch}]", needed)
    data = "[" + ", ".join(f'"{pattern}"' for pattern in tools["package-data"]["*"]) + "]"
    worker = _WORKER_PROJECT.format(
        version=project["version"], python=project["requires-python"], torch=torch, data=data
    )
    return {"forwardplane": scheduler, "forwardplane-worker": worker}


def build(target: Path) -> None:
    """Both wheels, in `target`. The build tools are those of this environment; nothing is fetched."""
    described = projects()
    for name, packages in (("forwardplane", SCHEDULER), ("forwardplane-worker", WORKER)):
        with tempfile.TemporaryDirectory(prefix="forwardplane-wheel-") as scratch:
            folder = Path(scratch)
            (folder / "pyproject.toml").write_text(described[name], encoding="utf-8")
            for file in (*SHARED, *(("setup.py",) if packages is WORKER else ())):
                shutil.copy(ROOT / file, folder)
            for package in packages:
                shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
            command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(target), scratch]
            subprocess.run(command, check=True)


def _replaced(text: str, old: str, new: str) -> str:
    if text.count(old) != 1:
        message = f"pyproject.toml has no single line {old}"
        raise ValueError(message)
    return text.replace(old, new)


def main(arguments: Sequence[str]) -> int:
    """Build into the folder that is named."""
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m k8s.wheels FOLDER\n")
        return 2
    build(Path(arguments[0]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
