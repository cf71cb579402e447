"""Figures of ours beside a peer's: how they alternate, what neighbours used meanwhile, table, JSON and PNG.

Figures of earlier calls stay in the file until the same row is measured again, so that a long comparison may be run in
parts.
"""

import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import matplotlib as mpl
import psutil
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from tests.bench.peers import ROOT

FOLDER = ROOT / "build"


@dataclass(frozen=True, kw_only=True)
class Figures:
    """One row of the table."""

    model: str
    what: str
    peer: str
    ours: float
    theirs: float
    unit: str
    """Larger is better, but for `ms`."""
    kernels: str
    """What computed ours."""
    neighbours: float
    """Percent of the machine's CPU that processes other than ours and the peer's used."""
    goal: float | None = None
    """Least ratio that is asked for; None: none is."""

    @property
    def ratio(self) -> float:
        """Above 1: ours is better."""
        return self.theirs / self.ours if self.unit == "ms" else self.ours / self.theirs

    @property
    def key(self) -> tuple[str, str, str]:
        """What a later figure replaces."""
        return self.model, self.what, self.peer


class Neighbours:
    """CPU use of everything that is not of this measurement, since it was made."""

    def __init__(self) -> None:
        self._since, self._own_before, self._all_before = time.monotonic(), _own_seconds(), _all_seconds()

    def percent(self) -> float:
        """Of the whole machine."""
        others = _all_seconds() - self._all_before - (_own_seconds() - self._own_before)
        return max(0.0, 100 * others / (time.monotonic() - self._since) / (psutil.cpu_count() or 1))


def _all_seconds() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def _own_seconds() -> float:
    own = psutil.Process()
    return sum(sum(process.cpu_times()[:2]) for process in (own, *own.children(recursive=True)))


def alternate(rounds: int, theirs: Callable[[], list[float]], ours: Callable[[], list[float]]) -> tuple[float, float]:
    """(median of the peer's, median of ours): each goes first in every other round."""
    taken: tuple[list[float], list[float]] = ([], [])
    for index in range(rounds):
        for which, measure in ((0, theirs), (1, ours))[:: -1 if index % 2 else 1]:
            taken[which].extend(measure())
    return statistics.median(taken[0]), statistics.median(taken[1])


def report(found: list[Figures], *, console: Console) -> None:
    """Print what was found; keep it in build/bench_peers.json beside what earlier calls found, and draw all of it."""
    console.print(table_of(found))
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / "bench_peers.json"
    kept = merged([Figures(**row) for row in json.loads(path.read_text())["rows"]] if path.exists() else [], found)
    path.write_text(json.dumps({"rows": [asdict(row) for row in kept]}, indent=2))
    draw(kept)


def merged(before: list[Figures], found: list[Figures]) -> list[Figures]:
    """Every row once, in the order first seen, the later figure of each."""
    return list({row.key: row for row in (*before, *found)}.values())


def table_of(found: list[Figures]) -> Table:
    """For people."""
    table = Table("model", "what", "peer", "ours", "theirs", "unit", "ratio", "goal", "neighbours' CPU", "kernels")
    for row in found:
        goal = "" if row.goal is None else f"≥ {row.goal:.1f}"
        cells = (f"{row.ours:.1f}", f"{row.theirs:.1f}", row.unit, f"{row.ratio:.2f}", goal, f"{row.neighbours:.0f} %")
        table.add_row(row.model, row.what, row.peer, *cells, row.kernels)
    return table


def draw(rows: list[Figures]) -> None:
    """build/bench_peers.png: a bar a ratio, and its goal."""
    mpl.use("Agg")
    figure = Figure(figsize=(9, 0.35 * len(rows) + 1.5), layout="constrained")
    axes = figure.subplots()
    names = [f"{row.what} ({row.peer}, {row.model})" for row in reversed(rows)]
    axes.barh(names, [row.ratio for row in reversed(rows)])
    goals = [(row.goal, place) for place, row in enumerate(reversed(rows)) if row.goal is not None]
    axes.plot([goal for goal, _ in goals], [place for _, place in goals], "k|", markersize=10, label="goal")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.set_xlabel("ratio to the peer; above 1: ours is better")
    axes.legend()
    figure.savefig(FOLDER / "bench_peers.png", dpi=110)
