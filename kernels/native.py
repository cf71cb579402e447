"""Loads the native kernel library and wraps its handles.

In a checkout it is built from the sources, in a wheel it is shipped beside this file. Never falls back silently: the
answer is a library or a `NativeUnavailable` with its reason,.
"""

import ctypes
import platform
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from kernels.build import LIBRARY, SOURCES, build_library
from kernels.errors import KernelError, KernelStatus, NativeUnavailable
from kernels.native_types import CError, Variant

SHIPPED = Path(__file__).parent / "lib" / LIBRARY
NEEDED_FLAGS = frozenset({"avx2", "fma", "f16c", "bmi1", "bmi2", "movbe"})
CPU_INFO = Path("/proc/cpuinfo")
DEFAULT_SPIN_US = 30
MAX_THREADS = 64
"""Of one pool."""
VARIANT_NAMES = {Variant.AVX2: "avx2", Variant.AVX512_VNNI: "avx512-vnni", Variant.CHECK: "check (float activations)"}

_INT, _FLOAT_P, _VOID_P = ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p
_ERROR = ctypes.POINTER(CError)
_HANDLE_OUT = ctypes.POINTER(ctypes.c_void_p)
_SIGNATURES: dict[str, tuple[object, tuple[object, ...]]] = {
    "fp_version": (ctypes.c_char_p, ()),
    "fp_struct_bytes": (None, (_VOID_P,)),
    "fp_supports": (_INT, (_INT,)),
    "fp_pool_create": (_INT, (_INT, _INT, _HANDLE_OUT, _ERROR)),
    "fp_pool_set_threads": (_INT, (_VOID_P, _INT, _ERROR)),
    "fp_pool_ceilings": (_INT, (_VOID_P, _VOID_P, _ERROR)),
    "fp_pool_destroy": (None, (_VOID_P,)),
    "fp_model_create": (_INT, (_VOID_P, _VOID_P, _HANDLE_OUT, _ERROR)),
    "fp_model_set_tensor": (_INT, (_VOID_P, _INT, _INT, _INT, _VOID_P, ctypes.c_int64, _ERROR)),
    "fp_model_seal": (_INT, (_VOID_P, _ERROR)),
    "fp_model_reserve": (_INT, (_VOID_P, _VOID_P, _ERROR)),
    "fp_model_variant": (_INT, (_VOID_P,)),
    "fp_model_weight_bytes": (ctypes.c_int64, (_VOID_P,)),
    "fp_model_kv": (_INT, (_VOID_P, _INT, _HANDLE_OUT, ctypes.POINTER(ctypes.c_int64), _ERROR)),
    "fp_model_bind": (_INT, (_VOID_P, _VOID_P, _ERROR)),
    "fp_model_step": (_INT, (_VOID_P, _VOID_P, _ERROR)),
    "fp_model_logits": (_INT, (_VOID_P, _FLOAT_P, _INT, _FLOAT_P, _ERROR)),
    "fp_model_num_phases": (_INT, (_VOID_P,)),
    "fp_model_run_phase": (_INT, (_VOID_P, _INT, _ERROR)),
    "fp_model_take_times": (_INT, (_VOID_P, _VOID_P)),
    "fp_model_destroy": (None, (_VOID_P,)),
    "fp_paged_attention": (_INT, (_VOID_P, _VOID_P, _ERROR)),
    "fp_linear": (_INT, (_VOID_P, _INT, _INT, _VOID_P, ctypes.c_int64, _INT, _INT, _FLOAT_P, _INT, _FLOAT_P, _ERROR)),
    "fp_top_k": (_INT, (_FLOAT_P, _INT, _INT, _VOID_P, _FLOAT_P, _ERROR)),
}


@dataclass(frozen=True, slots=True)
class Native:
    """The loaded library. Made by `load_native`; lives as long as the process."""

    library: ctypes.CDLL
    path: Path
    version: str

    def call(self, name: str, *arguments: object) -> None:
        """Call a function that reports errors.

        Raises:
            KernelError: it refused; the message is the library's.
        """
        error = CError()
        status = getattr(self.library, name)(*arguments, ctypes.byref(error))
        if status != KernelStatus.OK:
            raise KernelError(error.text.decode(errors="replace"), status=KernelStatus(status))

    def supports(self, variant: Variant) -> bool:
        """Whether this machine runs `variant`."""
        return bool(self.library.fp_supports(variant))

    def best_variant(self) -> Variant:
        """What `AUTO` chooses here."""
        return Variant.AVX512_VNNI if self.supports(Variant.AVX512_VNNI) else Variant.AVX2

    def describe(self, *, threads: int, variant: Variant | None = None) -> str:
        """One phrase for the start line, the metric and benchmark rows."""
        plural = "" if threads == 1 else "s"
        return f"native {VARIANT_NAMES[variant or self.best_variant()]} {self.version} ({threads} thread{plural})"


class Closing:
    """What is closed by its owner, or at the end of a `with` block."""

    def close(self) -> None:
        """Free everything. Safe to repeat."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Ceilings(NamedTuple):
    """What a machine can do at most."""

    read_bytes: float
    """From memory, a second."""
    int8_operations: float
    """Multiplications and additions of int8 numbers, a second."""


class ThreadPool(Closing):
    """Threads that kernels share their work over. One a process; closed by its owner after the models that use it."""

    def __init__(self, native: Native, *, threads: int, spin_us: int = DEFAULT_SPIN_US) -> None:
        self.native = native
        self.threads = threads
        self.handle = ctypes.c_void_p()
        native.call("fp_pool_create", threads, spin_us, ctypes.byref(self.handle))

    def set_threads(self, threads: int) -> None:
        """Use that many from the next call on. Not while a call runs."""
        self.native.call("fp_pool_set_threads", self.handle, threads)
        self.threads = threads

    def ceilings(self) -> Ceilings:
        """Measured with these threads; takes seconds."""
        per_second = (ctypes.c_double * 2)()
        self.native.call("fp_pool_ceilings", self.handle, ctypes.byref(per_second))
        return Ceilings(*per_second)

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        if self.handle:
            self.native.library.fp_pool_destroy(self.handle)
            self.handle = ctypes.c_void_p()


def load_native(*, cache: Path | None = None, cpu_info: Path = CPU_INFO) -> Native | NativeUnavailable:
    """The library, built if need be, or why it cannot be had."""
    reason = _machine_problem(cpu_info)
    if reason is not None:
        return NativeUnavailable(reason)
    if not SOURCES.exists() and not SHIPPED.exists():
        return NativeUnavailable("this install was made without the native library: there was no compiler")
    try:
        # A wheel holds the sources too, and where it is installed there need be no compiler.
        return _load(SHIPPED if SHIPPED.exists() else build_library(cache))
    except KernelError as error:
        return NativeUnavailable(str(error))


def _machine_problem(cpu_info: Path) -> str | None:
    machine = platform.machine()
    if machine not in {"x86_64", "AMD64"} or platform.system() != "Linux":
        return f"the native kernels are for Linux on x86-64, this is {platform.system()} on {machine}"
    try:
        text = cpu_info.read_text()
    except OSError as error:
        return f"the CPU's features cannot be read: {error}"
    flags = next((line.split(":", 1)[1].split() for line in text.splitlines() if line.startswith("flags")), [])
    missing = sorted(NEEDED_FLAGS.difference(flags))
    return f"this CPU lacks {', '.join(missing)}" if missing else None


def _load(path: Path) -> Native:
    try:
        library = ctypes.CDLL(str(path))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(library, name)
            function.restype = result
            function.argtypes = arguments
    except (OSError, AttributeError) as error:
        raise KernelError(f"{path.name} cannot be loaded: {error}", status=KernelStatus.UNSUPPORTED) from error
    return Native(library=library, path=path, version=library.fp_version().decode())
