"""Nobody else installs packages under our names, where Python would mix them with ours."""

import sys
from pathlib import Path

from protos.service.ownership import foreign_owners
from tests.support.code_measures import PACKAGES, ROOT


def test_no_other_distribution_owns_a_name_of_ours():
    names = (*PACKAGES, "tests")

    assert foreign_owners(names, [Path(entry or ".") for entry in sys.path], root=ROOT) == []
