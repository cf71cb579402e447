"""Fault cycles on real processes: streams run, something is struck, every stream must get the tokens of the model."""

import asyncio
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import GenerateOptions, TokenIds
from protos.wire.enums import WorkerState
from protos.wire.errors import EngineError
from protos.wire.simulated_tokens import SimulatedVocabulary, TokenDraw, expected_tokens
from tests.support.busy_processors import busy_processors
from tests.support.net_spaces import CALLERS
from tests.support.scheduler_kill import supervised
from tests.support.served import losses
from tests.support.small_disk import fill
from tests.support.stream_check import StreamCheck, require
from tests.support.struck_group import SCHEDULER, StruckGroup, Ways, worker_end
from tests.support.struck_worker import BLOCK, BLOCKED_S, HOLD, POISON
from tests.support.tcp_proxy import TcpProxy, Way

VOCABULARY = SimulatedVocabulary(8192, (8191,))
STREAMS = 12
TOKENS = 150
SEEN_BEFORE = 15
NOT_LEAKED_S = 5.0
SLOW_READ_S = 2.0
RESTARTED_S = 30.0


class Strike(StrEnum):
    """What happens in a cycle."""

    KILL = "worker killed"
    STOP_SHORT = "worker stopped for a moment"
    STOP_LONG = "worker stopped until it is given up"
    KILL_TWO = "two workers killed"
    VANISH = "callers vanish"
    SLOW = "callers read slowly"
    BLOCKED_LOOP = "a worker's loop blocked"
    HELD_INTERPRETER = "a worker's interpreter held"
    SCHEDULER = "scheduler killed"
    POISON = "a row that kills any worker"
    ROLLING = "workers replaced one by one"
    BUSY = "processors wanted twice over by others"
    DELAY = "link slow"
    STALL = "link stands still for a moment"
    HALF_OPEN = "link half open until it is given up"
    PARTITION = "link cut both ways until it is given up"
    CORRUPT = "wrong bytes on a link"
    RESET = "connections of a link broken"
    BLACKHOLE = "blackhole routes around a worker, to the end"
    CALLERS_CUT = "blackhole routes around callers"
    FULL_DISK = "disk full, and a worker killed"


_ON_LINKS = (Strike.DELAY, Strike.STALL, Strike.HALF_OPEN, Strike.PARTITION, Strike.CORRUPT, Strike.RESET)
_ON_ROUTES = (Strike.BLACKHOLE, Strike.CALLERS_CUT)
STRIKES = {
    Ways.DIRECT: tuple(strike for strike in Strike if strike not in (*_ON_LINKS, *_ON_ROUTES, Strike.FULL_DISK)),
    Ways.PROXIES: _ON_LINKS,
    Ways.SPACES: _ON_ROUTES,
    Ways.SMALL_DISK: (Strike.FULL_DISK,),
}
"""By what they need between the processes."""
_STOPPED_S = {Strike.STOP_SHORT: 0.4, Strike.STOP_LONG: 4.5}
_CUT_S = 4.5
_SIGNALS = {Strike.BLOCKED_LOOP: BLOCK, Strike.HELD_INTERPRETER: HOLD}
_ON_WORKERS = (*_STOPPED_S, *_SIGNALS, Strike.KILL, Strike.KILL_TWO, Strike.FULL_DISK)
_BUSY_TIMES = 2
_BOTH = frozenset(Way)
_STALLS = {
    Strike.STALL: (_BOTH, 0.4),
    Strike.HALF_OPEN: (frozenset({Way.DOWN}), 4.5),
    Strike.PARTITION: (_BOTH, 4.5),
}


@dataclass
class CycleReport:
    """What the cycles reached."""

    strikes: Counter[Strike] = field(default_factory=Counter)
    requests: int = 0
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)
    gaps_s: dict[Strike, list[float]] = field(default_factory=dict)
    """Per cycle the longest time between two chunks of one stream."""

    def add(self, other: "CycleReport") -> None:
        self.strikes.update(other.strikes)
        self.requests += other.requests
        self.tokens += other.tokens
        self.wrong += other.wrong
        for strike, gaps in other.gaps_s.items():
            self.gaps_s.setdefault(strike, []).extend(gaps)

    def text(self) -> str:
        lines = [
            f"{self.strikes.total()} fault cycles, {self.requests} requests, {self.tokens} tokens, "
            f"{len(self.wrong)} wrong; per kind: cycles, and the longest pause of any stream"
        ]
        for kind, gaps in sorted(self.gaps_s.items()):
            lines.append(f"  {kind:40} {len(gaps):4}  least {min(gaps):.2f} s, most {max(gaps):.2f} s")
        return "\n".join(lines)


class FaultCycles:
    """Cycles on one group of simulated workers. One seed decides prompts, draws and victims."""

    def __init__(self, group: StruckGroup, *, seed: int) -> None:
        self.report = CycleReport()
        self._struck = group
        self._server = group.server
        self._workers = group.server.options.workers
        self._random = random.Random(seed)
        self._gap_s = 0.0

    async def run(self, strikes: list[Strike]) -> CycleReport:
        """One cycle for each."""
        async with supervised(self._server), AsyncGenerationClient(self._struck.target) as client:
            for strike in strikes:
                await self._cycle(client, strike)
        return self.report

    async def _cycle(self, client: AsyncGenerationClient, strike: Strike) -> None:
        await self._all_serve(client)
        begun, self._gap_s = asyncio.Event(), 0.0
        slow_s = [SLOW_READ_S if strike is Strike.SLOW and number % 3 == 0 else 0.0 for number in range(STREAMS)]
        streams = [asyncio.create_task(self._stream(client, begun, strike, pause_s=pause)) for pause in slow_s]
        await begun.wait()
        await self._strike(client, strike, streams)
        ended = await asyncio.gather(*streams, self._nothing_held(client, streams), return_exceptions=True)
        self.report.wrong += [f"{strike}: {error!r}" for error in ended if isinstance(error, Exception)]
        self.report.strikes[strike] += 1
        self.report.gaps_s.setdefault(strike, []).append(self._gap_s)

    async def _stream(
        self, client: AsyncGenerationClient, begun: asyncio.Event, strike: Strike, *, pause_s: float
    ) -> None:
        prompt = [self._random.randrange(8000) for _ in range(self._random.randint(5, 120))]
        temperature, seed = self._random.choice([0.0, 0.8]), self._random.getrandbits(32)
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True, temperature=temperature, seed=seed, top_k=40)
        draw = TokenDraw(temperature=temperature, seed=seed, top_k=40)
        check = StreamCheck(expected_tokens(prompt, TOKENS, vocabulary=VOCABULARY, draw=draw))
        self.report.requests += 1
        last: float | None = None
        async for chunk in client.stream(TokenIds(tuple(prompt)), options):
            check.take(chunk.first_pos, chunk.token_ids)
            now = time.monotonic()
            self._gap_s = max(self._gap_s, now - (last or now))
            if len(check.tokens) >= SEEN_BEFORE:
                begun.set()
                await asyncio.sleep(pause_s)
                pause_s = 0.0
            last = time.monotonic()
        check.end()
        self.report.tokens += len(check.tokens)

    async def _all_serve(self, client: AsyncGenerationClient) -> None:
        """Workers that the last cycle ended are back."""
        async with asyncio.timeout(RESTARTED_S):
            while True:
                states = [worker.state for worker in (await client.load()).workers]
                if states.count(WorkerState.SERVING) == self._workers:
                    return
                await asyncio.sleep(0.05)

    async def _nothing_held(self, client: AsyncGenerationClient, streams: "list[asyncio.Task[None]]") -> None:
        """Once all streams have ended, no request and no page is left, at the latest 5 s later."""
        await asyncio.wait(streams)
        begin = time.monotonic()
        while True:
            load = await client.load()
            held = [load.requests_running, load.requests_waiting, *(worker.pages_used for worker in load.workers)]
            if not any(held):
                return
            require(time.monotonic() - begin < NOT_LEAKED_S, "I6 nothing is left", running_waiting_pages=held)
            await asyncio.sleep(0.05)

    # --- strikes

    async def _strike(self, client: AsyncGenerationClient, strike: Strike, streams: "list[asyncio.Task[None]]") -> None:
        victim = self._random.randrange(self._workers)
        if strike in STRIKES[Ways.PROXIES]:
            await self._strike_link(strike, self._struck.proxies[victim])
        elif strike in STRIKES[Ways.SPACES]:
            await self._strike_routes(strike, victim, streams)
        elif strike in _ON_WORKERS:
            await self._strike_workers(strike)
        elif strike is Strike.VANISH:
            for stream in self._random.sample(streams, len(streams) // 2):
                stream.cancel()
        elif strike is Strike.POISON:
            await self._poison(client)
        elif strike is Strike.ROLLING:
            for number in range(self._workers):
                await self._replace(number)
        elif strike is Strike.SCHEDULER:
            os.kill(self._server.group.pids()[-1], signal.SIGKILL)
        elif strike is Strike.BUSY:
            await self._disturb(streams)

    async def _strike_workers(self, strike: Strike) -> None:
        if strike is Strike.FULL_DISK:
            assert self._struck.disk is not None
            fill(self._struck.disk)
        workers = self._server.group.pids()[: self._workers]
        victims = self._random.sample(workers, 2 if strike is Strike.KILL_TWO else 1)
        if strike in _STOPPED_S:
            await _stop(victims[0], _STOPPED_S[strike])
        elif strike in _SIGNALS:
            os.kill(victims[0], _SIGNALS[strike])
            await asyncio.sleep(BLOCKED_S)
        else:
            for pid in victims:
                os.kill(pid, signal.SIGKILL)

    async def _disturb(self, streams: "list[asyncio.Task[None]]") -> None:
        """Others want the processors; a worker that is slow for it is not given up."""
        before = await asyncio.to_thread(losses, self._server)
        with busy_processors(_BUSY_TIMES):
            await asyncio.wait(streams)
        lost = await asyncio.to_thread(losses, self._server) - before
        require(not lost, "I2 a healthy worker is given up", times=lost)

    async def _strike_link(self, strike: Strike, proxy: TcpProxy) -> None:
        weather = proxy.weather
        if strike in _STALLS:
            weather.stalled, seconds = _STALLS[strike]
            await asyncio.sleep(seconds)
            weather.stalled = frozenset()
        elif strike is Strike.DELAY:
            weather.delay_s = 0.03
            await asyncio.sleep(1.0)
            weather.delay_s = 0.0
        elif strike is Strike.CORRUPT:
            weather.corrupt = dict.fromkeys(Way, 2)
        else:
            proxy.reset()

    async def _strike_routes(self, strike: Strike, victim: int, streams: "list[asyncio.Task[None]]") -> None:
        """A worker is away until the streams have ended, who must do without; callers are away for a while."""
        spaces = self._struck.spaces
        assert spaces is not None
        is_worker = strike is Strike.BLACKHOLE
        spaces.cut(SCHEDULER, worker_end(victim) if is_worker else CALLERS)
        try:
            await (asyncio.wait(streams) if is_worker else asyncio.sleep(_CUT_S))
        finally:
            spaces.heal()

    async def _poison(self, client: AsyncGenerationClient) -> None:
        """It is found out, whatever company it had."""
        options = GenerateOptions(max_tokens=TOKENS, ignore_eos=True)
        try:
            chunks = [chunk async for chunk in client.stream(TokenIds(POISON), options)]
        except EngineError as error:
            require(error.reason == "SUSPECTED_POISON", "I2 the poison's own error", error=repr(error))
        else:
            require(False, "a poison that killed nobody", chunks=len(chunks))

    async def _replace(self, number: int) -> None:
        """SIGTERM; the next goes when this one's successor serves."""
        group = self._server.group
        old = group.pids()[number]
        os.kill(old, signal.SIGTERM)
        async with asyncio.timeout(RESTARTED_S):
            while group.pids()[number] == old:
                await asyncio.sleep(0.05)
        await asyncio.to_thread(group.wait_serving, timeout_s=RESTARTED_S, progress=lambda *_: None)


async def _stop(pid: int, seconds: float) -> None:
    os.kill(pid, signal.SIGSTOP)
    try:
        await asyncio.sleep(seconds)
    finally:
        os.kill(pid, signal.SIGCONT)
