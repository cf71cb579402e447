"""Who may import whom: the contracts of pyproject.toml, run as `make check` runs them."""

import subprocess
import sys
from pathlib import Path

from tests.support.code_measures import ROOT


def test_every_import_contract_is_kept():
    command = Path(sys.executable).with_name("lint-imports")

    done = subprocess.run([command, "--no-cache"], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)

    assert done.returncode == 0, done.stdout + done.stderr
    assert " 0 broken" in done.stdout
