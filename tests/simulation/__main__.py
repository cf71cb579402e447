"""Runs seeds until the time is over, or one: `python -m tests.simulation [--seed N] [--budget 12m] [--first N]`."""

import argparse
from collections import Counter

from tests.simulation.campaign import CampaignReport, run_seed, run_until

_UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(text: str) -> float:
    """`90s`, `12m`, `2h`."""
    return float(text[:-1]) * _UNITS[text[-1]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Deterministic simulation of scheduler and workers.")
    parser.add_argument("--seed", type=int, help="run this one, and let what it finds through")
    parser.add_argument("--budget", type=seconds, default=60.0, help="90s, 12m, 2h")
    parser.add_argument("--first", type=int, default=0, help="first seed")
    arguments = parser.parse_args()
    report = CampaignReport(Counter(), [], 0)
    if arguments.seed is not None:
        report.add(run_seed(arguments.seed))
        print(report.text(0.0))
        return 0
    spent = run_until(report, budget_s=arguments.budget, first=arguments.first)
    print(report.text(spent))
    return 1 if report.broken or report.too_little() else 0


if __name__ == "__main__":
    raise SystemExit(main())
