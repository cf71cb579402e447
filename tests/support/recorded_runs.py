"""Runs that are recorded as a link records them, and recordings that are changed on purpose."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from protos.service.plan_recording import Entry, EntryKind, RecordingHeader, RecordingWriter, read_entries
from protos.wire.codec import decode_result, encode_result
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
from protos.wire.worker_info import Buckets
from scheduler_svc.links.recorder import PlanRecorder, RecordingSettings
from tests.support.plan_driver import PlanDriver, Request
from worker_svc.executor import Executor
from worker_svc.replay.graph_choice import with_graphs
from worker_svc.replay.replayer import Replayer, ReplayRules

WORKER = "worker:1"


def settings(path: Path, **changes: int) -> RecordingSettings:
    values = {"max_file_bytes": 1 << 30, "max_files": 100, **changes}
    return RecordingSettings(path=path, model="m", weights_fingerprint="w", **values)


class PatientRecorder(PlanRecorder):
    """Waits where the loop must not: nothing is left out."""

    def _put(self, worker, content) -> None:
        while self._queue.full():
            time.sleep(0.001)
        super()._put(worker, content)


class RecordedExecutor:
    """Passes every plan and result to a recorder."""

    def __init__(self, executor: Executor, recorder: PlanRecorder) -> None:
        self._executor = executor
        self._recorder = recorder
        self.worker_info = executor.worker_info
        recorder.attached(WORKER, epoch=1, term=1, info=executor.worker_info())

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        self._recorder.plan_sent(WORKER, plan)
        result = self._executor.execute(plan)
        self._recorder.result_received(WORKER, result)
        return result

    def reset(self) -> None:
        self._executor.reset()

    def close(self) -> None:
        self._executor.close()


def recorded_run(
    path: Path,
    executor: Executor,
    waves: Sequence[Sequence[Request]],
    *,
    change: Callable[[ForwardPlan], ForwardPlan] = lambda plan: plan,
    **changes: int,
) -> list[Path]:
    """The files, newest first; each wave of requests runs on what pages the one before gave back.

    `change`: what happens to a plan before it is sent.
    """
    recorder = PatientRecorder(settings(path, **changes))
    recorder.start()
    driver = PlanDriver(RecordedExecutor(executor, recorder), budget_tokens=48)
    driver.change = change
    for wave in waves:
        driver.run(*wave)
    recorder.stop()
    return sorted(path.parent.glob(f"{path.name}*"), key=lambda found: (len(found.name), found.name))


def replayed(
    path: Path,
    executor: Executor,
    *,
    tolerance: float = 0.0,
    worker: str = WORKER,
    graphs: Sequence[Buckets] = (),
) -> Replayer:
    on_graphs = partial(with_graphs, buckets=graphs)
    rules = ReplayRules(worker=worker, compares=True, logprob_tolerance=tolerance, on_graphs=on_graphs)
    replayer = Replayer(executor, rules)
    for _ in replayer.run(read_entries(path)):
        pass
    return replayer


def rewritten(path: Path, target: Path, change: Callable[[Entry], Entry | None]) -> Path:
    """A copy with every entry changed, or left out."""
    header = RecordingHeader(model="m", weights_fingerprint="w", part=0)
    writer = RecordingWriter(target, header)
    for entry in read_entries(path):
        if entry.kind in (EntryKind.HEADER, EntryKind.END):
            continue
        changed = change(entry)
        if changed is not None:
            writer.add(changed)
    writer.close()
    return target


def with_result(entry: Entry, seq: int, change: Callable[[ForwardResult], ForwardResult]) -> Entry:
    """The entry; if it is that plan's result, a changed one."""
    if entry.kind is not EntryKind.RESULT:
        return entry
    result = decode_result(entry.payload)
    if result.identity.seq != seq:
        return entry
    return replace(entry, payload=encode_result(change(result)))


def with_other_token(result: ForwardResult, row: int) -> ForwardResult:
    tokens = result.rows.token_ids.copy()
    tokens[row] += 1
    return replace(result, rows=replace(result.rows, token_ids=tokens))
