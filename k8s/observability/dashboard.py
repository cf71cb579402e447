"""What a dashboard is, and its form in Grafana's JSON. Knows no metric.

Guards: every panel names its datasource by the variable, has an id, a place of its own and a unit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

COLUMNS = 24
HEIGHT = 8
_SCHEMA_VERSION = 39
_DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}


class Drawing(StrEnum):
    """Which of Grafana's panels draws."""

    LINES = "timeseries"
    NUMBER = "stat"
    HEATMAP = "heatmap"
    TABLE = "table"


class Unit(StrEnum):
    """How values are written; Grafana's names."""

    SECONDS = "s"
    BYTES = "bytes"
    SHARE = "percentunit"
    PER_SECOND = "ops"
    COUNT = "short"


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """One PromQL expression and what its series are called."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """One picture."""

    title: str
    help: str
    queries: tuple[Query, ...]
    unit: Unit = Unit.COUNT
    drawing: Drawing = Drawing.LINES
    width: int = 8

    def document(self, panel_id: int, *, x: int, y: int) -> dict[str, Any]:
        """As Grafana has it."""
        return {
            "id": panel_id,
            "type": self.drawing.value,
            "title": self.title,
            "description": self.help,
            "datasource": _DATASOURCE,
            "gridPos": {"h": HEIGHT, "w": self.width, "x": x, "y": y},
            "fieldConfig": {"defaults": {"unit": self.unit.value, **self._limits()}, "overrides": []},
            "options": self._options(),
            "targets": [self._target(query, chr(ord("A") + place)) for place, query in enumerate(self.queries)],
        }

    def _limits(self) -> dict[str, float]:
        return {"min": 0, "max": 1} if self.unit is Unit.SHARE else {}

    def _options(self) -> dict[str, Any]:
        if self.drawing is Drawing.LINES:
            return {"legend": {"displayMode": "list", "placement": "bottom", "showLegend": True}}
        if self.drawing is Drawing.NUMBER:
            return {"reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": False}, "colorMode": "value"}
        return {}

    def _target(self, query: Query, ref_id: str) -> dict[str, Any]:
        target = {"refId": ref_id, "datasource": _DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
        if self.drawing is Drawing.HEATMAP:
            return {**target, "format": "heatmap"}
        if self.drawing is Drawing.TABLE:
            return {**target, "format": "table", "instant": True}
        return target


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A headed group of panels."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """One dashboard."""

    slug: str
    title: str
    rows: tuple[Row, ...]

    def document(self) -> dict[str, Any]:
        """As Grafana imports it."""
        return {
            "uid": f"forwardplane-{self.slug}",
            "title": f"Forwardplane / {self.title}",
            "tags": ["forwardplane"],
            "schemaVersion": _SCHEMA_VERSION,
            "editable": False,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "",
            "templating": {"list": list(_variables())},
            "panels": list(self._panels()),
        }

    def _panels(self) -> Iterator[dict[str, Any]]:
        panel_id, y = 1, 0
        for row in self.rows:
            place = {"h": 1, "w": COLUMNS, "x": 0, "y": y}
            yield {
                "id": panel_id,
                "type": "row",
                "title": row.title,
                "gridPos": place,
                "collapsed": False,
                "panels": [],
            }
            panel_id, x, y = panel_id + 1, 0, y + 1
            for panel in row.panels:
                if x + panel.width > COLUMNS:
                    x, y = 0, y + HEIGHT
                yield panel.document(panel_id, x=x, y=y)
                panel_id, x = panel_id + 1, x + panel.width
            y += HEIGHT


def _variables() -> Iterator[dict[str, Any]]:
    yield {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus", "hide": 0}
    model = 'forwardplane_scheduler_model_info{namespace=~"$namespace"}'
    worker = 'forwardplane_scheduler_worker_up{namespace=~"$namespace"}'
    yield _variable("namespace", "label_values(forwardplane_scheduler_requests_running, namespace)")
    yield _variable("model", f"label_values({model}, name)")
    yield _variable("worker", f"label_values({worker}, worker)")


def _variable(name: str, query: str) -> dict[str, Any]:
    return {
        "name": name,
        "label": name.capitalize(),
        "type": "query",
        "datasource": _DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "refresh": 2,
        "includeAll": True,
        "multi": True,
        "allValue": ".*",
        "current": {"text": ["All"], "value": ["$__all"]},
        "hide": 0,
    }
