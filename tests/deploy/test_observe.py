"""What `make observe` starts: configurations that the programs take, on the ports that `make serve` uses."""

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from k8s.observability import observe
from protos.client.serve_command import ServePorts


def test_it_scrapes_what_serve_exports():
    ports = ServePorts()

    assert observe.scrape_targets(edges=2, workers=2) == {
        "forwardplane-scheduler": [
            *(
                f"127.0.0.1:{port}"
                for port in (ports.metrics_port, ports.edge_metrics_port, ports.edge_metrics_port + 1)
            )
        ],
        "forwardplane-worker": [f"127.0.0.1:{ports.worker_metrics_port + worker}" for worker in range(2)],
    }


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: make setup-system")
def test_prometheus_takes_its_configuration(tmp_path):
    config = observe.prometheus_config(observe.scrape_targets(edges=1, workers=1), alertmanager="127.0.0.1:9093")
    observe.commands(tmp_path, config, port=9090, alertmanager_port=9093)

    done = subprocess.run(
        ["promtool", "check", "config", str(tmp_path / "prometheus.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.skipif(shutil.which("amtool") is None, reason="amtool is missing: make setup-system")
def test_alertmanager_takes_its_configuration(tmp_path):
    observe.commands(tmp_path, {}, port=9090, alertmanager_port=9093)

    done = subprocess.run(
        ["amtool", "check-config", str(tmp_path / "alertmanager.yml")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_without_the_programs_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setattr(observe.shutil, "which", lambda program: None)

    assert observe.main([]) == 1
    assert "apt-get install prometheus prometheus-alertmanager" in capsys.readouterr().err


def test_when_one_ends_the_others_are_ended(tmp_path):
    mark = tmp_path / "ended"
    patient = ["sh", "-c", f"trap 'touch {mark}; exit 0' TERM; while :; do sleep 0.05; done"]

    assert observe.run([patient, ["sleep", "0.3"]]) == 1
    assert mark.exists()


def test_the_rules_it_loads_are_those_of_the_manifests():
    assert Path(observe.__file__).parents[1] / "monitoring" / "rules.yaml" == observe.RULES
    assert yaml.safe_load(observe.RULES.read_text())["groups"]
