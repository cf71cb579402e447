"""Builds the native kernel library with the compiler of the machine, once for each state of its sources.

`python -m kernels.build` builds and prints the path. The result is cached by a hash over sources, compiler and flags.
Knows nothing of loading. Guards: a library at its final path is complete (it is moved there when it is).
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.errors import KernelError, KernelStatus

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libforwardplane_kernels.so"
COMPILERS = ("g++", "clang++", "c++")
BASELINE = "x86-64-v3"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fPIC",
    "-fvisibility=hidden",
    "-pthread",
    "-Wall",
    "-Wno-maybe-uninitialized",
)
LINK_FLAGS = ("-shared", "-static-libstdc++", "-static-libgcc", "-pthread")
FILE_FLAGS = {"products_avx512.cpp": ("-march=x86-64-v4", "-mavx512vnni")}
"""Only files whose code runs after a check of the machine may ask for more than the baseline."""
COMPILE_TIMEOUT_S = 300


def default_cache() -> Path:
    """Where libraries are kept when nothing else is asked for.

    Raises:
        KernelError: the user has no home folder.
    """
    try:
        return Path.home() / ".cache" / "forwardplane" / "kernels"
    except RuntimeError as error:
        raise KernelError(f"there is no folder to build in: {error}", status=KernelStatus.UNSUPPORTED) from error


def find_compiler() -> str:
    """The path of a C++ compiler.

    Raises:
        KernelError: none is installed.
    """
    for name in COMPILERS:
        path = shutil.which(name)
        if path is not None:
            return path
    raise KernelError(f"no C++ compiler ({', '.join(COMPILERS)}) is installed", status=KernelStatus.UNSUPPORTED)


def source_files() -> list[Path]:
    """Every file that the library is made of, in a fixed order."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h"})


def fingerprint(compiler: str = "") -> str:
    """A hash of sources and flags, and of the compiler's name."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((compiler, BASELINE, FLAGS, LINK_FLAGS, FILE_FLAGS)).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_library(cache: Path | None = None) -> Path:
    """The library, built now unless this state of the sources has been built before.

    Raises:
        KernelError: no compiler, or it failed; one line.
    """
    compiler = find_compiler()
    folder = (cache or default_cache()) / fingerprint(compiler)
    target = folder / LIBRARY
    if target.exists():
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compile_library(compiler, Path(scratch) / LIBRARY)
            (Path(scratch) / LIBRARY).replace(target)
    except OSError as error:
        raise KernelError(f"the library cannot be written: {error}", status=KernelStatus.UNSUPPORTED) from error
    return target


def compile_library(compiler: str, target: Path) -> None:
    """Compile every source and link `target`, whose folder takes the objects.

    Raises:
        KernelError: a step failed.
    """
    sources = [path for path in source_files() if path.suffix == ".cpp"]
    objects = [target.parent / f"{path.stem}.o" for path in sources]

    def compile_one(source: Path, to: Path) -> None:
        march = FILE_FLAGS.get(source.name, (f"-march={BASELINE}",))
        _run([compiler, *FLAGS, *march, "-c", str(source), "-o", str(to)])

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, sources, objects))
    _run([compiler, *LINK_FLAGS, *map(str, objects), "-o", str(target)])


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise KernelError(f"the compiler did not run: {error}", status=KernelStatus.UNSUPPORTED) from error
    if done.returncode != 0:
        first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr.strip()[:200])
        raise KernelError(f"the compiler failed: {first}", status=KernelStatus.UNSUPPORTED)


def main() -> int:
    """Build and say where, or why not."""
    try:
        path = build_library()
    except KernelError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    sys.stdout.write(f"{path}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
