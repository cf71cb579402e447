"""Attention back-ends as workers use them, by name: each with the forms of pool that it may meet."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from kernels.native import ThreadPool
from tests.support.attention_cases import Heads, make_pool
from tests.support.fake_flashinfer import FAKE_FLASHINFER
from worker_svc.attention.base import AttentionBackend
from worker_svc.attention.flashinfer_wrappers import FlashInfer
from worker_svc.attention.machine import attention_machine
from worker_svc.attention.registry import AttentionTools, attention_pair
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.token_to_kv_pool import TokenToKVPool


@dataclass(frozen=True, kw_only=True)
class Setup:
    """A pair of back-ends and the pool they share."""

    prefill: str
    decode: str
    order: KVOrder
    dtype: torch.dtype
    """Of queries, keys and values."""
    kv_dtype: torch.dtype
    threads: ThreadPool
    device: str = "cpu"

    def pool(self, fill: float, **options: Any) -> TokenToKVPool:
        """As `make_pool`."""
        return make_pool(fill, order=self.order, dtype=self.kv_dtype, device=self.device, **options)

    def backend(self, pool: TokenToKVPool, heads: Heads | None = None) -> AttentionBackend:
        shape = heads or Heads()
        tools = AttentionTools(
            num_q_heads=shape.queries, dtype=self.dtype, threads=self.threads, flashinfer=_flashinfer(self.device)
        )
        return attention_pair(self.prefill, self.decode, pool, tools)

    @property
    def tolerance(self) -> float:
        return 3e-6 if self.dtype == torch.float32 else 0.02


def _flashinfer(device: str) -> FlashInfer:
    """The package where there is a GPU for it."""
    if device == "cpu":
        return FAKE_FLASHINFER
    machine = attention_machine({"flashinfer"})
    assert machine.flashinfer is not None, machine.absent
    return machine.flashinfer


HALF, FLOAT, BRAIN = torch.float16, torch.float32, torch.bfloat16
SETUPS = {
    "torch": ("torch", "torch", KVOrder.HEADS, FLOAT, FLOAT),
    "torch in bfloat16": ("torch", "torch", KVOrder.HEADS, BRAIN, BRAIN),
    "torch on native half pages": ("torch", "torch", KVOrder.NATIVE, FLOAT, HALF),
    "torch on NHD": ("torch", "torch", KVOrder.NHD, FLOAT, FLOAT),
    "torch on HND": ("torch", "torch", KVOrder.HND, FLOAT, FLOAT),
    "tiled": ("tiled", "tiled", KVOrder.HEADS, FLOAT, FLOAT),
    "tiled on native pages": ("tiled", "tiled", KVOrder.NATIVE, FLOAT, FLOAT),
    "native": ("native", "native", KVOrder.NATIVE, FLOAT, HALF),
    "native on float pages": ("native", "native", KVOrder.NATIVE, FLOAT, FLOAT),
    "native in bfloat16": ("native", "native", KVOrder.NATIVE, BRAIN, HALF),
    "flashinfer's calls": ("flashinfer", "flashinfer", KVOrder.NHD, HALF, HALF),
    "flashinfer's calls on HND": ("flashinfer", "flashinfer", KVOrder.HND, BRAIN, BRAIN),
    "flashinfer's calls, then torch": ("flashinfer", "torch", KVOrder.NHD, BRAIN, BRAIN),
    "torch, then native": ("torch", "native", KVOrder.NATIVE, FLOAT, HALF),
    "native, then torch": ("native", "torch", KVOrder.NATIVE, FLOAT, HALF),
    "tiled, then torch": ("tiled", "torch", KVOrder.HEADS, FLOAT, FLOAT),
}
GPU_SETUPS = {
    "torch on a GPU": ("torch", "torch", KVOrder.HEADS, BRAIN, BRAIN),
    "flashinfer": ("flashinfer", "flashinfer", KVOrder.NHD, HALF, HALF),
    "flashinfer on HND": ("flashinfer", "flashinfer", KVOrder.HND, BRAIN, BRAIN),
    "flashinfer, then torch": ("flashinfer", "torch", KVOrder.NHD, BRAIN, BRAIN),
    "torch, then flashinfer": ("torch", "flashinfer", KVOrder.NHD, HALF, HALF),
}
KEEPS_BITS = ("tiled", "tiled on native pages", "native", "native on float pages")


def names_of(*, without: Collection[str] = ()) -> list[Any]:
    """Parameters for the fixture `setup`: every setup that uses none of the back-ends `without`, GPUs' by marker."""
    on_gpus = {name: pytest.param(name, marks=pytest.mark.gpu) for name in GPU_SETUPS}
    every = {name: name for name in SETUPS} | on_gpus
    return [given for name, given in every.items() if not set(without) & set((SETUPS | GPU_SETUPS)[name][:2])]
