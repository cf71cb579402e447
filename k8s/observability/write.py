"""Writes rules and dashboards beside the manifests: `python -m k8s.observability.write`.

`outputs` says what every file should hold, so a test can ask whether what is committed is current.
"""

import json
import sys
from pathlib import Path
from typing import Any

import yaml

from k8s.observability.alerts import ALERTS
from k8s.observability.boards import BOARDS
from k8s.observability.recordings import RECORDINGS
from k8s.observability.rule import rule_groups

K8S = Path(__file__).resolve().parents[1]
_NOTE = "# Written by `python -m k8s.observability.write`; do not edit.\n"


def outputs() -> dict[Path, str]:
    """The text of each generated file, by its path."""
    groups = rule_groups(RECORDINGS, ALERTS)
    custom = {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "forwardplane"},
        "spec": groups,
    }
    files = {
        K8S / "monitoring" / "rules.yaml": _yaml(groups),
        K8S / "monitoring" / "prometheus-rule.yaml": _yaml(custom),
    }
    for board in BOARDS:
        files[K8S / "dashboards" / f"{board.slug}.json"] = json.dumps(board.document(), indent=2) + "\n"
    return files


def main() -> int:
    """Write every file that is not current."""
    for path, text in outputs().items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(K8S.parent)}\n")
    return 0


def _yaml(document: dict[str, Any]) -> str:
    return _NOTE + yaml.safe_dump(document, sort_keys=False, width=120)


if __name__ == "__main__":
    sys.exit(main())
