"""Fuzzes one target by coverage: `python -m tests.fuzz.by_coverage plan -max_total_time=600`, with libFuzzer's flags.

Needs the package atheris, which is not among the development tools: there are builds of it for some platforms only.
What it finds lies in `build/fuzz`.
"""

import random
import sys
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["protos", "scheduler_svc", "worker_svc"]):
    from tests.fuzz.targets import TARGETS

CORPUS = Path(__file__).parent / "corpus"
FOUND = Path("build/fuzz")
FLAGS = ("-max_len=65536", "-rss_limit_mb=400", "-timeout=2", "-print_final_stats=1")


def main(name: str, *flags: str) -> None:
    """Does not return: atheris ends the process, with 77 where an input failed."""
    target = TARGETS[name]

    def mutate(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        made = target.change(data, rng) if rng.random() < 0.6 else atheris.Mutate(data, len(data))
        return made[:max_size]

    folder = FOUND / "corpus" / name
    folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds):
        (folder / f"seed{number}").write_bytes(data)
    kept = [str(CORPUS / name)] if (CORPUS / name).is_dir() else []
    arguments = [sys.argv[0], *FLAGS, f"-artifact_prefix={FOUND}/{name}-", *flags, str(folder), *kept]
    atheris.Setup(arguments, target.run, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:])
