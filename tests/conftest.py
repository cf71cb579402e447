"""What holds for every test: imports from the root, no network but loopback, nothing left behind."""

import sys
from pathlib import Path

from hypothesis import settings

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

settings.register_profile("ci", deadline=None, database=None, print_blob=True)
settings.load_profile("ci")
