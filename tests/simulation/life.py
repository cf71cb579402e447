"""One run: topology, workload and faults drawn from one seed; first with faults, then until everything has ended."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

from protos.wire.enums import FinishReason
from protos.wire.errors import Loading
from protos.wire.plan import ForwardPlan
from scheduler_svc.core.events import (
    RequestCancelled,
    RequestFinished,
    RequestRefused,
    RequestSubmitted,
    StreamAnswer,
    TokensReleased,
)
from scheduler_svc.core.settings import CoreSettings
from tests.simulation.checker import Caller, Checker
from tests.simulation.faults import Fault, draw
from tests.simulation.schedulers import SimScheduler
from tests.simulation.virtual import Network, VirtualTime
from tests.simulation.workers import DeviceHabits, SimWorker
from tests.simulation.workload import draw_info, draw_request
from tests.support.stream_check import require

SAFETY_S = 10.0
LIVENESS_S = 30.0
CALM_S = 9.0
"""From the last end to the look at what is still held: a device that hung last dies, is started and attached."""
REPORT_S = 0.25
ANSWER_S = 0.003
"""From a core to its callers."""
PLAN_BUDGET_S = 2.5
NOTICED_S = 3.1
"""A worker that stands still is given up by then; a report on its way may move that."""
LATE_REPORT_S = 1.3
NOTICED_SLACK_S = 0.5
STANDSTILLS = (Fault.PAUSE, Fault.HANG, Fault.CUT, Fault.CUT_ONE_WAY, Fault.ZOMBIE, Fault.CORRUPT)
"""After which a worker, or how a scheduler sees it, may stand still."""


class Life:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.mix = draw(self.random)
        self.time = VirtualTime()
        self.network = Network(self.time, self.random, slow_share=self.mix.slow_share)
        self.info = draw_info(self.random, self.mix.profile)
        self.checker = Checker(self.info)
        self.checker.stream_of = {}
        self.is_calm = False
        self._slow_reports_until = 0.0
        self._corrupt_until: dict[str, float] = {}
        self._incarnations = 0
        self._names = [f"w{index}" for index in range(self.random.choice([1, 2, 2, 3]))]
        self._workers: dict[str, SimWorker] = {}
        self._next_stream = 1
        self._epoch = 0
        self.schedulers: list[SimScheduler] = []
        for name in self._names:
            self._start_worker(name)
        self._start_scheduler()

    @property
    def workers(self) -> Mapping[str, SimWorker]:
        return self._workers

    @property
    def loses_messages(self) -> bool:
        return self.mix.message_rates["lost"] > 0

    @property
    def may_stand_still(self) -> bool:
        """Whether anything happened for which a living worker may be given up."""
        return self.loses_messages or any(self.checker.counts[f"fault {kind}"] for kind in STANDSTILLS)

    @property
    def scheduler(self) -> SimScheduler:
        """The one that callers talk to."""
        return self.schedulers[-1]

    def run(self) -> Checker:
        self.time.after(0.05, self._ask_more)
        self.time.after(self.random.uniform(*self.mix.pause_s), self._next_fault)
        for worker in self._workers.values():
            worker.after(SAFETY_S / 2, worker.meet_stranger)
        self.time.run(SAFETY_S)
        self._stop_faults()
        self.time.run(SAFETY_S + LIVENESS_S, is_over=lambda: self._open_callers == 0)
        self.checker.at_rest()
        # A device that hangs is given its plan's budget, and may have had its last plan just before.
        self.time.run(self.time.now + LIVENESS_S, is_over=self._all_serve)
        self.time.run(self.time.now + CALM_S)
        self._check_rest()
        return self.checker

    # --- topology

    def _start_worker(self, name: str) -> None:
        self._incarnations += 1
        info = replace(self.info, incarnation=self._incarnations.to_bytes(16, "little"))
        habits = DeviceHabits(dies_at=self._is_poisoned, watchdog_s=PLAN_BUDGET_S + self.random.choice([0.0, 3.0]))
        worker = SimWorker(self.time, info, name=name, source=self.random, checker=self.checker, habits=habits)
        worker.on_death.append(lambda: self._worker_died(name))
        self._workers[name] = worker
        self._report(worker)

    def _worker_died(self, name: str) -> None:
        self.checker.counts["worker deaths"] += 1
        pause_s = self.random.choice([self.random.uniform(0.005, 0.08), self.random.uniform(0.2, 1.5)])
        self.time.after(pause_s, lambda: self._start_worker(name))

    def _report(self, worker: SimWorker) -> None:
        if not worker.is_alive:
            return
        report = worker.report()
        late_s = self.random.uniform(0.0, 0.9) if self._slow_reports_until > self.time.now else 0.0
        for scheduler in self.schedulers:
            if scheduler.is_alive and not self.network.is_cut(worker.name, scheduler.name):
                link = scheduler.links[worker.name]
                scheduler.after(self.network.delay() + late_s, lambda link=link: link.reported(report))
        worker.after(REPORT_S, lambda: self._report(worker))

    def _start_scheduler(self) -> None:
        self._epoch += 1
        budget_tokens = self.random.choice([4, 8, 32])
        settings = CoreSettings(
            budget_tokens=budget_tokens, plan_budget_ms=int(1000 * PLAN_BUDGET_S), row_retries=10_000
        )
        self.schedulers.append(SimScheduler(self.time, self, epoch=self._epoch, settings=settings))

    # --- callers

    @property
    def _open_callers(self) -> int:
        return sum(caller.end is None for caller in self.checker.callers.values())

    def _ask_more(self) -> None:
        if self.is_calm:
            return
        for _ in range(self.random.choice([1, 1, 2, 4])):
            self._ask()
        self.time.after(self.random.uniform(*self.mix.asks_s), self._ask_more)

    def _ask(self) -> None:
        spec = draw_request(self.random, self._next_stream, now=self.time.now)
        if self.mix.has_poison and not self.checker.poison and self.random.random() < 0.2:
            self.checker.poison.add(self._next_stream)
        self._next_stream += 1
        caller = self.checker.asked(spec)
        self._submit(caller)
        if self.random.random() < 0.1:
            self.time.after(self.random.uniform(0.0, 1.0), lambda: self._cancel(caller))

    def _submit(self, caller: Caller) -> None:
        """Ask the scheduler of the day, with what is there already."""
        spec = caller.spec
        if self.time.now > spec.deadline_s:
            self.checker.gave_up(caller)
            return
        scheduler, submitted = self.scheduler, RequestSubmitted(spec, tuple(caller.stream.tokens))
        self.checker.counts["resumed"] += bool(caller.stream.tokens)
        scheduler.after(0.0, lambda: scheduler.post(submitted))

    def _ask_again(self, caller: Caller, refused_by: SimScheduler) -> None:
        """A scheduler without workers says so; a newer one was asked when it came."""
        if caller.end is None and self.time.now > caller.spec.deadline_s:
            self.checker.gave_up(caller)
        elif caller.end is None and refused_by is self.scheduler:
            self._submit(caller)
            if caller.is_cancelled:
                self._cancel(caller)

    def _cancel(self, caller: Caller) -> None:
        if caller.end is None:
            caller.is_cancelled = True
            scheduler = self.scheduler
            scheduler.after(0.0, lambda: scheduler.post(RequestCancelled(caller.spec.stream, FinishReason.ABORT)))

    def answered(self, scheduler: SimScheduler, answer: StreamAnswer) -> None:
        """An answer is on its way, in order; it is lost with its scheduler."""
        if scheduler is self.scheduler:
            self.time.after(ANSWER_S, lambda: self._heard(scheduler, answer))

    def _heard(self, scheduler: SimScheduler, answer: StreamAnswer) -> None:
        if scheduler is not self.scheduler:
            self.checker.counts["answers lost"] += 1
            return
        if isinstance(answer, TokensReleased):
            self.checker.delivered(answer)
        elif isinstance(answer, RequestRefused) and isinstance(answer.error, Loading):
            caller = self.checker.callers[answer.stream.stream_id]
            self.time.after(0.1, lambda: self._ask_again(caller, scheduler))
        else:
            assert isinstance(answer, RequestFinished | RequestRefused)
            self.checker.ended(answer, self.time.now)

    def _fail_over(self) -> None:
        """Another scheduler; callers come to it with what they have."""
        self._start_scheduler()
        for caller in list(self.checker.callers.values()):
            if caller.end is None:
                self._submit(caller)
            if caller.end is None and caller.is_cancelled:
                self._cancel(caller)

    def _is_poisoned(self, plan: ForwardPlan) -> bool:
        if not self.checker.poison:
            return False
        epoch = plan.identity.epoch
        return any(
            self.checker.stream_of.get((epoch, handle)) in self.checker.poison for handle in plan.rows.handles.tolist()
        )

    # --- faults

    def message_fate(self, worker: str) -> str:
        if self.is_calm:
            return "good"
        if self._corrupt_until.get(worker, 0.0) > self.time.now:
            return "torn"
        for fate, rate in self.mix.message_rates.items():
            if rate and self.random.random() < rate:
                self.checker.counts[f"message {fate}"] += 1
                return fate
        return "good"

    def _next_fault(self) -> None:
        if self.is_calm:
            return
        kind = self.random.choice(self.mix.kinds)
        name = self.random.choice(self._names)
        self.checker.counts[f"fault {kind}"] += 1
        self._strike_worker(kind, self._workers[name])
        self._strike_network(kind, name)
        if kind in (Fault.FAILOVER, Fault.ZOMBIE):
            self._strike_scheduler(kind)
        self.time.after(self.random.uniform(*self.mix.pause_s), self._next_fault)

    def _strike_worker(self, kind: Fault, worker: SimWorker) -> None:
        match kind:
            case Fault.CRASH:
                worker.die()
            case Fault.PAUSE:
                self._pause(worker)
            case Fault.HANG:
                worker.habits.hangs = lambda: self._hung(worker)
            case Fault.DRAIN:
                worker.do(worker.drain)
                worker.after(self.random.uniform(0.0, 1.0), worker.stop)
            case Fault.SICK:
                worker.habits.is_sick = True
                worker.after(self.random.uniform(0.05, 0.5), lambda: self._cure(worker))
            case _:
                pass

    def _expect_given_up(self, worker: SimWorker, *, after_s: float, is_still: Callable[[], bool]) -> None:
        """Its scheduler must leave the term that it has now, if the worker is still as it is."""
        scheduler = self.scheduler
        exchange = scheduler.links[worker.name].exchange

        def look() -> None:
            is_watched = scheduler is self.scheduler and scheduler.is_alive and not scheduler.was_paused
            if is_watched and worker.is_alive and is_still():
                kept = exchange is not None and scheduler.links[worker.name].exchange is exchange
                require(not kept, "I2 who stands still is given up", worker=worker.name, after_s=after_s)
                self.checker.counts["given up in time"] += exchange is not None

        self.time.after(after_s + LATE_REPORT_S, look)

    def _pause(self, worker: SimWorker) -> None:
        worker.pause(self.random.choice([0.3, 1.5, 5.0]))
        begun = self.time.now
        self._expect_given_up(worker, after_s=NOTICED_S, is_still=lambda: worker.is_paused_since(begun))

    def _hung(self, worker: SimWorker) -> None:
        self._expect_given_up(worker, after_s=PLAN_BUDGET_S + NOTICED_SLACK_S, is_still=lambda: True)

    def _cure(self, worker: SimWorker) -> None:
        worker.habits.is_sick = False

    def _strike_network(self, kind: Fault, name: str) -> None:
        seconds = self.random.choice([0.2, 1.0, 3.5])
        match kind:
            case Fault.CUT:
                self.network.cut(self.scheduler.name, name, seconds)
                self.network.cut(name, self.scheduler.name, seconds)
            case Fault.CUT_ONE_WAY:
                ways = [(self.scheduler.name, name), (name, self.scheduler.name)]
                self.network.cut(*self.random.choice(ways), seconds)
            case Fault.BREAK:
                self.scheduler.links[name].break_stream()
            case Fault.SLOW_REPORTS:
                self._slow_reports_until = self.time.now + 2 * seconds
            case Fault.CORRUPT:
                self._corrupt_until[name] = self.time.now + seconds
            case _:
                pass

    def _strike_scheduler(self, kind: Fault) -> None:
        old = self.scheduler
        if kind is Fault.FAILOVER:
            old.kill()
        elif self.random.random() < 0.5:
            old.pause(self.random.choice([0.05, 0.5, 3.0]))
        elif self.random.random() < 0.5:
            # It hears of nothing until its network heals, and then goes on as before.
            for name in self._names:
                self.network.cut(old.name, name, seconds := self.random.choice([0.5, 1.5]))
                self.network.cut(name, old.name, seconds)
        self._fail_over()

    # --- the end

    def _stop_faults(self) -> None:
        self.is_calm = True
        self._slow_reports_until = 0.0
        self.network.heal()
        for worker in self._workers.values():
            worker.habits.is_sick, worker.habits.hangs = False, None

    def _all_serve(self) -> bool:
        return all(link.is_serving for link in self.scheduler.links.values())

    def _check_rest(self) -> None:
        scheduler = self.scheduler
        require(scheduler.is_alive, "I24 the newest scheduler lives")
        for name, link in scheduler.links.items():
            require(link.is_serving and not link.is_doubted, "I24 every worker serves", worker=name)
        state = scheduler.state
        require(not state.streams and not len(state.waiting), "I6 nothing is left")
        for worker in state.workers.values():
            usable = [allocator.usable for allocator in worker.memory.allocators]
            require(worker.memory.available() == usable, "I6 every page is free or cached", worker=worker.name)
