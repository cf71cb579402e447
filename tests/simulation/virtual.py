"""Virtual time, processes that can be paused and killed, and the network between them. One random source decides."""

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

Work = Callable[[], None]


class VirtualTime:
    """A heap of things to do. Equal times run in the order they were asked for."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        self._heap: list[tuple[float, int, Work]] = []
        self._order = itertools.count()

    def after(self, delay_s: float, work: Work) -> None:
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), work))

    def run(self, until: float, *, is_over: Callable[[], bool] = lambda: False) -> None:
        while self._heap and self._heap[0][0] <= until and not is_over():
            self.now, _, work = heapq.heappop(self._heap)
            self.events += 1
            work()
        if not is_over():
            self.now = until


class Process:
    """What runs in it stops with it. Paused, it does later whatever it was asked meanwhile."""

    def __init__(self, time: VirtualTime, name: str) -> None:
        self.time = time
        self.name = name
        self.is_alive = True
        self._is_paused = False
        self._paused_since = 0.0
        self._paused_until = 0.0
        self._backlog: list[Work] = []

    def do(self, work: Work) -> None:
        if self.is_alive and self._is_paused:
            self._backlog.append(work)
        elif self.is_alive:
            work()

    def after(self, delay_s: float, work: Work) -> None:
        self.time.after(delay_s, lambda: self.do(work))

    def pause(self, seconds: float) -> None:
        """From now on, and for no shorter than an earlier pause."""
        self._paused_since = self._paused_since if self._is_paused else self.time.now
        self._is_paused = True
        self._paused_until = max(self._paused_until, self.time.now + seconds)
        self.time.after(seconds, self._resume)

    @property
    def was_paused(self) -> bool:
        return self._paused_until > 0.0

    def is_paused_since(self, begun: float) -> bool:
        return self._is_paused and self._paused_since <= begun

    def _resume(self) -> None:
        if self.time.now < self._paused_until:
            return
        self._is_paused = False
        backlog, self._backlog = self._backlog, []
        for work in backlog:
            self.do(work)


class Network:
    """Delays messages and cuts ways. A way is (from, to); a cut one swallows what is sent."""

    def __init__(self, time: VirtualTime, source: random.Random, *, slow_share: float) -> None:
        self.time = time
        self.random = source
        self._slow_share = slow_share
        self._cut_until: dict[tuple[str, str], float] = {}

    def delay(self) -> float:
        """Mostly below a millisecond, sometimes long."""
        if self.random.random() < self._slow_share:
            return self.random.uniform(0.005, 0.3)
        return self.random.uniform(0.0001, 0.001)

    def setup_delay(self) -> float:
        """What a connection may take before its first message moves."""
        return self.random.uniform(0.3, 2.5) if self.random.random() < self._slow_share else 0.0

    def cut(self, sender: str, receiver: str, seconds: float) -> None:
        self._cut_until[sender, receiver] = self.time.now + seconds

    def heal(self) -> None:
        self._cut_until.clear()
        self._slow_share = 0.0

    def is_cut(self, sender: str, receiver: str) -> bool:
        return self._cut_until.get((sender, receiver), 0.0) > self.time.now

    def datagram(self, sender: Process, receiver: Process, work: Work) -> None:
        """One message outside any stream: in any order, or lost."""
        if not self.is_cut(sender.name, receiver.name):
            receiver.after(self.delay(), work)


class Connection:
    """One call in both directions: in order while it lives. Broken, each end hears of it in its own time, and gets
    until then what was on its way: a server may read an old call's messages while a new call is open."""

    def __init__(self, network: Network, client: Process, server: Process, *, on_break: tuple[Work, Work]) -> None:
        self._network = network
        self._ends = (client, server)
        self._on_break = on_break
        self._due = [network.time.now + network.setup_delay(), 0.0]
        self._under_way: tuple[deque[Work], deque[Work]] = (deque(), deque())
        """By way, in order: two that are due at once would else be swapped by the rounding of their delays."""
        self._is_over = [False, False]
        """By end."""
        self.is_broken = False

    def to_server(self, work: Work) -> None:
        self._send(0, work)

    def to_client(self, work: Work) -> None:
        self._send(1, work)

    def end(self) -> None:
        """The client goes: the server hears of it, if it can, behind what was sent before."""
        if not self.is_broken:
            self.is_broken = self._is_over[0] = True
            sent_s = max(0.0, self._due[0] - self._network.time.now)
            self._tell(1, sent_s + self._network.delay())

    def break_off(self, *, within_s: float = 0.01) -> None:
        """Nothing more is sent. The server may hear of it long after its client opened the next call."""
        if not self.is_broken:
            self.is_broken = True
            source = self._network.random
            for end, latest_s in enumerate((within_s, source.choice([within_s, 0.5]))):
                self._tell(end, source.uniform(0.001, latest_s))

    def _tell(self, end: int, delay_s: float) -> None:
        def hear() -> None:
            self._is_over[end] = True
            self._on_break[end]()

        self._ends[end].after(delay_s, hear)

    def _send(self, way: int, work: Work) -> None:
        sender, receiver = self._ends[way], self._ends[1 - way]
        if self.is_broken:
            return
        if self._network.is_cut(sender.name, receiver.name):
            self.break_off(within_s=3.0)  # what keepalive takes
            return
        now = self._network.time.now
        self._due[way] = max(self._due[way], now + self._network.delay())
        self._under_way[way].append(work)
        receiver.after(self._due[way] - now, lambda: self._deliver(way))

    def _deliver(self, way: int) -> None:
        work = self._under_way[way].popleft()
        if not self._is_over[1 - way]:
            work()
