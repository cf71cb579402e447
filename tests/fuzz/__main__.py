"""Fuzzes the borders: `python -m tests.fuzz --budget 60s [--target plan] [--seed 7]`, or one input: `--input FILE`.

The budget is shared by the targets, or each has `--executions N`. Inputs that fail are written to `build/fuzz`.
`tests.fuzz.by_coverage` does the same with atheris.
"""

import argparse
import hashlib
import time
from pathlib import Path

from tests.fuzz.driver import CORPUS, Findings, Fuzzing
from tests.fuzz.targets import TARGETS
from tests.simulation.__main__ import seconds

FAILED = Path("build/fuzz")
MOST_KEPT_BYTES = 1500


def written(name: str, data: bytes) -> Path:
    """Where an input lies from now on."""
    FAILED.mkdir(parents=True, exist_ok=True)
    path = FAILED / f"{name}-{hashlib.sha256(data).hexdigest()[:12]}"
    path.write_bytes(data)
    return path


def keep(name: str, findings: Findings, most: int) -> None:
    """Short inputs of so many outcomes join those that every run begins with."""
    folder = CORPUS / name
    folder.mkdir(parents=True, exist_ok=True)
    short = [data for data in findings.outcomes.values() if len(data) <= MOST_KEPT_BYTES]
    for data in short[:: max(1, len(short) // most)][:most]:
        (folder / hashlib.sha256(data).hexdigest()[:12]).write_bytes(data)


def report(name: str, findings: Findings, spent_s: float) -> bool:
    """Say what one target gave; whether nothing failed."""
    print(findings.text(name, spent_s), flush=True)
    for data, told in findings.failed[:3]:
        print(told, f"again: python -m tests.fuzz --target {name} --input {written(name, data)}", sep="\n", flush=True)
    return not findings.failed


def fuzz_borders(
    names: list[str], budget_s: float, *, seed: int, executions: int | None = None, most_kept: int = 0
) -> bool:
    """Each target for its share of the budget, or so many executions; whether nothing failed."""
    holds = True
    for name in names:
        begun = time.monotonic()
        fuzzing = Fuzzing(name, seed=seed)
        if executions is None:
            fuzzing.run_for(budget_s / len(names))
        else:
            fuzzing.run(executions)
        if most_kept:
            keep(name, fuzzing.findings, most_kept)
        holds &= report(name, fuzzing.findings, time.monotonic() - begun)
    return holds


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the borders for as long as it is given.")
    parser.add_argument("--budget", type=seconds, default=60.0, help="90s, 12m, 2h")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--input", type=Path, help="run this one only")
    parser.add_argument("--executions", type=int, help="of each target, in place of a budget")
    parser.add_argument("--keep", type=int, default=0, help="add inputs of so many outcomes to the corpus")
    arguments = parser.parse_args()
    names = arguments.target or list(TARGETS)
    if arguments.input is not None:
        print(TARGETS[names[0]].run(arguments.input.read_bytes()))
        return 0
    print(f"seed {arguments.seed}", flush=True)
    holds = fuzz_borders(
        names, arguments.budget, seed=arguments.seed, executions=arguments.executions, most_kept=arguments.keep
    )
    return 0 if holds else 1


if __name__ == "__main__":
    raise SystemExit(main())
