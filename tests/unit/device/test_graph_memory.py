import logging

import pytest

from protos.wire.enums import GraphPhase
from worker_svc.device.graph_memory import GraphMemoryStore, graph_fingerprint
from worker_svc.runners.executor_settings import ExecutorSettings
from worker_svc.runners.graph_memory_need import fingerprint_of, known_graph_bytes
from worker_svc.runners.graph_settings import GraphSettings

MEASURED = {GraphPhase.DECODE: 1000, GraphPhase.PREFILL: 234}


def test_a_measurement_comes_back_for_its_fingerprint_only(tmp_path):
    store = GraphMemoryStore(tmp_path / "deep" / "graphs.json")
    assert store.read("a") == {}
    store.write("a", MEASURED)
    store.write("b", {GraphPhase.DECODE: 5})
    assert store.read("a") == MEASURED
    assert GraphMemoryStore(tmp_path / "deep" / "graphs.json").read("b") == {GraphPhase.DECODE: 5}
    assert store.read("c") == {}
    store.write("a", {})
    assert store.read("a") == {}
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["graphs.json"]


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "null", '{"a": 1}', "\xff"),
        *('{"a": {"DECODE": -1}}', '{"a": {"DECODE": true}}', '{"a": {"DECODE": 1000000000000000}}'),
    ],
)
def test_a_damaged_file_is_no_measurement(tmp_path, text, caplog):
    path = tmp_path / "graphs.json"
    path.write_bytes(text.encode("latin-1"))
    store = GraphMemoryStore(path)
    with caplog.at_level(logging.WARNING):
        assert store.read("a") == {}
    assert "cannot be read" in caplog.text
    store.write("a", MEASURED)
    assert store.read("a") == MEASURED


def test_a_file_that_cannot_be_written_is_logged_and_no_more(tmp_path, caplog):
    (tmp_path / "file").touch()
    store = GraphMemoryStore(tmp_path / "file" / "graphs.json")
    with caplog.at_level(logging.WARNING):
        store.write("a", MEASURED)
    assert "not stored" in caplog.text


def test_a_store_that_fails_leaves_no_file(tmp_path):
    (tmp_path / "taken").mkdir()
    GraphMemoryStore(tmp_path / "taken").write("a", MEASURED)
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


def test_old_measurements_are_dropped(tmp_path):
    store = GraphMemoryStore(tmp_path / "graphs.json")
    for number in range(70):
        store.write(str(number), {GraphPhase.DECODE: number})
    assert store.read("5") == {}
    assert store.read("69") == {GraphPhase.DECODE: 69}


def test_a_fingerprint_names_every_fact():
    known = graph_fingerprint(weights="w", buckets=(1, 2))
    assert known == graph_fingerprint(buckets=(1, 2), weights="w")
    assert known != graph_fingerprint(weights="w", buckets=(1, 2, 4))


def test_a_worker_finds_what_the_last_one_like_it_measured(tmp_path):
    settings = ExecutorSettings(graphs=GraphSettings(graph="all", graph_memory_file=str(tmp_path / "graphs.json")))
    assert known_graph_bytes(settings, weights="w") == 0
    GraphMemoryStore(tmp_path / "graphs.json").write(fingerprint_of(settings, weights="w"), MEASURED)
    assert known_graph_bytes(settings, weights="w") == 1234
    assert known_graph_bytes(settings, weights="other") == 0
    assert known_graph_bytes(ExecutorSettings(), weights="w") == 0
