"""Runs a target on changed inputs. What gives a new outcome joins the inputs that are changed further.

Guards: the same seed and number of runs, the same inputs. An input that fails is kept and its traceback told.
"""

import random
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
MOST_S = 2.0
"""Of a processor, for one input."""
_MAX_OUTCOMES = 10_000
"""Remembered with an input each; names in a refusal make any number of them."""
_MAX_INPUTS = 5000
_CLOCK_EVERY = 64


def kept_inputs(name: str) -> list[bytes]:
    """Inputs that showed something once."""
    return [path.read_bytes() for path in sorted((CORPUS / name).glob("*"))]


def peak_mib() -> int:
    """Most memory that this process has held."""
    status = Path("/proc/self/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmHWM:")).split()[1]) >> 10


@dataclass
class Findings:
    """What one target's runs gave."""

    executions: int = 0
    outcomes: dict[str, bytes] = field(default_factory=dict)
    """The first input of each."""
    failed: list[tuple[bytes, str]] = field(default_factory=list)
    """Input and traceback."""

    def text(self, name: str, seconds: float) -> str:
        rate = self.executions / max(seconds, 1e-9)
        return (
            f"{name}: {self.executions} executions in {seconds:.0f} s ({rate:.0f}/s), {len(self.outcomes)} outcomes, "
            f"{len(self.failed)} failures, peak {peak_mib()} MiB"
        )


class Fuzzing:
    """One target's inputs and what they gave."""

    def __init__(self, name: str, *, seed: int = 0, target: Target | None = None) -> None:
        self._target = target or TARGETS[name]
        self._rng = random.Random(seed)
        self.findings = Findings()
        self._inputs: list[bytes] = []
        for data in (*self._target.seeds, *kept_inputs(name)):
            self._inputs.append(data)
            self.run_one(data)

    def run(self, executions: int) -> None:
        """So many changed inputs."""
        self._run_while(lambda done: done < executions)

    def run_for(self, seconds: float) -> None:
        """For so long, or until something failed."""
        end = time.monotonic() + seconds
        self._run_while(lambda done: done % _CLOCK_EVERY or (time.monotonic() < end and not self.findings.failed))

    def _run_while(self, goes_on: Callable[[int], object]) -> None:
        done = 0
        while goes_on(done):
            self.run_one(self.changed())
            done += 1

    def changed(self) -> bytes:
        """One to four changes of a known input."""
        data = self._rng.choice(self._inputs)
        for _ in range(self._rng.choice((1, 1, 2, 4))):
            data = self._target.change(data, self._rng)
        return data

    def run_one(self, data: bytes) -> None:
        """Run one input."""
        self.findings.executions += 1
        begun = time.process_time()
        try:
            outcome = self._target.run(data)
        except Exception:  # noqa: BLE001 - whatever it is, it is what is looked for
            self.findings.failed.append((data, traceback.format_exc()))
            return
        if time.process_time() - begun > MOST_S:
            self.findings.failed.append((data, f"took more than {MOST_S:g} s"))
        if outcome not in self.findings.outcomes and len(self.findings.outcomes) < _MAX_OUTCOMES:
            self.findings.outcomes[outcome] = data
            if len(self._inputs) < _MAX_INPUTS:
                self._inputs.append(data)
