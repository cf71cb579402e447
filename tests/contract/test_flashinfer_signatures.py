"""flashinfer's signatures as committed are those of the package, where it is there to be asked."""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest

from tests.contract.make_flashinfer_signatures import CALLS, signatures, version
from tests.support.fake_flashinfer import SIGNATURES, real_signature


def installed() -> Path | None:
    """The installed package's folder; it is read, never imported, which would want CUDA."""
    try:
        return Path(str(distribution("flashinfer-python").locate_file("flashinfer")))
    except PackageNotFoundError:
        return None


def test_every_call_is_held():
    assert set(SIGNATURES["calls"]) == set(CALLS)
    assert SIGNATURES["version"] == "0.6.18"
    assert list(real_signature("BatchDecodeWithPagedKVCacheWrapper.plan").parameters)[:3] == [
        "indptr",
        "indices",
        "last_page_len",
    ]


def test_what_the_library_does_not_take_is_refused():
    with pytest.raises(TypeError, match="head_size"):
        real_signature("BatchDecodeWithPagedKVCacheWrapper.plan").bind(1, 2, 3, 4, 5, 6, 7, head_size=64)


@pytest.mark.gpu
def test_the_installed_package_still_declares_them():
    package = installed()
    assert package is not None, "flashinfer-python is not installed"
    assert version(package) == SIGNATURES["version"], "make the signatures anew and read what changed"
    assert signatures(package) == SIGNATURES["calls"]
