import sys
from pathlib import Path

import pytest

from protos.service.ownership import assert_package_owner, foreign_owners
from protos.wire.errors import ForeignPackage

NAMES = ("protos", "kernels")


def install(folder: Path, distribution: str, *files: str):
    record = folder / f"{distribution}.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join(f"{file},sha256=x,1\n" for file in files))


def test_our_own_distributions_may_own_our_names(tmp_path):
    install(tmp_path, "forwardplane-0.1.0", "protos/__init__.py")
    install(tmp_path, "forwardplane_worker-0.1.0", "kernels/__init__.py")
    install(tmp_path, "numpy-2.0", "numpy/__init__.py", "numpy/kernels/x.py", "my_protos/x.py")

    assert foreign_owners(NAMES, [tmp_path], root=tmp_path) == []


@pytest.mark.parametrize("files", [("kernels/__init__.py",), ("a.py", "kernels/layer.py")])
def test_another_distribution_in_the_same_folder_is_named(tmp_path, files):
    install(tmp_path, "kernels-0.18.2", *files)

    assert foreign_owners(NAMES, [tmp_path], root=tmp_path) == [("kernels", "kernels")]


@pytest.mark.parametrize("place", ["kernels/__init__.py", "kernels.py"])
def test_a_package_elsewhere_on_the_path_is_named(tmp_path, place):
    root, other = tmp_path / "root", tmp_path / "other"
    for file in (root / "kernels/__init__.py", other / place):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()

    assert foreign_owners(NAMES, [root, other, root], root=root) == [("kernels", str(other / place))]


def test_a_folder_that_is_no_package_does_no_harm(tmp_path):
    (tmp_path / "other/kernels").mkdir(parents=True)

    assert foreign_owners(NAMES, [tmp_path / "other", tmp_path / "absent"], root=tmp_path) == []


def test_this_installation_is_ours():
    assert_package_owner()


def test_a_service_refuses_to_start_beside_another_owner(tmp_path, monkeypatch):
    install(tmp_path, "kernels-0.18.2", "kernels/__init__.py")
    monkeypatch.setattr(sys, "path", [*sys.path, str(tmp_path)])

    with pytest.raises(ForeignPackage, match="kernels is also installed by kernels") as raised:
        assert_package_owner()

    assert raised.value.field == "kernels"
