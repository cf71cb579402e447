"""What a rule is, and its form in a Prometheus rules file. Knows no metric."""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

RUNBOOK = "k8s/RUNBOOK.md"


class Severity(StrEnum):
    """Who is told."""

    CRITICAL = "critical"
    """Somebody, at once: callers are hurt."""
    WARNING = "warning"
    """Whoever is at work."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingRule:
    """A series that Prometheus keeps: `level:metric:operation`."""

    record: str
    expr: str

    def document(self) -> dict[str, Any]:
        """As a rules file has it."""
        return {"record": self.record, "expr": self.expr}


@dataclass(frozen=True, slots=True, kw_only=True)
class Alert:
    """Something an operator must know."""

    name: str
    expr: str
    lasts: str
    """How long the condition must hold, as Prometheus writes durations."""
    severity: Severity
    summary: str

    @property
    def anchor(self) -> str:
        """Its paragraph of the runbook, as GitHub makes anchors of headings."""
        return self.name.lower()

    def document(self) -> dict[str, Any]:
        """As a rules file has it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.lasts,
            "labels": {"severity": self.severity.value},
            "annotations": {"summary": self.summary, "runbook_url": f"{RUNBOOK}#{self.anchor}"},
        }


def rule_groups(recordings: tuple[RecordingRule, ...], alerts: tuple[Alert, ...]) -> dict[str, Any]:
    """The content of a rules file, which is also the `spec` of a PrometheusRule."""
    return {
        "groups": [
            {"name": "forwardplane.recordings", "rules": [rule.document() for rule in recordings]},
            {"name": "forwardplane.alerts", "rules": [alert.document() for alert in alerts]},
        ]
    }
