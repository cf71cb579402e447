"""Guards switched off one at a time: each must be noticed by a simulated run, or by the unit tests it is listed with.

python -m tests.simulation.mutants [--seeds N] [NAME ...]
"""

import argparse
import contextlib
import importlib
import inspect
import io
import math
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType

import pytest

from tests.simulation.campaign import BREAKS
from tests.simulation.life import Life

PROTOCOL = "worker_svc.protocol.worker_protocol:WorkerProtocol."
ORDER = "worker_svc.protocol.plan_order:PlanOrder."
EXCHANGE = "scheduler_svc.links.exchange:PlanExchange."
LIVENESS = "scheduler_svc.links.liveness:Liveness."
RESULTS = "scheduler_svc.core.results:"
EXCHANGE_TESTS = "tests/unit/links/test_exchange.py"
LIVENESS_TESTS = "tests/unit/links/test_liveness.py"
PROTOCOL_TESTS = "tests/unit/protocol"
CORE_TESTS = "tests/unit/core/test_core_"


@dataclass(frozen=True)
class Mutant:
    """One guard. `target` is `module:function` or `module:Class.method`; its text `old` becomes `new`."""

    name: str
    target: str
    old: str
    new: str
    seed: int | None = None
    """The first run that noticed; None: only `tests` do."""
    tests: str = ""


MUTANTS = (
    Mutant(
        "any protocol may attach",
        "worker_svc.protocol.attachment:Attachment.refusal",
        "asked.protocol_min > PROTOCOL_MAX or asked.protocol_max < PROTOCOL_MIN",
        "False",
        seed=0,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "a lower pair may attach",
        "worker_svc.protocol.attachment:Attachment.refusal",
        "asked.fence <= self.highest",
        "False",
        seed=7,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "plans of another incarnation",
        PROTOCOL + "_identity_fault",
        "incarnation != self._info.incarnation",
        "False",
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "plans of a lower pair",
        PROTOCOL + "_identity_fault",
        "fence < self._attachment.highest",
        "False",
        seed=7,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "any stream number",
        PROTOCOL + "_opening_refusal",
        "opening.stream_number <= self._stream_number",
        "False",
        seed=57,
        tests=PROTOCOL_TESTS,
    ),
    Mutant("gaps are accepted", ORDER + "arrive", "seq > self.expected_seq", "False", tests=PROTOCOL_TESTS),
    Mutant("no kept results", ORDER + "arrive", "seq in self._results", "False", seed=5, tests=PROTOCOL_TESTS),
    Mutant(
        "a plan may run twice",
        ORDER + "arrive",
        "if seq < self.expected_seq:",
        "if False:",
        seed=5,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "the queue outlives its pair",
        PROTOCOL + "attach_requested",
        "self._order = self._new_order()",
        "pass",
        seed=3,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "a result outlives its pair",
        PROTOCOL + "attach_requested",
        "self._device = DeviceUse.OUTDATED",
        "pass",
        seed=7,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "a reset serves any pair",
        PROTOCOL + "executor_reset",
        "self._resetting != self._attachment.highest",
        "False",
        seed=3,
        tests=PROTOCOL_TESTS,
    ),
    Mutant(
        "waiting plans outlive their stream",
        PROTOCOL + "stream_opened",
        "self._order.reopen()",
        "pass",
        seed=9,
        tests=PROTOCOL_TESTS,
    ),
    Mutant("any stream may send", PROTOCOL + "plan_received", "stream != self._stream", "False", tests=PROTOCOL_TESTS),
    Mutant(
        "results of any life count at the link",
        EXCHANGE + "take",
        " or not self._is_current(result)",
        "",
        tests=EXCHANGE_TESTS,
    ),
    Mutant("repeated results count at the link", EXCHANGE + "take", " or seq < due", "", tests=EXCHANGE_TESTS),
    Mutant(
        "a new stream carries nothing",
        EXCHANGE + "opened",
        "return self._unanswered.all_again()",
        "return []",
        seed=6,
        tests=EXCHANGE_TESTS,
    ),
    Mutant(
        "streams are never opened again",
        EXCHANGE + "broke",
        "not may_reopen(error)",
        "True",
        seed=2,
        tests=EXCHANGE_TESTS,
    ),
    Mutant(
        "fruitless streams without end",
        EXCHANGE + "broke",
        "self._fruitless > MAX_FRUITLESS_STREAMS",
        "False",
        tests=EXCHANGE_TESTS,
    ),
    Mutant(
        "one stream number",
        EXCHANGE + "next_opening",
        "self._stream_number += 1",
        "self._stream_number = 1",
        seed=2,
        tests=EXCHANGE_TESTS,
    ),
    Mutant(
        "a restart goes unnoticed",
        EXCHANGE + "reported",
        "report.incarnation != self.term.info.incarnation",
        "False",
        tests=EXCHANGE_TESTS,
    ),
    Mutant(
        "a silent worker lives",
        LIVENESS + "verdict",
        "now - self._reported_at >= self._limits.report_lost_s",
        "False",
        tests=LIVENESS_TESTS,
    ),
    Mutant(
        "a hung device lives",
        LIVENESS + "verdict",
        "now - self._progress_at >= self._allowance_s()",
        "False",
        seed=2,
        tests=LIVENESS_TESTS,
    ),
    Mutant(
        "rows of old attempts count",
        RESULTS + "consume",
        "request.attempt != row.attempt",
        "False",
        tests=CORE_TESTS + "batching.py",
    ),
    Mutant(
        "results of any term count",
        RESULTS + "_is_next",
        "(identity.epoch, identity.term, identity.incarnation) != expected or ",
        "",
        tests=CORE_TESTS + "results.py",
    ),
    Mutant(
        "attempts are not raised",
        "scheduler_svc.core.request:Request.void_plans",
        "self.attempt += 1",
        "pass",
        seed=10,
        tests=CORE_TESTS + "scheduler.py",
    ),
    Mutant(
        "bad pages stay cached",
        RESULTS + "_retry_row",
        "distrust(state, request)",
        "pass",
        tests=CORE_TESTS + "prefix_cache.py",
    ),
    Mutant(
        "bad numbers stay where they were",
        "scheduler_svc.core.placement:_Pass._suiting",
        "desk.worker.name != request.trouble.avoids",
        "True",
        tests=CORE_TESTS + "quarantine.py",
    ),
    Mutant(
        "everybody is poison",
        "scheduler_svc.core.strikes:strike",
        "len(requests) == 1 and ",
        "",
        tests=CORE_TESTS + "strikes.py",
    ),
    Mutant(
        "struck requests in company",
        "scheduler_svc.core.batching:_next_apart",
        "if worker.in_flight:",
        "if False:",
        seed=4,
        tests=CORE_TESTS + "strikes.py",
    ),
    Mutant(
        "pages are not given back",
        "scheduler_svc.core.transitions:_leave_worker",
        "worker.memory.release(holding)",
        "pass",
        seed=0,
        tests=CORE_TESTS + "scheduler.py",
    ),
    Mutant(
        "one death is enough",
        "scheduler_svc.core.strikes:strike",
        "trouble.strikes >= _STRIKES_BEFORE_POISON",
        "True",
        tests=CORE_TESTS + "strikes.py",
    ),
    Mutant(
        "checksums do not count",
        "worker_svc.rpc.plan_intake:PlanIntake.read",
        "open_message(message.body, message.crc32)",
        "message.body",
        tests="tests/unit/worker_rpc/test_plan_intake.py",
    ),
    Mutant(
        "deadlines do not count",
        "scheduler_svc.core.scheduler:_end_expired",
        "deadline <= state.now",
        "False",
        tests=CORE_TESTS + "scheduler.py",
    ),
)


@contextlib.contextmanager
def switched_off(mutant: Mutant) -> Iterator[None]:
    """The function with the guard's text replaced, while the context lasts, for whoever imported it and by any name."""
    module_name, _, path = mutant.target.partition(":")
    module = importlib.import_module(module_name)
    *owners, name = path.split(".")
    function = getattr(getattr(module, owners[0]) if owners else module, name)
    source = textwrap.dedent(inspect.getsource(function))
    assert mutant.old in source, f"{mutant.name}: the guard has changed, the mutant has not"
    scope: dict[str, FunctionType] = {}
    exec(compile(source.replace(mutant.old, mutant.new), f"<mutant {mutant.name}>", "exec"), module.__dict__, scope)
    original, function.__code__ = function.__code__, scope[name].__code__
    try:
        yield
    finally:
        function.__code__ = original


def notices(mutant: Mutant, seed: int) -> bool:
    """Whether the run of that seed breaks with the guard off."""
    with switched_off(mutant):
        try:
            Life(seed).run()
        except BREAKS:
            return True
    return False


def tests_notice(mutant: Mutant) -> bool:
    """Whether a unit test fails with the guard off."""
    with switched_off(mutant), contextlib.redirect_stdout(io.StringIO()):
        return pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", mutant.tests]) == 1


def noticed_by(mutant: Mutant, *, seeds: int) -> str | None:
    """Who notices first: so many runs, or else the unit tests; None: nobody.

    Only of a mutant that a run has noticed before are runs asked first: the others cost seconds each.
    """
    if mutant.seed is None:
        return _runs_notice(mutant, 0, seeds) if not tests_notice(mutant) else "unit tests"
    return _runs_notice(mutant, mutant.seed, seeds) or ("unit tests" if tests_notice(mutant) else None)


def _runs_notice(mutant: Mutant, first: int, seeds: int) -> str | None:
    seed = next((seed for seed in range(first, first + seeds) if notices(mutant, seed)), None)
    return None if seed is None else f"seed {seed}"


def switch_off(mutants: Sequence[Mutant], *, seeds: int, until: float = math.inf) -> bool:
    """Switch each off and say who noticed. Whether somebody noticed each.

    Args:
        mutants: in this order.
        seeds: how many runs may try.
        until: monotonic seconds; mutants for which there is no time are named.
    """
    unnoticed, left = [], []
    for mutant in mutants:
        if time.monotonic() >= until:
            left.append(mutant.name)
            continue
        by = noticed_by(mutant, seeds=seeds)
        unnoticed += [] if by else [mutant.name]
        print(f"{mutant.name:44} {by or 'NOBODY'}", flush=True)
    print(f"{len(mutants) - len(left)} guards, {len(unnoticed)} not noticed; no time for: {', '.join(left) or 'none'}")
    return not unnoticed


def main() -> int:
    parser = argparse.ArgumentParser(description="Switch guards off, one at a time, and see who notices.")
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--seeds", type=int, default=25)
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {mutant.name for mutant in MUTANTS}
    if unknown:
        parser.error(f"no guard is named {', '.join(sorted(unknown))}")
    chosen = [mutant for mutant in MUTANTS if mutant.name in arguments.names or not arguments.names]
    return 0 if switch_off(chosen, seeds=arguments.seeds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
