"""Makes bucket_traces.json: sizes of the forwards of three loads, from recordings of `serve --device simulated`.

python -m tests.golden.make_bucket_traces
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from protos.client.bucket_sources import Observed, add_plans
from protos.client.serve_files import ServeFiles
from tests.support.served import served

LOADS = {
    "chat": ("--rate", "6", "--prompt-tokens", "lognormal:200:0.8", "--output-tokens", "lognormal:60:0.5"),
    "documents": ("--concurrency", "24", "--prompt-tokens", "16-1024", "--output-tokens", "32"),
    "short": ("--rate", "25", "--prompt-tokens", "4-60", "--output-tokens", "8-24"),
}
REQUESTS = "120"
TARGET = Path(__file__).with_name("bucket_traces.json")


def recorded(path: Path, load: tuple[str, ...]) -> dict[str, dict[str, int]]:
    with served(device="simulated", numerics="fast", files=ServeFiles(record=path)) as server:
        command = [sys.executable, "-m", "protos.client.command", "bench", "--target", server.target]
        subprocess.run([*command, "--requests", REQUESTS, *load], check=True)
    observed = Observed()
    add_plans(observed, path)
    return {
        phase.name.lower(): {str(size): found[size] for size in sorted(found)}
        for phase, found in sorted(observed.forwards.items())
    }


def main() -> None:
    traces = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, load in LOADS.items():
            origin = f"serve --device simulated --record FILE; bench --requests {REQUESTS} {' '.join(load)}"
            traces[name] = {"origin": origin, "forwards": recorded(Path(folder) / f"{name}.fprec", load)}
    TARGET.write_text(json.dumps({"script": "tests/golden/make_bucket_traces.py", "traces": traces}, indent=1) + "\n")


if __name__ == "__main__":
    main()
