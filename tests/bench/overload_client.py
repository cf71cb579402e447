"""The load of the overload bench, in a process of its own: it shares no interpreter with a server.

Reads one JSON order a line on stdin, answers one JSON line on stdout. Orders: `{"closed": n, "seconds": s}` keeps n
requests running; `{"rate": r, "seconds": s}` starts r requests a second, whatever becomes of them; `{"burst": n}`
starts n at once and lets each come again when the refusal's hint says so. Answers hold one record a request.
"""

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field

import grpc

from protos.forwardplane.v1.generate_pb2 import GenerateRequest, GetLoadRequest, TokenPrompt
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.forwardplane.v1.sampling_pb2 import SamplingParameters, StopParameters
from protos.service.channel import caller_channel
from protos.service.status import from_rpc_error

PROMPT_TOKENS, OUTPUT_TOKENS = (48, 160), (16, 48)
MOST_TRIES = 50


@dataclass
class Record:
    """One request, times in seconds since the order's beginning."""

    began: float
    ended: float = 0.0
    tokens: int = 0
    code: str = ""
    """`OK`, or why it ended."""
    hint_s: float | None = None
    refused_s: list[float] = field(default_factory=list)
    """How long each refusal took."""


class Load:
    """Requests of one order."""

    def __init__(self, stub: GenerationServiceStub, *, deadline_s: float, seed: int) -> None:
        self._stub = stub
        self._deadline_s = deadline_s
        self._random = random.Random(seed)
        self._zero = time.monotonic()
        self.records: list[Record] = []

    def now(self) -> float:
        return time.monotonic() - self._zero

    async def one(self) -> Record:
        """Send a request of random length and read it to its end."""
        draw = self._random
        prompt = TokenPrompt(ids=[draw.randint(100, 40_000) for _ in range(draw.randint(*PROMPT_TOKENS))])
        stop = StopParameters(max_tokens=draw.randint(*OUTPUT_TOKENS), ignore_eos=True)
        request = GenerateRequest(tokens=prompt, stop=stop, sampling=SamplingParameters(temperature=0))
        record = Record(began=self.now())
        self.records.append(record)
        await self._send(request, record)
        return record

    async def one_that_comes_again(self) -> None:
        """As `one`, but a refusal's hint is obeyed."""
        record = await self.one()
        while record.code == "QUEUE_FULL" and len(record.refused_s) < MOST_TRIES:
            await asyncio.sleep(record.hint_s or 1.0)
            again = await self.one()
            self.records.remove(again)
            again.refused_s = record.refused_s + again.refused_s
            again.began = record.began
            self.records[self.records.index(record)] = again
            record = again

    async def closed(self, count: int, seconds: float) -> None:
        async def caller() -> None:
            while self.now() < seconds:
                await self.one()

        await asyncio.gather(*(caller() for _ in range(count)))

    async def open(self, rate: float, seconds: float) -> None:
        running = []
        due = 0.0
        while (due := due + self._random.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, due - self.now()))
            running.append(asyncio.create_task(self.one()))
        await asyncio.gather(*running)

    async def burst(self, count: int) -> None:
        await asyncio.gather(*(self.one_that_comes_again() for _ in range(count)))

    async def _send(self, request: GenerateRequest, record: Record) -> None:
        try:
            async for chunk in self._stub.Generate(request, timeout=self._deadline_s):
                record.tokens += len(chunk.token_ids)
            record.code = "OK"
        except grpc.RpcError as rpc_error:
            error = from_rpc_error(rpc_error)
            record.code = error.reason
            if error.retry_after_ms is not None:
                record.hint_s = error.retry_after_ms / 1000
        record.ended = self.now()
        if record.code == "QUEUE_FULL":
            record.refused_s.append(record.ended - record.began)


async def empty_after_s(stub: GenerationServiceStub, zero: float) -> float:
    """Seconds from `zero` until nothing waits or runs."""
    while True:
        load = await stub.GetLoad(GetLoadRequest())
        if not load.requests_running and not load.requests_waiting:
            return time.monotonic() - zero
        await asyncio.sleep(0.05)


async def carry_out(order: dict[str, float], stub: GenerationServiceStub) -> dict[str, object]:
    load = Load(stub, deadline_s=order["deadline_s"], seed=int(order["seed"]))
    began = time.monotonic()
    emptied: asyncio.Task[float] | None = None
    if "closed" in order:
        await load.closed(int(order["closed"]), order["seconds"])
    elif "rate" in order:
        loading = asyncio.create_task(load.open(order["rate"], order["seconds"]))
        await asyncio.sleep(order["seconds"])
        emptied = asyncio.create_task(empty_after_s(stub, time.monotonic()))
        await loading
    else:
        await load.burst(int(order["burst"]))
    empty_s = await emptied if emptied is not None else 0.0
    return {
        "records": [asdict(record) for record in load.records],
        "empty_s": empty_s,
        "took_s": time.monotonic() - began,
    }


async def main(target: str) -> None:
    async with caller_channel(target) as channel:
        stub = GenerationServiceStub(channel)
        print(json.dumps({"ready": True}), flush=True)
        loop = asyncio.get_running_loop()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            print(json.dumps(await carry_out(json.loads(line), stub)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
