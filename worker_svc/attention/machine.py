"""What attention back-ends this machine can have. Libraries are looked for at start, only those that may be used."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec

from kernels.errors import NativeUnavailable
from kernels.native import Native, load_native
from worker_svc.attention.flashinfer_wrappers import FlashInfer


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionMachine:
    """What was found."""

    absent: Mapping[str, str]
    """Why a back-end cannot be had, by name."""
    native: Native | None
    """The native library, if it was asked for and is there."""
    flashinfer: FlashInfer | None
    """The same of the package."""


def attention_machine(names: Collection[str]) -> AttentionMachine:
    """What there is of the back-ends `names`. Builds the native library if need be."""
    absent: dict[str, str] = {}
    native: Native | None = None
    flashinfer: FlashInfer | None = None
    if "native" in names:
        found = load_native()
        if isinstance(found, NativeUnavailable):
            absent["native"] = found.reason
        else:
            native = found
    if "flashinfer" in names:
        if find_spec("flashinfer") is None:
            absent["flashinfer"] = "the package flashinfer-python is not installed"
        else:
            flashinfer = _flashinfer()
    return AttentionMachine(absent=absent, native=native, flashinfer=flashinfer)


def _flashinfer() -> FlashInfer:
    package = import_module("flashinfer")
    return FlashInfer(
        prefill_wrapper=package.BatchPrefillWithPagedKVCacheWrapper,
        decode_wrapper=package.BatchDecodeWithPagedKVCacheWrapper,
    )
