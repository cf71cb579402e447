"""One client process of a benchmark: sends its share of the requests and records when tokens arrive.

Process i of N has the requests i, i + N, i + 2 N … Guards: nothing it does between chunks waits, and what it could not
send in time shows as lateness.
"""

import asyncio
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from multiprocessing.connection import Connection

from protos.client.bench_options import LoadPlan
from protos.client.bench_records import ClientCounts, Outcome, RequestRecord
from protos.client.bench_workload import AskedRequest, Workload, arrival_times
from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.client.server_access import CallerCredentials
from protos.wire.errors import EngineError
from protos.wire.simulated_tokens import SimulatedVocabulary, TokenDraw, expected_outputs

STOP = "stop"
_POLL_S = 0.05
_PROGRESS_S = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientJob:
    """What one client process does."""

    target: str
    credentials: CallerCredentials
    index: int
    plan: LoadPlan
    workload: Workload
    start_at_s: float
    """`time.monotonic` of the benchmark's start; the clock is the machine's, so all processes share it."""
    vocabulary: SimulatedVocabulary | None
    """Of the simulated model whose tokens are checked; None: not checked."""


def run_client(job: ClientJob, pipe: Connection) -> None:
    """Body of the process: sends counts now and then, the records at last."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command decides, and says so through the pipe
    records = asyncio.run(_BenchClient(job, pipe).run())
    pipe.send(records)
    pipe.close()


class _BenchClient:
    def __init__(self, job: ClientJob, pipe: Connection) -> None:
        self._job = job
        self._pipe = pipe
        self._counts = ClientCounts()
        self._records: list[RequestRecord] = []
        self._tokens: dict[int, list[int]] = {}

    async def run(self) -> list[RequestRecord]:
        await asyncio.sleep(self._job.start_at_s - time.monotonic())
        plan = self._job.plan
        async with AsyncGenerationClient(
            self._job.target, timeout_s=plan.timeout_s, credentials=self._job.credentials
        ) as client:
            load = self._closed_loop(client) if plan.concurrency else self._open_loop(client)
            work = asyncio.create_task(load, name="load")
            watch = asyncio.create_task(self._watch(work), name="watch")
            await asyncio.wait({work})
            watch.cancel()
            await asyncio.wait({watch})
        if not work.cancelled():
            work.result()
        self._verify()
        return self._records

    async def _watch(self, work: "asyncio.Task[None]") -> None:
        """Report progress; end the work when told to, or when the command is gone."""
        reported_s = 0.0
        while True:
            await asyncio.sleep(_POLL_S)
            try:
                if self._pipe.poll():
                    self._pipe.recv()
                    work.cancel()
                if time.monotonic() - reported_s > _PROGRESS_S:
                    reported_s = time.monotonic()
                    self._pipe.send(self._counts)
            except (EOFError, OSError):
                work.cancel()
                return

    async def _closed_loop(self, client: AsyncGenerationClient) -> None:
        plan = self._job.plan
        numbers = self._numbers()
        streams = len(range(self._job.index, plan.concurrency, plan.processes))
        async with asyncio.TaskGroup() as group:
            for _ in range(streams):
                group.create_task(self._one_by_one(client, numbers))

    async def _one_by_one(self, client: AsyncGenerationClient, numbers: Iterator[int]) -> None:
        limit_s = self._job.plan.duration_s
        for number in numbers:
            if limit_s is not None and self._now_s() >= limit_s:
                return
            await self._ask(client, number, due_s=None)

    async def _open_loop(self, client: AsyncGenerationClient) -> None:
        plan, seed = self._job.plan, self._job.workload.source.options.seed
        async with asyncio.TaskGroup() as group:
            for number, due_s in enumerate(arrival_times(plan, seed)):
                if number % plan.processes == self._job.index:
                    await asyncio.sleep(max(due_s - self._now_s(), 0))
                    group.create_task(self._ask(client, number, due_s=due_s))

    async def _ask(self, client: AsyncGenerationClient, number: int, *, due_s: float | None) -> None:
        asked = self._job.workload.request(number)
        sent_s = self._now_s()
        record = RequestRecord(number=number, due_s=sent_s if due_s is None else due_s, sent_s=sent_s)
        self._records.append(record)
        self._counts.sent += 1
        try:
            await self._read(client, asked, record)
        except EngineError as error:
            record.failed(error)
            self._counts.failed += 1
        finally:
            record.end_s = self._now_s()
            self._counts.ended += 1

    async def _read(self, client: AsyncGenerationClient, asked: AskedRequest, record: RequestRecord) -> None:
        tokens: list[int] = []
        async for chunk in client.stream(asked.prompt, self._options(asked)):
            if chunk.token_ids:
                record.arrived(len(chunk.token_ids), at_s=self._now_s())
                self._counts.tokens += len(chunk.token_ids)
                if self._job.vocabulary is not None:
                    tokens.extend(chunk.token_ids)
            if chunk.usage is not None and chunk.finish is not None:
                record.prompt_tokens, record.cached_tokens = chunk.usage.prompt_tokens, chunk.usage.cached_tokens
                record.outcome, record.reason = Outcome.DONE, chunk.finish.reason.name
        self._tokens[record.number] = tokens

    def _options(self, asked: AskedRequest) -> GenerateOptions:
        options = self._job.workload.source.options
        return GenerateOptions(
            max_tokens=asked.max_tokens,
            temperature=options.temperature,
            seed=asked.seed,
            ignore_eos=options.prompts is None,
            top_p=1.0,
            top_k=0,
        )

    def _numbers(self) -> Iterator[int]:
        """This process's request numbers; one iterator for all of its streams."""
        plan = self._job.plan
        for number in count(self._job.index, plan.processes):
            if plan.max_requests is not None and number >= plan.max_requests:
                return
            yield number

    def _now_s(self) -> float:
        return time.monotonic() - self._job.start_at_s

    def _verify(self) -> None:
        """After the load, so that it disturbs nothing."""
        vocabulary = self._job.vocabulary
        if vocabulary is None:
            return
        temperature = self._job.workload.source.options.temperature
        done = [record for record in self._records if record.outcome is Outcome.DONE]
        asked = [self._job.workload.request(record.number) for record in done]
        expected = expected_outputs(
            [request.prompt.ids for request in asked if isinstance(request.prompt, TokenIds)],
            [request.max_tokens or 0 for request in asked],
            vocabulary=vocabulary,
            draws=[TokenDraw(temperature=temperature, seed=request.seed) for request in asked],
        )
        for record, tokens in zip(done, expected, strict=True):
            record.is_wrong = self._tokens[record.number] != tokens
