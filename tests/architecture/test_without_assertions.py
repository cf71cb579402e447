"""S9: under `python -O`, which takes assertions of ours away, whatever was refused is still refused."""

import subprocess
import sys
from pathlib import Path

from tests.support.code_measures import ROOT

SUITES = (
    "tests/fuzz",
    "tests/unit/edge/test_caller_book.py",
    "tests/unit/edge/test_field_rules.py",
    "tests/unit/edge/test_field_walk.py",
    "tests/unit/edge/test_resume_tickets.py",
    "tests/unit/service/test_access.py",
    "tests/unit/service/test_gguf_header.py",
    "tests/unit/service/test_message_scan.py",
    "tests/unit/service/test_safetensors_header.py",
    "tests/unit/wire/test_validate.py",
)


def run_without_assertions(*paths: str | Path) -> subprocess.CompletedProcess[str]:
    """pytest itself checks assertions of test modules, with -O too; what it says of others is not of interest."""
    quiet = ("-W", "ignore::pytest.PytestConfigWarning", "-p", "no:xdist")
    command = [sys.executable, "-O", "-m", "pytest", "-q", "--tb=short", *quiet, *paths]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def test_s9_refusals_need_no_assertions():
    done = run_without_assertions(*SUITES)
    assert done.returncode == 0, done.stdout[-3000:]


def test_such_a_run_fails_where_a_test_does(tmp_path):
    case = tmp_path / "test_planted.py"
    case.write_text("def test_planted():\n    assert __debug__\n")
    assert run_without_assertions(case).returncode == 1
