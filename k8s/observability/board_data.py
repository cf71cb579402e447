"""Writes what each board's panels show of a Prometheus, for the viewer that draws pictures of boards.

`python -m k8s.observability.board_data PORT MINUTES FOLDER`, by hand: see `k8s/dashboards/pictures/README.md`.
"""

import json
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from k8s.observability.boards import BOARDS

_STEP_S = 2
_VARIABLES = ("namespace", "model", "worker")
_WINDOW = "20s"


def main(arguments: Sequence[str]) -> int:
    """Write one file a board."""
    port, minutes, folder = int(arguments[0]), float(arguments[1]), Path(arguments[2])
    end = time.time()
    span = (end - 60 * minutes, end)
    folder.mkdir(exist_ok=True)
    for board in BOARDS:
        document = board.document()
        shown = {panel["id"]: list(_rows(panel, port, span)) for panel in document["panels"]}
        limits = {"from": span[0] * 1000, "to": span[1] * 1000}
        data = {"board": document, "results": shown, "range": limits}
        (folder / f"{board.slug}.js").write_text(f"window.DATA = {json.dumps(data)};", encoding="utf-8")
    return 0


def _rows(panel: dict[str, Any], port: int, span: tuple[float, float]) -> Iterator[dict[str, Any]]:
    """The series of a panel, as Prometheus answers, with their legends filled in."""
    for target in panel.get("targets", ()):
        for series in _ask(port, _filled(target["expr"]), span):
            values = [None if text == "NaN" else float(text) for _, text in series["values"]]
            if all(value is None for value in values):
                continue
            metric = series["metric"]
            times = [at * 1000 for at, _ in series["values"]]
            named = {
                "refId": target["refId"],
                "name": _legend(target["legendFormat"], metric) or panel["title"],
                "labels": metric,
            }
            yield {**named, "times": times, "values": values}


def _legend(text: str, labels: dict[str, str]) -> str:
    for name in re.findall(r"\{\{(\w+)\}\}", text):
        text = text.replace(f"{{{{{name}}}}}", labels.get(name, ""))
    return text


def _ask(port: int, expr: str, span: tuple[float, float]) -> list[dict[str, Any]]:
    query = urllib.parse.urlencode({"query": expr, "start": span[0], "end": span[1], "step": _STEP_S})
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/api/v1/query_range?{query}", timeout=20) as answer:
        found: list[dict[str, Any]] = json.load(answer)["data"]["result"]
    return found


def _filled(expr: str) -> str:
    """The expression with the board's variables at All."""
    for variable in _VARIABLES:
        expr = expr.replace(f"${variable}", ".*")
    return expr.replace("$__rate_interval", _WINDOW)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
