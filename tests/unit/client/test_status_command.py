"""What `status` and the demo's summary say of graphs: replays, padding beside real tokens, every reason of a miss."""

from protos.client.demo_command import AnswerFigures, summary
from protos.client.load_messages import GraphUse, Load, WorkerLoad
from protos.client.messages import Usage
from protos.client.status_command import graph_table, worker_table
from protos.wire.enums import GraphPhase, GraphRefusal, WorkerState


def worker(name: str, *graphs: GraphUse) -> WorkerLoad:
    return WorkerLoad(
        name=name,
        state=WorkerState.SERVING,
        device="cpu",
        dtype="float32",
        numerics="fast",
        kernels="torch",
        requests_running=1,
        pages=10,
        pages_used=2,
        plans_in_flight=0,
        plans=9,
        plan_rows=18,
        plan_bytes=900,
        graphs=graphs,
    )


DECODE = GraphUse(
    phase=GraphPhase.DECODE,
    replays=6,
    real_tokens=15,
    padded_tokens=5,
    misses=((GraphRefusal.NOT_CAPTURED_YET, 1), (GraphRefusal.OVER_MAX_ROWS, 2)),
    live=2,
    dead=1,
    planned=4,
    graph_bytes=3_200_000,
    capture_ms=1250,
)
PREFILL = GraphUse(phase=GraphPhase.PREFILL, misses=((GraphRefusal.NOT_CAPTURED_YET, 4),))
LOAD = Load(
    requests_running=1,
    requests_waiting=0,
    kv_usage=0.2,
    workers=(worker("a", DECODE, PREFILL), worker("b")),
)


def cells(table):
    return list(zip(*(column.cells for column in table.columns), strict=True))


def test_a_line_for_each_worker_and_phase_that_ran():
    assert [row[0] for row in cells(worker_table(LOAD))] == ["a", "b"]
    assert cells(graph_table(LOAD)) == [
        (
            "a",
            "decode",
            "2 of 4, 1 failed; 3.2 MB, 1.2 s",
            "6",
            "5 (25%) beside 15 real",
            "3",
            "over_max_rows 2, not_captured_yet 1",
        ),
        ("a", "prefill", "", "0", "", "4", "not_captured_yet 4"),
    ]


def test_the_demo_sums_up_all_workers():
    figures = AnswerFigures(first_token_s=0.1, duration_s=1.0, usage=Usage(3, 0, 10))
    lines = dict(cells(summary(figures, 2.0, LOAD.workers)))
    assert lines["captured graphs"] == "2 of 4, 1 failed; 3.2 MB, 1.2 s"
    assert lines["graph replays"] == "6"
    assert lines["graph misses"] == "7: not_captured_yet 5, over_max_rows 2"
    assert lines["padded tokens"] == "5 (25%) beside 15 real"
    assert lines["plans"] == "18"


def test_a_server_that_ran_nothing_has_no_padding():
    figures = AnswerFigures(first_token_s=0.1, duration_s=1.0, usage=Usage(3, 0, 10))
    lines = dict(cells(summary(figures, 2.0, (worker("b"),))))
    assert lines["captured graphs"] == "none"
    assert (lines["graph replays"], lines["graph misses"], lines["padded tokens"]) == ("0", "0", "0")
    assert (
        graph_table(Load(requests_running=0, requests_waiting=0, kv_usage=0.0, workers=(worker("b"),))).row_count == 0
    )
