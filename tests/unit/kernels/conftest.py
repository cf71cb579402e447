"""The native library and pools of threads, loaded once."""

import pytest

from kernels.native import Native, ThreadPool, load_native


@pytest.fixture(scope="session")
def native():
    loaded = load_native()
    assert isinstance(loaded, Native), loaded
    return loaded


@pytest.fixture(scope="session")
def pool(native):
    with ThreadPool(native, threads=2) as threads:
        yield threads


@pytest.fixture(scope="session")
def lone_pool(native):
    with ThreadPool(native, threads=1) as threads:
        yield threads
