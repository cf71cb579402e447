"""Takes out of an installed environment what a running service never reads. Runs in the build stage of an image.

    python slim_environment.py IMPORT...

The interpreter that runs it is the environment's own; the imports are those of a start, which write their compiled
modules. Guards: the imports work afterwards, and no module is compiled that a start does not load.
"""

import compileall
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

FOLDERS = ("tests", "include", "f2py", "distutils")
"""Of libraries: their own tests, headers, and numpy's builders of extensions."""
PARTS = ("zstandard/_cffi*.so", "zstandard/backend_cffi.py")
"""zstandard's second backend is for PyPy."""
SUFFIXES = (".a", ".c", ".h", ".hpp", ".pxd", ".pyi", ".pyx")
GENERATED = "kubernetes_asyncio/client"
"""Eight hundred generated modules, most of it docstrings, and its import loads all: kept compiled, without sources."""


def unread(site: Path) -> Iterator[Path]:
    """Folders and files that no import reads."""
    for name in ("__pycache__", *FOLDERS):
        yield from (folder for folder in site.glob(f"*/**/{name}") if folder.is_dir())
    for pattern in PARTS:
        yield from site.glob(pattern)
    yield from (file for file in site.rglob("*") if file.suffix in SUFFIXES)


def strip_debug_information(site: Path) -> None:
    """Of extension modules. Not of the libraries beside them, whose rewritten headers strip would break."""
    for library in site.rglob("*.so"):
        if not library.parent.name.endswith(".libs"):
            subprocess.run(["strip", "--strip-debug", str(library)], check=True)


def compile_generated(folder: Path) -> None:
    """In place of the sources."""
    if not folder.is_dir():
        return
    if not compileall.compile_dir(folder, quiet=1, legacy=True, optimize=2, workers=0):
        raise SystemExit(f"{folder} does not compile")
    for source in folder.rglob("*.py"):
        source.unlink()


def main(imports: list[str]) -> None:
    """Slim the environment of this interpreter."""
    site = Path(sysconfig.get_paths()["purelib"])
    for place in list(unread(site)):
        if place.is_dir():
            shutil.rmtree(place)
        else:
            place.unlink(missing_ok=True)
    strip_debug_information(site)
    compile_generated(site / GENERATED)
    subprocess.run([sys.executable, "-c", f"import {', '.join(imports)}"], check=True)


if __name__ == "__main__":
    main(sys.argv[1:])
