"""Every query of boards and rules parses and names registered metrics, with labels they have, counters as rates."""

import json

import pytest

from k8s.observability.alerts import ALERTS
from k8s.observability.boards import BOARDS
from k8s.observability.recordings import RECORDINGS
from tests.support.manifests import K8S
from tests.support.promql_check import problems, registered


@pytest.fixture(scope="module")
def known():
    return registered()


def panels(board):
    return [panel for row in board.rows for panel in row.panels]


QUERIES = [
    pytest.param(query.expr, query.legend, id=f"{board.slug}: {panel.title}: {query.legend}")
    for board in BOARDS
    for panel in panels(board)
    for query in panel.queries
]
RULES = [pytest.param(rule.expr, id=getattr(rule, "name", "") or rule.record) for rule in (*ALERTS, *RECORDINGS)]


@pytest.mark.parametrize(("expr", "legend"), QUERIES)
def test_a_panels_query_is_right(known, expr, legend):
    assert problems(expr, known, legend) == []


@pytest.mark.parametrize("expr", RULES)
def test_a_rules_expression_is_right(known, expr):
    assert problems(expr, known) == []


def test_every_metric_of_ours_is_shown_somewhere(known):
    text = " ".join(query.expr for board in BOARDS for panel in panels(board) for query in panel.queries)
    text += " ".join(rule.expr for rule in (*ALERTS, *RECORDINGS))
    families = {
        name.removesuffix("_bucket").removesuffix("_sum").removesuffix("_count")
        for name in known.series
        if name.startswith("forwardplane_")
    }

    assert {name for name in families if name not in text} <= NOT_SHOWN


NOT_SHOWN = {
    "forwardplane_scheduler_step_prediction_ratio",  # its mean error is
    "forwardplane_worker_weights_info",  # the scheduler's model_info names the weights
}


MUTANTS = [
    ("renamed metric", "sum(rate(forwardplane_scheduler_request_total[5m]))", ""),
    ("counter without rate()", "sum by (code) (forwardplane_scheduler_requests_total)", ""),
    ("histogram without rate()", "sum by (le) (forwardplane_scheduler_queue_seconds_bucket)", ""),
    ("gauge as a rate", "sum(rate(forwardplane_scheduler_requests_running[5m]))", ""),
    ("dropped le", "histogram_quantile(0.9, sum(rate(forwardplane_scheduler_queue_seconds_bucket[5m])))", ""),
    ("dropped label", "sum(rate(forwardplane_scheduler_requests_total[5m]))", "{{code}}"),
    ("label that is not there", "sum by (tenant) (rate(forwardplane_scheduler_requests_total[5m]))", ""),
    ("matcher that is not there", 'rate(forwardplane_scheduler_requests_total{tenant="x"}[5m])', ""),
    ("counter by its family's name", "rate(forwardplane_scheduler_requests[5m])", ""),
    ("worse than nothing", "sum by (code (x)", ""),
]


@pytest.mark.parametrize(("what", "expr", "legend"), MUTANTS)
def test_the_checker_finds(known, what, expr, legend):
    assert problems(expr, known, legend)


def test_the_checker_finds_each_metric_that_boards_use_once_it_is_renamed(known):
    used = [name for name in known.series if any(name in param.values[0] for param in QUERIES)]
    assert len(used) > 50
    for name in used:
        renamed = known.without(name)
        assert any(problems(param.values[0], renamed, param.values[1]) for param in QUERIES), name


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board.slug)
def test_a_board_is_whole(board):
    document = json.loads((K8S / "dashboards" / f"{board.slug}.json").read_text(encoding="utf-8"))
    shown = [panel for panel in document["panels"] if panel["type"] != "row"]

    assert [item["name"] for item in document["templating"]["list"]] == ["datasource", "namespace", "model", "worker"]
    ids = [panel["id"] for panel in document["panels"]]
    assert len(set(ids)) == len(ids)
    taken = set()
    for panel in shown:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert place["x"] + place["w"] <= 24
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["description"].endswith(".")
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_the_variables_ask_for_metrics_that_exist(known):
    for variable in BOARDS[0].document()["templating"]["list"][1:]:
        metric, _, label = variable["definition"].removeprefix("label_values(").removesuffix(")").rpartition(", ")
        assert problems(metric, known, f"{{{{{label}}}}}") == []
