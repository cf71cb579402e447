"""The native library's threads, and setups by name."""

import pytest
import torch

from kernels.native import Native, ThreadPool, load_native
from tests.support.attention_setups import GPU_SETUPS, SETUPS, Setup


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def native_threads():
    loaded = load_native()
    assert isinstance(loaded, Native), loaded
    with ThreadPool(loaded, threads=2) as threads:
        yield threads


@pytest.fixture
def setup(request, native_threads):
    """By indirect parameter: the setup of that name."""
    prefill, decode, order, dtype, kv_dtype = (SETUPS | GPU_SETUPS)[request.param]
    return Setup(
        prefill=prefill,
        decode=decode,
        order=order,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=native_threads,
        device="cuda" if request.param in GPU_SETUPS else "cpu",
    )
