"""S7, S10: hostile model files get a typed error without a path, in 2 s of a processor and 256 MB of the reader."""

import json
import subprocess
import sys

import pytest

from tests.support.code_measures import ROOT
from tests.support.hostile_files import KINDS

MOST_S = 2.0
MOST_BYTES = 256 << 20
HARMLESS = {"millions of empty texts", "millions of texts"}
"""Good files, though large."""


@pytest.mark.parametrize("kind", KINDS)
def test_s10_hostile_files_are_refused_in_time_and_memory(kind, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.hostile_files", kind, tmp_path],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    answers = [json.loads(line) for line in done.stdout.splitlines()]

    assert len(answers) >= 7
    for answer in answers:
        name = answer["name"]
        refused = answer["outcome"] in ("InvalidModelFile", "InvalidRequest")
        assert refused or name in HARMLESS or name.startswith("damaged"), answer
        assert answer["seconds"] < MOST_S, answer
        assert answer["peak"] < MOST_BYTES, answer
        assert str(tmp_path) not in answer["message"]
        assert len(answer["message"]) < 400, answer
