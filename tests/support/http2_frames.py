"""HTTP/2 by hand, for clients that no library would let misbehave so."""

import socket

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = 0, 1, 2, 3, 4, 6, 7, 8, 9
ENHANCE_YOUR_CALM = 11


def frame(kind: int, payload: bytes = b"", *, stream: int = 0) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + payload


def opened(port: int, *, sends: bytes = PREFACE + frame(SETTINGS)) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=30)
    connection.sendall(sends)
    return connection


def frames_until_closed(connection: socket.socket) -> list[tuple[int, bytes]]:
    """Kinds and payloads of all frames that the server still sends."""
    data = b""
    try:
        while part := connection.recv(1 << 16):
            data += part
    except ConnectionError:
        pass
    found = []
    while len(data) >= 9:
        size = int.from_bytes(data[:3], "big")
        found.append((data[3], data[9 : 9 + size]))
        data = data[9 + size :]
    return found
