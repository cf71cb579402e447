"""Builds the native kernel library with the compiler of the machine, once for each state of its sources.

`python -m kernels.build` builds and prints the path. The result is cached by a hash over sources, compiler and flags.
Knows nothing of loading. Guards: what is handed out is what was built: it is moved to
its final path when it is complete, and checked by its hash each time.

A library for other machines (a wheel's) is compiled by the `ziglang` package where that is installed: clang with the
headers of an old glibc, its C++ library linked in. The machine's own compiler ties it to the machine's glibc.
"""

import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from kernels.errors import KernelError, KernelStatus

logger = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "csrc"
LIBRARY = "libforwardplane_kernels.so"
CHECKSUM = f"{LIBRARY}.blake2b"
"""Beside a built library, its hash in hex: to load half a file would end the process."""
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
OLD_GLIBC = "2.17"
OLD_GLIBC_PLATFORM = "manylinux_2_17_x86_64"
"""Of a wheel whose library needs no newer glibc."""


class Compiler(NamedTuple):
    """How one is called."""

    command: tuple[str, ...]
    baseline: tuple[str, ...] = (f"-march={BASELINE}",)
    file_flags: Mapping[str, tuple[str, ...]] = FILE_FLAGS
    link_flags: tuple[str, ...] = LINK_FLAGS
    platform: str | None = None
    """Wheel platform of what it links; None: this machine's."""


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


def wheel_compiler() -> Compiler:
    """What compiles for other machines: for an old glibc if the `ziglang` package is here, else as for this one.

    Raises:
        KernelError: there is none.
    """
    if importlib.util.find_spec("ziglang") is None:
        return Compiler((find_compiler(),))
    return Compiler(
        command=(sys.executable, "-m", "ziglang", "c++", "-target", f"x86_64-linux-gnu.{OLD_GLIBC}"),
        baseline=("-march=x86_64_v3",),
        file_flags={"products_avx512.cpp": ("-march=x86_64_v4+avx512vnni",)},
        link_flags=("-shared", "-s", "-pthread"),
        platform=OLD_GLIBC_PLATFORM,
    )


def source_files() -> list[Path]:
    """Every file that the library is made of, in a fixed order."""
    return sorted(path for path in SOURCES.iterdir() if path.suffix in {".cpp", ".h"})


def fingerprint(compiler: str = "") -> str:
    """A hash of sources and flags, and of the compiler's name."""
    digest = hashlib.blake2b(digest_size=8)
    digest.update(repr((compiler, CHECKSUM, BASELINE, FLAGS, LINK_FLAGS, FILE_FLAGS)).encode())
    for path in source_files():
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def build_library(cache: Path | None = None) -> Path:
    """The library, built now unless this state of the sources has been built before and is whole.

    Raises:
        KernelError: no compiler, or it failed; one line.
    """
    compiler = find_compiler()
    folder = (cache or default_cache()) / fingerprint(compiler)
    target = folder / LIBRARY
    if target.exists():
        if _is_whole(target):
            return target
        logger.warning("the native library in the cache is damaged: it is built again", extra={"library": str(target)})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            compile_library(Compiler((compiler,)), Path(scratch) / LIBRARY)
            (Path(scratch) / CHECKSUM).write_text(_hash_of(Path(scratch) / LIBRARY))
            (Path(scratch) / CHECKSUM).replace(folder / CHECKSUM)
            (Path(scratch) / LIBRARY).replace(target)
    except OSError as error:
        raise KernelError(f"the library cannot be written: {error}", status=KernelStatus.UNSUPPORTED) from error
    return target


def compile_library(compiler: Compiler, target: Path) -> None:
    """Compile every source and link `target`, whose folder takes the objects.

    Raises:
        KernelError: a step failed.
    """
    sources = [path for path in source_files() if path.suffix == ".cpp"]
    objects = [target.parent / f"{path.stem}.o" for path in sources]

    def compile_one(source: Path, to: Path) -> None:
        march = compiler.file_flags.get(source.name, compiler.baseline)
        _run([*compiler.command, *FLAGS, *march, "-c", str(source), "-o", str(to)])

    with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
        list(pool.map(compile_one, sources, objects))
    _run([*compiler.command, *compiler.link_flags, *map(str, objects), "-o", str(target)])


def _hash_of(path: Path) -> str:
    return hashlib.blake2b(path.read_bytes(), digest_size=16).hexdigest()


def _is_whole(library: Path) -> bool:
    try:
        return library.with_name(CHECKSUM).read_text() == _hash_of(library)
    except (OSError, UnicodeDecodeError):
        return False


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
