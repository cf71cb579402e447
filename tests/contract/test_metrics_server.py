import socket
import urllib.request

import pytest
from prometheus_client import Counter, Gauge
from prometheus_client.parser import text_string_to_metric_families

from protos.service.metrics import MetricsServer
from protos.wire.errors import CannotListen, PortInUse

PREFIX = "forwardplane_scheduler_"


@pytest.fixture
def server():
    made = MetricsServer()
    yield made
    made.stop()


def scrape(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        return {family.name: family for family in text_string_to_metric_families(answer.read().decode())}


def test_a_scrape_holds_our_metrics_and_the_standard_ones(server):
    Counter(PREFIX + "requests_total", "Requests.", registry=server.registry).inc(3)

    families = scrape(server.start("127.0.0.1", 0))

    assert families[PREFIX + "requests"].samples[0].value == 3
    for name in ("process_cpu_seconds", "process_resident_memory_bytes", "python_info", "python_gc_collections"):
        assert name in families


def test_two_servers_of_one_process_share_nothing(server):
    other = MetricsServer()
    Gauge(PREFIX + "pages", "Pages.", registry=other.registry)

    assert PREFIX + "pages" not in scrape(server.start("127.0.0.1", 0))


def test_a_stopped_server_frees_its_port(server):
    port = server.start("127.0.0.1", 0)
    server.stop()
    server.stop()

    assert server.start("127.0.0.1", port) == port


def test_a_port_in_use_is_named(server):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]

        with pytest.raises(PortInUse, match=f"port {port} is in use") as raised:
            server.start("127.0.0.1", port)

    assert raised.value.field == "port"


def test_an_address_of_another_machine_is_refused(server):
    with pytest.raises(CannotListen, match=r"192\.0\.2\.1"):
        server.start("192.0.2.1", 0)
