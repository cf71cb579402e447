"""A made-up core as a process of its own: `python -m tests.support.fake_core_process SOCKET STEP_S`."""

import asyncio
import sys
from pathlib import Path

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from tests.support.fake_core import FakeCore


async def serve(path: Path, step_s: float) -> None:
    ids = [97 + index % 26 for index in range(8192)]
    model = CoreModel(context_tokens=8192, logits_width=300, max_logprobs=20, serving=True)
    core = FakeCore(path, step_s=step_s, script=lambda _: ids, model=model)
    await core.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(Path(sys.argv[1]), float(sys.argv[2])))
