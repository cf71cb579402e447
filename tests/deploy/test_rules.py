"""Rules that Prometheus itself takes, each alert shown to fire and to keep quiet, each with its paragraph."""

import re
import shutil
import subprocess

import pytest
import yaml

from k8s.observability.alerts import ALERTS
from k8s.observability.recordings import RECORDINGS
from k8s.observability.write import K8S, outputs
from tests.support.rule_cases import CASES

RULES = K8S / "monitoring" / "rules.yaml"
needs_promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is missing: make setup-system")


def promtool(*arguments):
    return subprocess.run(["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60)


def test_what_is_committed_is_what_the_code_writes():
    for path, text in outputs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m k8s.observability.write"


def test_both_rule_files_hold_the_same_groups():
    custom = yaml.safe_load((K8S / "monitoring" / "prometheus-rule.yaml").read_text())

    assert custom["spec"] == yaml.safe_load(RULES.read_text())


@needs_promtool
def test_promtool_takes_the_rules():
    done = promtool("check", "rules", str(RULES))

    assert done.returncode == 0, done.stderr
    assert f"{len(ALERTS) + len(RECORDINGS)} rules found" in done.stdout


def unit_test(case, *, fires):
    alert = next(alert for alert in ALERTS if alert.name == case.alert)
    labels = {"namespace": "n"} if case.labels is None else case.labels
    expected = [{"exp_labels": {"severity": alert.severity.value, **labels}}]
    return {
        "interval": "1m",
        "input_series": [
            {"series": name, "values": values} for name, values in (case.firing if fires else case.quiet).items()
        ],
        "alert_rule_test": [{"eval_time": case.at, "alertname": case.alert, "exp_alerts": expected if fires else []}],
    }


def without_annotations(tmp_path):
    """The rules without annotations: promtool compares them too, and their text holds computed values."""
    document = yaml.safe_load(RULES.read_text())
    for group in document["groups"]:
        for entry in group["rules"]:
            entry.pop("annotations", None)
    path = tmp_path / "rules.yaml"
    path.write_text(yaml.safe_dump(document))
    return path


def run_cases(tmp_path, tests):
    path = tmp_path / "cases.yaml"
    document = {"rule_files": [str(without_annotations(tmp_path))], "evaluation_interval": "1m", "tests": tests}
    path.write_text(yaml.safe_dump(document))
    return promtool("test", "rules", str(path))


@needs_promtool
@pytest.mark.parametrize("fires", [True, False], ids=["fires", "quiet"])
def test_each_alert_fires_when_it_should_and_only_then(tmp_path, fires):
    done = run_cases(tmp_path, [unit_test(case, fires=fires) for case in CASES])

    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
def test_a_case_that_does_not_hold_is_found(tmp_path):
    wrong = unit_test(CASES[0], fires=True)
    wrong["input_series"] = unit_test(CASES[0], fires=False)["input_series"]

    assert run_cases(tmp_path, [wrong]).returncode != 0


def test_every_alert_has_cases():
    assert {case.alert for case in CASES} == {alert.name for alert in ALERTS}


def test_every_alert_links_to_a_paragraph_of_the_runbook():
    text = (K8S / "RUNBOOK.md").read_text(encoding="utf-8")
    paragraphs = dict(re.findall(r"^## (\w+)\n+(.+?)(?=\n## |\Z)", text, flags=re.MULTILINE | re.DOTALL))

    for alert in ALERTS:
        url = alert.document()["annotations"]["runbook_url"]
        assert url == f"k8s/RUNBOOK.md#{alert.name.lower()}"
        assert len(paragraphs[alert.name].split()) >= 25, alert.name
    assert set(paragraphs) == {alert.name for alert in ALERTS}
