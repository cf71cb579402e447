"""Prometheus and Alertmanager beside `make serve`, with the rules that Kubernetes gets: `make observe`.

Needs the Debian packages prometheus and prometheus-alertmanager. Everything they write lies in a temporary folder.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

RULES = Path(__file__).resolve().parents[1] / "monitoring" / "rules.yaml"
PROGRAMS = ("prometheus", "prometheus-alertmanager")
_POLL_S = 0.2
_END_LIMIT_S = 10.0


def scrape_targets(*, edges: int, workers: int) -> dict[str, list[str]]:
    """Addresses of the metrics ports that `forwardplane serve` uses by default, by service."""
    return {
        "forwardplane-scheduler": ["127.0.0.1:9464", *(f"127.0.0.1:{9440 + edge}" for edge in range(edges))],
        "forwardplane-worker": [f"127.0.0.1:{9465 + worker}" for worker in range(workers)],
    }


def prometheus_config(
    targets: dict[str, list[str]], *, alertmanager: str | None, interval: str = "5s"
) -> dict[str, Any]:
    """Scrapes as a cluster would: every series carries a namespace."""
    jobs = [
        {"job_name": job, "static_configs": [{"targets": addresses, "labels": {"namespace": "local"}}]}
        for job, addresses in targets.items()
    ]
    config: dict[str, Any] = {
        "global": {"scrape_interval": interval, "evaluation_interval": interval},
        "rule_files": [str(RULES)],
        "scrape_configs": jobs,
    }
    if alertmanager is not None:
        config["alerting"] = {"alertmanagers": [{"static_configs": [{"targets": [alertmanager]}]}]}
    return config


ALERTMANAGER_CONFIG = {
    "route": {"receiver": "page", "group_by": ["alertname", "namespace"]},
    "receivers": [{"name": "page"}],
}
"""Alerts are shown on Alertmanager's page and sent nowhere."""


def commands(folder: Path, config: dict[str, Any], *, port: int, alertmanager_port: int | None) -> list[list[str]]:
    """Write the configuration below `folder`; the commands that run on it."""
    path = folder / "prometheus.yml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    storage = f"--storage.tsdb.path={folder / 'prometheus'}"
    made = [[PROGRAMS[0], f"--config.file={path}", storage, f"--web.listen-address=127.0.0.1:{port}"]]
    if alertmanager_port is not None:
        path = folder / "alertmanager.yml"
        path.write_text(yaml.safe_dump(ALERTMANAGER_CONFIG), encoding="utf-8")
        made.append(
            [
                *(PROGRAMS[1], f"--config.file={path}", f"--storage.path={folder / 'alertmanager'}"),
                *(f"--web.listen-address=127.0.0.1:{alertmanager_port}", "--cluster.listen-address="),
            ]
        )
    return made


def main(arguments: Sequence[str]) -> int:
    """Run both until Ctrl-C or until one of them ends."""
    parser = argparse.ArgumentParser(prog="observe", description="Prometheus and Alertmanager beside `make serve`.")
    parser.add_argument("--port", type=int, default=9090, help="Prometheus's port.")
    parser.add_argument("--alertmanager-port", type=int, default=9093, help="Alertmanager's port.")
    parser.add_argument("--edges", type=int, default=1, help="Edge processes to scrape.")
    parser.add_argument("--workers", type=int, default=1, help="Workers to scrape.")
    given = parser.parse_args(arguments)
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing:
        sys.stderr.write(f"observe: {', '.join(missing)} missing: apt-get install {' '.join(PROGRAMS)}\n")
        return 1
    targets = scrape_targets(edges=given.edges, workers=given.workers)
    config = prometheus_config(targets, alertmanager=f"127.0.0.1:{given.alertmanager_port}")
    with tempfile.TemporaryDirectory(prefix="forwardplane-observe-") as folder:
        started = commands(Path(folder), config, port=given.port, alertmanager_port=given.alertmanager_port)
        sys.stdout.write(
            f"Prometheus http://127.0.0.1:{given.port}/alerts  "
            f"Alertmanager http://127.0.0.1:{given.alertmanager_port}  (Ctrl-C ends both)\n"
        )
        sys.stdout.flush()
        return run(started)


def run(started: list[list[str]]) -> int:
    """Run all until one ends or Ctrl-C; 0 when they were told to."""
    processes = [subprocess.Popen(command) for command in started]
    try:
        while all(process.poll() is None for process in processes):
            time.sleep(_POLL_S)
        return 1
    except KeyboardInterrupt:
        return 0
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(_END_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
