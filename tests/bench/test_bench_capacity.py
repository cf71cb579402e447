"""`plan-capacity` beside real runs that it was not fitted on: output tokens/s and the median time between tokens.

Two services on this machine take turns, so that neighbours disturb both alike: the recorded one gets the loads that the
cost is fitted on, the other one loads of other concurrencies and lengths. Goal: both figures within 15 %.

    python -m pytest -m bench -s tests/bench/test_bench_capacity.py
"""

import json
import subprocess
import sys

import pytest
from rich.console import Console
from rich.table import Table

from protos.client.serve_files import ServeFiles
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1200)]
FITTED = ((1, "32", "48"), (4, "64-192", "64"), (8, "32-128", "48"), (14, "64", "64"))
"""(concurrency, prompt tokens, output tokens)"""
OTHERS = ((2, "128", "64"), (6, "160", "48"), (11, "32-96", "64"))
ROUNDS, SECONDS = 3, 8
COMMAND = (sys.executable, "-m", "protos.client.command")


def bench(target, load, path, *, seed):
    concurrency, prompt, output = load
    flags = ("--concurrency", str(concurrency), "--prompt-tokens", prompt, "--output-tokens", output)
    limits = ("--duration-s", str(SECONDS), "--seed", str(seed), "--json", str(path))
    subprocess.run([*COMMAND, "bench", "--target", target, *flags, *limits], check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())


def planned(sources, load, path):
    concurrency, prompt, output = load
    flags = ("--concurrency", str(concurrency), "--prompt-tokens", prompt, "--output-tokens", output)
    promises = ("--inter-token-ms", "60000", "--first-token-ms", "600000", "--workers", "1")
    command = [*COMMAND, "plan-capacity", *map(str, sources), *flags, *promises, "--json", str(path)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return json.loads(path.read_text())["chosen"]


def measured(runs):
    """Of several rounds of one load: means weighted by nothing, as each ran equally long."""
    rates = [run["throughput"]["steady_output_tokens_per_s"] for run in runs]
    gaps = [run["latencies"]["inter_token_s"]["p50"] for run in runs]
    return sum(rates) / len(rates), sum(gaps) / len(gaps)


def runs_in_turns(fit_target, other_target, folder):
    """The figures that the fit may use, and those of each other load."""
    fitted, others = [], {load: [] for load in OTHERS}
    for turn in range(ROUNDS):
        for index, load in enumerate(FITTED):
            fitted.append(folder / f"fit-{turn}-{index}.json")
            bench(fit_target, load, fitted[-1], seed=100 * turn + index)
            if index < len(OTHERS):
                figures = bench(other_target, OTHERS[index], folder / "other.json", seed=1000 + 100 * turn + index)
                others[OTHERS[index]].append(figures)
    return fitted, others


def test_predictions_beside_real_runs(tmp_path):
    recording = tmp_path / "fit.fprec"
    with (
        served_for_figures(numerics="fast", files=ServeFiles(record=recording)) as fit_server,
        served_for_figures(numerics="fast") as other_server,
    ):
        fitted, others = runs_in_turns(fit_server.target, other_server.target, tmp_path)
    table = Table("load", "learnt from", "tokens/s real", "predicted", "", "ms a token real", "predicted", "")
    for load, runs in others.items():
        rate, gap = measured(runs)
        for name, sources in (("recording", [recording]), ("bench figures", fitted)):
            found = planned(sources, load, tmp_path / "plan.json")
            predicted_rate, predicted_gap = found["output_tokens_per_s"], found["inter_token_p50_s"]
            table.add_row(
                f"{load[0]} at once, {load[1]} + {load[2]}",
                name,
                f"{rate:.1f}",
                f"{predicted_rate:.1f}",
                f"{predicted_rate / rate - 1:+.0%}",
                f"{gap * 1e3:.2f}",
                f"{predicted_gap * 1e3:.2f}",
                f"{predicted_gap / gap - 1:+.0%}",
            )
    Console(width=140).print(table)
