import subprocess
import sys

from protos.service.config import environment

LOST_CONNECTION = """
import asyncio
import grpc
from protos.service.channel import plan_channel
from protos.service.server import PortProfile, ServerOptions, bind_port, build_server

async def endless(request, context):
    yield b"x"
    await asyncio.Event().wait()

async def lose_one():
    server = build_server(options=ServerOptions(profile=PortProfile.PLAN))
    handlers = {"endless": grpc.unary_stream_rpc_method_handler(endless)}
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("t.S", handlers)])
    port = bind_port(server, "127.0.0.1", 0)
    await server.start()
    async with plan_channel(f"127.0.0.1:{port}") as channel:
        call = channel.unary_stream("/t.S/endless")(b"")
        await call.read()
        await server.stop(None)
        try:
            await call.read()
        except grpc.RpcError:
            print("lost")

async def main():
    for _ in range(5):
        await lose_one()

asyncio.run(main())
"""


def test_a_lost_connection_is_a_status_and_no_noise_in_child_processes(monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)

    done = subprocess.run(
        [sys.executable, "-c", LOST_CONNECTION],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )

    assert done.stdout == "lost\n" * 5
    assert "goaway" not in done.stderr.lower()
