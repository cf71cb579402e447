"""S3, S15, S17: attacks on the callers' port of a real edge process, beside which a well-behaved client goes on."""

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import grpc
import pytest

from protos.client.generation_client import GenerationClient
from protos.client.messages import GenerateOptions
from protos.forwardplane.v1 import generate_pb2 as pb
from protos.wire.errors import EngineError
from tests.support.attacked_edge import Edge, attacked_edge, wait_for
from tests.support.grpc_attacks import GENERATE, GENERATE_ONCE, UNFINISHED_FRAME, drip
from tests.support.http2_frames import (
    CONTINUATION,
    DATA,
    ENHANCE_YOUR_CALM,
    GOAWAY,
    HEADERS,
    PING,
    PREFACE,
    PRIORITY,
    RST_STREAM,
    SETTINGS,
    WINDOW_UPDATE,
    frame,
    frames_until_closed,
    opened,
)

MORE_RSS = 300 << 20
"""Much, since gRPC itself holds up to 3,000 calls that nobody has taken yet."""


@dataclass
class GoodClient:
    answered: int = 0
    problems: list[EngineError] = field(default_factory=list)


@pytest.fixture(scope="module")
def edge(tmp_path_factory) -> Iterator[Edge]:
    with attacked_edge(tmp_path_factory.mktemp("attacked"), log_level="warning") as edge:
        yield edge


@contextlib.contextmanager
def well_behaved(edge: Edge) -> Iterator[GoodClient]:
    """A client that streams one small answer after the other while the block runs; none may fail."""
    good, is_over = GoodClient(), threading.Event()

    def ask() -> None:
        with GenerationClient(edge.target, timeout_s=20) as client:
            while not is_over.is_set():
                try:
                    chunks = list(client.stream("abc", GenerateOptions(max_tokens=4, ignore_eos=True)))
                except EngineError as error:
                    good.problems.append(error)
                    return
                good.answered += sum(len(chunk.token_ids) for chunk in chunks) == 4
                time.sleep(0.002)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield good
        before = good.answered
        end = time.monotonic() + 20
        while good.answered < before + 5 and not good.problems and time.monotonic() < end:
            time.sleep(0.01)
    finally:
        is_over.set()
        thread.join()
    assert good.problems == []
    assert good.answered >= before + 5
    wait_for(lambda: check_resources(edge))


def check_resources(edge: Edge) -> None:
    assert edge.process.memory_info().rss < edge.rss + MORE_RSS
    assert edge.process.num_fds() < edge.descriptors + 20


def code_of(call) -> str:
    try:
        call.result(timeout=30)
    except grpc.RpcError as error:
        return error.code().name
    return "OK"


def test_s15_a_compressed_bomb_is_refused_before_it_is_inflated(edge):
    bomb = bytes(64 << 20)
    with well_behaved(edge), edge.channel(compression=grpc.Compression.Gzip) as channel:
        for _ in range(3):
            assert code_of(channel.unary_unary(GENERATE_ONCE).future(bomb, timeout=20)) in (
                "UNIMPLEMENTED",
                "RESOURCE_EXHAUSTED",
            )


def embedded(count: int) -> bytes:
    """One chat of so many empty messages."""
    chat = b"\x0a\x00" * count
    chat_field = pb.GenerateRequest.DESCRIPTOR.fields_by_name["chat"].number
    request = bytes([chat_field << 3 | 2]) + varint(len(chat)) + chat
    return b"\x0a" + varint(len(request)) + request


def varint(number: int) -> bytes:
    made = b""
    while number > 0x7F:
        made += bytes([number & 0x7F | 0x80])
        number >>= 7
    return made + bytes([number])


MOST = (2 << 20) - 32


@pytest.mark.parametrize("count", [65, 1000, MOST])
@pytest.mark.parametrize("body", [lambda count: b"\x0a\x00" * count, embedded, lambda count: b"\x08\x01" * count])
def test_s3_s15_many_small_fields_cost_little(edge, count, body):
    """4 MiB of two-byte sub-messages would be two million objects, 320 MB a call."""
    with well_behaved(edge), edge.channel() as channel:
        calls = [channel.unary_unary(GENERATE_ONCE).future(body(count), timeout=20) for _ in range(4)]
        assert {code_of(call) for call in calls} == {"INVALID_ARGUMENT"}


def test_s17_rapid_reset_of_thousands_of_calls(edge):
    request = pb.GenerateRequest(text="abc" * 20).SerializeToString()
    resets = 0
    with well_behaved(edge) as good, edge.channel() as channel:
        method = channel.unary_stream(GENERATE)
        end = time.monotonic() + 1.5
        before = good.answered
        while time.monotonic() < end:
            method(request, timeout=20).cancel()
            resets += 1
        assert good.answered > before
    assert resets > 500


def test_s17_a_connection_that_wastes_its_calls_is_closed_and_another_is_not(edge):
    """Both come from the same address."""
    request = pb.GenerateRequest(text="abc").SerializeToString()
    before, end = edge.closed_connections, time.monotonic() + 20
    with well_behaved(edge) as good, edge.channel() as channel:
        method = channel.unary_stream(GENERATE)
        while edge.closed_connections == before and time.monotonic() < end:
            for _ in range(50):
                method(request, timeout=20).cancel()
        assert edge.closed_connections > before
        assert good.problems == []


def test_s15_slow_frames_and_half_open_connections_hold_nobody_up(edge):
    """100 connections each that never say a word, stop within a frame's head, or never finish their headers."""
    begun = (
        b"",
        UNFINISHED_FRAME,
        PREFACE + frame(SETTINGS) + frame(HEADERS, b"\x82", stream=1),
    )
    with well_behaved(edge), contextlib.ExitStack() as held:
        connections = [held.enter_context(opened(edge.port, sends=one)) for one in begun for _ in range(100)]
        for _ in range(5):
            drip(connections[100:])
            time.sleep(0.1)


OPEN_HEADERS = frame(HEADERS, b"\x82", stream=1)
FLOODS = {
    "settings": frame(SETTINGS, b"\0\4\0\0\xff\xff"),
    "empty data": OPEN_HEADERS + frame(DATA, stream=1),
    "priorities": frame(PRIORITY, b"\0\0\0\0\x10", stream=3),
    "continuations": frame(CONTINUATION, b"\x40\1a" + b"\x7f" * 100, stream=1),
    "empty continuations": frame(CONTINUATION, stream=1),
    "resets of nothing": frame(RST_STREAM, bytes(4), stream=5),
    "window updates": frame(WINDOW_UPDATE, b"\x7f\xff\xff\xff"),
    "frames of no kind": frame(0x7B, b"x" * 64),
    "a frame without an end": b"\xff\xff\xff" + bytes(6),
}


def send_what_fits(connection, content):
    """Whether or not it is still open."""
    connection.settimeout(0.01)
    with contextlib.suppress(OSError):
        connection.send(content)


@pytest.mark.parametrize("name", FLOODS)
def test_s17_a_flood_of_frames_holds_nobody_up(edge, name):
    """Behind headers that never end, where the kind of frame belongs there."""
    begun = PREFACE + frame(SETTINGS) + (OPEN_HEADERS if "continuations" in name else b"")
    with well_behaved(edge), contextlib.ExitStack() as held:
        connections = [held.enter_context(opened(edge.port, sends=begun)) for _ in range(4)]
        end = time.monotonic() + 0.5
        for connection in itertools.cycle(connections):
            send_what_fits(connection, FLOODS[name] * 200)
            if time.monotonic() > end:
                break


def test_s15_a_client_that_pings_too_often_is_sent_away(edge):
    with well_behaved(edge), opened(edge.port) as connection:
        for number in range(20):
            with contextlib.suppress(OSError):
                connection.send(frame(PING, number.to_bytes(8, "big")))
            time.sleep(0.005)
        away = [payload for kind, payload in frames_until_closed(connection) if kind == GOAWAY]
    assert ENHANCE_YOUR_CALM in [int.from_bytes(payload[4:8], "big") for payload in away]


def test_s15_headers_beyond_the_cap_end_the_call_only(edge):
    with well_behaved(edge), edge.channel() as channel:
        call = channel.unary_unary(GENERATE_ONCE).future(b"", timeout=20, metadata=(("x-long", "a" * (1 << 16)),))
        assert code_of(call) in ("RESOURCE_EXHAUSTED", "INTERNAL", "UNAVAILABLE")
