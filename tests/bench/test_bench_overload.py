"""Overload: an open-loop sweep from half to three times the capacity that was found first, in one run over gRPC.

The real model with fast numerics; requests of random length with a deadline; the load is a process of its own on the
same two cores. Goodput: tokens a second of requests that finished within their deadline, while the load is steady.

    python -m pytest -m bench -s tests/bench/test_bench_overload.py
"""

import json
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from rich.console import Console
from rich.table import Table

from tests.bench.overload_client import OUTPUT_TOKENS
from tests.bench.peers import ROOT, LinePeer
from tests.support.served import served_for_figures

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1800)]
DEADLINE_S, RAMP_S, STEADY_S, CLOSED_CALLERS, CLOSED_S = 8.0, 10.0, 20.0, 24, 15.0
LOADS = (0.5, 1.0, 1.5, 2.0, 3.0)
LEAST_GOODPUT, MOST_EMPTY_S, MOST_REFUSAL_S = 0.90, 30.0, 0.010

Order = dict[str, float]


class Measured(NamedTuple):
    """One load of the sweep."""

    load: float
    offered: int
    goodput: float
    """Tokens/s."""
    finished: int
    late: int
    refusals_s: list[float]
    hinted: float
    """Share of refusals with a hint."""
    empty_s: float


def goodput(records: list[dict[str, Any]], begin: float, end: float) -> float:
    """Requests that finished in [begin, end); a stream that ends OK was within its deadline, which the server keeps."""
    return sum(r["tokens"] for r in records if r["code"] == "OK" and begin <= r["ended"] < end) / (end - begin)


def measure(client: LinePeer, load: float, capacity: float, seed: int) -> Measured:
    order: Order = {"rate": load * capacity, "seconds": RAMP_S + STEADY_S, "deadline_s": DEADLINE_S, "seed": seed}
    answer: Any = client.ask({**order})
    records = answer["records"]
    refusals = [record for record in records if record["code"] == "QUEUE_FULL"]
    return Measured(
        load=load,
        offered=len(records),
        goodput=goodput(records, RAMP_S, RAMP_S + STEADY_S),
        finished=sum(record["code"] == "OK" for record in records),
        late=sum(record["code"] not in ("OK", "QUEUE_FULL") for record in records),
        refusals_s=[record["refused_s"][0] for record in refusals],
        hinted=statistics.fmean(record["hint_s"] is not None for record in refusals) if refusals else 1.0,
        empty_s=answer["empty_s"],
    )


def report(sweep: list[Measured], capacity: float) -> None:
    best = max(measured.goodput for measured in sweep)
    table = Table(
        "load", "offered/s", "goodput tok/s", "of best", "in time", "late", "refused", "hinted", "refusal ms", "empty s"
    )
    for m in sweep:
        p50, p99, most = np.percentile(m.refusals_s or [0.0], (50, 99, 100)) * 1e3
        table.add_row(
            f"{m.load}",
            f"{m.load * capacity:.1f}",
            f"{m.goodput:.0f}",
            f"{m.goodput / best:.2f}",
            str(m.finished),
            str(m.late),
            str(len(m.refusals_s)),
            f"{m.hinted:.0%}",
            f"{p50:.1f} / {p99:.1f} / {most:.1f}",
            f"{m.empty_s:.1f}",
        )
    Console(width=140).print(table, "refusal ms: p50 / p99 / max")


def follow_hints(client: LinePeer, capacity: float) -> None:
    """Three deadlines' worth of requests at once, each of which comes again when it is told to."""
    count = int(3 * DEADLINE_S * capacity)
    answer: Any = client.ask({"burst": count, "deadline_s": DEADLINE_S, "seed": 99})
    records = answer["records"]
    tries = [len(record["refused_s"]) + 1 for record in records]
    got_in = sum(record["code"] == "OK" for record in records)
    last_s = max(record["ended"] for record in records)
    refused = [tried for tried in tries if tried > 1]
    print(
        f"hints: of {count} requests at once {got_in} got in by obeying them; of the {len(refused)} refused "
        f"{sum(tried == 2 for tried in refused)} at the second try; tries mean {statistics.fmean(tries):.1f}, "
        f"most {max(tries)}; the last ended after {last_s:.0f} s, {count / capacity:.0f} s at capacity"
    )
    assert got_in >= 0.9 * count


def test_goodput_beyond_capacity() -> None:
    with served_for_figures(numerics="fast") as server:
        client = LinePeer(Path(sys.executable), Path(__file__).parent / "overload_client.py", server.target)
        try:
            closed: Order = {"closed": CLOSED_CALLERS, "seconds": CLOSED_S, "deadline_s": 60.0, "seed": 0}
            client.ask({**closed, "seconds": 5.0})
            answer: Any = client.ask({**closed})
            tokens_s = goodput(answer["records"], 0.0, CLOSED_S)
            capacity = tokens_s / statistics.fmean(OUTPUT_TOKENS)
            print(f"\ncapacity: {tokens_s:.0f} tokens/s, {capacity:.1f} requests/s with {CLOSED_CALLERS} callers")
            sweep = [measure(client, load, capacity, seed=index) for index, load in enumerate(LOADS)]
            report(sweep, capacity)
            follow_hints(client, capacity)
        finally:
            client.close()
    (ROOT / "build").mkdir(exist_ok=True)
    (ROOT / "build" / "bench_overload.json").write_text(json.dumps([measured._asdict() for measured in sweep]))
    check(sweep)


def check(sweep: list[Measured]) -> None:
    last, best = sweep[-1], max(measured.goodput for measured in sweep)
    assert last.goodput >= LEAST_GOODPUT * best
    assert all(measured.hinted == 1.0 for measured in sweep)
    assert all(measured.empty_s <= MOST_EMPTY_S for measured in sweep)
    refusals = [seconds for measured in sweep for seconds in measured.refusals_s]
    assert np.percentile(refusals, 99) <= MOST_REFUSAL_S
