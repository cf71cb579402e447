"""Many seeds: what they reached, and whether that was enough to count."""

import time
from collections import Counter
from dataclasses import dataclass, field

from protos.wire.errors import EngineError
from tests.simulation.checker import Checker
from tests.simulation.faults import Fault
from tests.simulation.life import Life

BREAKS = (AssertionError, EngineError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""How a run may end that does not end well."""
LEAST_OF_EACH_FAULT = 10
LEAST_FINISHED = 1000
LEAST_REOPENED = 50
LEAST_TOKENS_OF_A_SEED = 10
MOST_STILL_SEEDS = 0.001
"""Of all: where every worker was away for most of the run. They say nothing, good or bad."""
MOST_SUSPECTED_WITHOUT_GUILT = 0.005
"""Of all requests: bad luck, three deaths of a request that is alone."""


class MovedTooLittle(AssertionError):
    """No invariant was broken, and nearly nothing happened that could have broken one."""


def run_seed(seed: int) -> Life:
    """Run one seed to its end.

    Raises:
        Breach: an invariant does not hold.
        MovedTooLittle: the run says nothing.
    """
    life = Life(seed)
    checker: Checker = life.run()
    if checker.counts["tokens"] < LEAST_TOKENS_OF_A_SEED:
        raise MovedTooLittle(f"{checker.counts['tokens']} tokens, a run that counts has {LEAST_TOKENS_OF_A_SEED}")
    return life


@dataclass
class CampaignReport:
    """The sums of some seeds."""

    counts: Counter[str]
    broken: list[int]
    seeds: int
    simulated_s: float = 0.0
    still: list[int] = field(default_factory=list)
    """Seeds that moved too little; not among the others."""

    def add(self, life: Life) -> None:
        self.counts.update(life.checker.counts)
        self.counts["events"] += life.time.events
        self.simulated_s += life.time.now
        self.seeds += 1

    def too_little(self) -> list[str]:
        """What moved less than a campaign must; empty: it counts."""
        counts = self.counts
        missing = [f"fault {kind}" for kind in Fault if counts[f"fault {kind}"] < LEAST_OF_EACH_FAULT]
        missing += ["finished"] if counts["finished"] < LEAST_FINISHED else []
        missing += ["reopened"] if counts["reopened"] < LEAST_REOPENED else []
        missing += ["seeds"] if len(self.still) > MOST_STILL_SEEDS * self.seeds else []
        guiltless = counts["suspected without guilt"]
        missing += ["guilt"] if guiltless > MOST_SUSPECTED_WITHOUT_GUILT * counts["requests"] else []
        return missing

    def text(self, spent_s: float) -> str:
        lines = [f"{self.seeds} seeds, {self.simulated_s / 60:.0f} simulated minutes, {spent_s:.0f} s"]
        lines += [f"  {name:28} {count}" for name, count in sorted(self.counts.items())]
        lines += [f"seeds that moved too little to count: {self.still}"] if self.still else []
        lines += [f"broken seeds: {self.broken}" if self.broken else "no invariant broken"]
        lines += [f"moved too little of: {missing}"] if (missing := self.too_little()) else []
        return "\n".join(lines)


def run_until(report: CampaignReport, *, budget_s: float, first: int = 0) -> float:
    """Run seeds until the time is over; the seconds it took."""
    begun, seed = time.monotonic(), first
    while (spent := time.monotonic() - begun) < budget_s:
        try:
            report.add(run_seed(seed))
        except MovedTooLittle:
            report.still.append(seed)
        except BREAKS as error:
            report.broken.append(seed)
            print(f"seed {seed}: {error!r}; replay: make sim SEED={seed}", flush=True)
        seed += 1
    return spent
