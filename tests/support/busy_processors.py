"""Other work on this machine: as many processes for each processor as asked for, each of which never rests."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

_BURN = "while True: pass"


@contextlib.contextmanager
def busy_processors(times: int) -> Iterator[None]:
    """Until the context ends, `times` processes want each processor."""
    burners = [subprocess.Popen([sys.executable, "-c", _BURN]) for _ in range(times * (os.cpu_count() or 1))]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
