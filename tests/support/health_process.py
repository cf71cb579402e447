"""A process that serves health and reflection and nothing else, which a test may stop and kill.

In a call of reflection both sides write. As a program it takes the profile of its port, and whether that is hardened.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from protos.service.config import environment
from protos.service.server import HealthServer, PortProfile, ServerOptions, add_reflection, bind_port, build_server
from tests.support.code_measures import ROOT


async def serve(options: ServerOptions) -> None:
    server = build_server(options=options)
    HealthServer(()).add_to(server)
    add_reflection(server, ())
    print(bind_port(server, "127.0.0.1", 0), flush=True)
    await server.start()
    await server.wait_for_termination()


@contextmanager
def health_process(profile: PortProfile, *, hardened: bool = False) -> Iterator["tuple[subprocess.Popen[str], int]"]:
    """The process and its port. It may be stopped or gone at the end."""
    command = [sys.executable, "-m", __name__, profile.value, str(int(hardened))]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment(), cwd=ROOT) as child:
        assert child.stdout is not None
        yield child, int(child.stdout.readline())
        child.send_signal(signal.SIGCONT)
        child.terminate()


if __name__ == "__main__":
    asyncio.run(serve(ServerOptions(profile=PortProfile(sys.argv[1]), hardened=sys.argv[2] == "1")))
