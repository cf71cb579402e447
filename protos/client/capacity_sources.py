"""What capacity planning learns from: recordings of plans, figures of `forwardplane bench`, a table of step times.

Reads files and says what is wrong with them; fits nothing.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.client.capacity_costs import FIELD, MeasuredSteps
from protos.service.first_problem import first_problem
from protos.service.plan_recording import Entry, EntryKind, is_recording, read_entries
from protos.service.recording_payloads import decode_attachment
from protos.wire.codec import decode_plan, decode_result
from protos.wire.enums import SubPoolKind
from protos.wire.errors import InvalidRequest
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, PlanTimings
from protos.wire.worker_info import WorkerInfo

_MAX_JSON_BYTES = 64 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSteps:
    """Of all workers of all files."""

    steps: MeasuredSteps
    info: WorkerInfo
    """The first worker's."""


class _Open(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


Positive = Annotated[float, Field(gt=0)]


class _Load(_Open):
    rate: float | None
    concurrency: int


class _Context(_Open):
    workers: Annotated[int, Field(ge=1)]
    load: _Load


class _Quantity(_Open):
    p50: Positive


class _Latencies(_Open):
    inter_token_s: _Quantity


class _Throughput(_Open):
    output_tokens_per_s: Positive
    steady_output_tokens_per_s: Positive | None


class BenchRun(_Open):
    """One file that `forwardplane bench --json` wrote."""

    context: _Context
    measured: Annotated[int, Field(ge=1)]
    prompt_tokens: Annotated[int, Field(ge=1)]
    cached_tokens: Annotated[int, Field(ge=0)]
    output_tokens: Annotated[int, Field(ge=1)]
    latencies: _Latencies
    throughput: _Throughput

    @property
    def rows(self) -> float:
        """Requests at once on one worker."""
        return self.context.load.concurrency / self.context.workers

    @property
    def tokens_per_s(self) -> float:
        """Output of one worker while load was complete."""
        measured = self.throughput.steady_output_tokens_per_s or self.throughput.output_tokens_per_s
        return measured / self.context.workers


def source_kind(path: Path) -> str:
    """`recording`, `bench` or `table`, by content and name.

    Raises:
        InvalidRequest: there is no such file, or it is none of them.
    """
    if not path.is_file():
        raise InvalidRequest(f"{path.name} is no file that can be read", field=FIELD)
    if is_recording(path):
        return "recording"
    if path.suffix == ".json":
        return "bench"
    if path.suffix == ".toml":
        return "table"
    message = (
        f"{path.name} is no recording (`serve --record`), no .json of `bench --json` and no .toml table of step times"
    )
    raise InvalidRequest(message, field=FIELD)


def read_bench_run(path: Path) -> BenchRun:
    """The figures in a file.

    Raises:
        InvalidRequest: it is none, or of an open loop.
    """
    if path.stat().st_size > _MAX_JSON_BYTES:
        raise InvalidRequest(f"{path.name} is larger than {_MAX_JSON_BYTES} bytes", field=FIELD)
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        run = BenchRun.model_validate(content)
    except (ValueError, OSError) as error:
        where = ": ".join(first_problem(error)) if isinstance(error, ValidationError) else "no JSON"
        raise InvalidRequest(f"{path.name} is no result of `bench --json`: {where}", field=FIELD) from error
    if not run.context.load.concurrency:
        message = f"{path.name} was measured with --rate {run.context.load.rate:g}: a fit needs --concurrency"
        raise InvalidRequest(message, field=FIELD)
    return run


def read_recordings(paths: Sequence[Path]) -> RecordedSteps:
    """The answered plans of all files; one that was cut off counts as far as it goes.

    Raises:
        EngineError: no recording, a damaged one, or none that holds an answered plan.
    """
    info: WorkerInfo | None = None
    lines: list[tuple[float, ...]] = []
    for path in paths:
        reader = _StepReader()
        for entry in read_entries(path):
            reader.take(entry)
        lines += reader.lines
        info = info or reader.info
    if info is None or not lines:
        raise InvalidRequest("the recordings hold no answered plan", field=FIELD)
    rows, tokens, contexts, seconds = np.array(lines).T
    steps = MeasuredSteps(decode_rows=rows, prefill_tokens=tokens, contexts=contexts, seconds=seconds)
    return RecordedSteps(steps=steps, info=info)


class _StepReader:
    """Of one file."""

    def __init__(self) -> None:
        self.info: WorkerInfo | None = None
        self.lines: list[tuple[float, ...]] = []
        self._plans: dict[tuple[str, int], ForwardPlan] = {}

    def take(self, entry: Entry) -> None:
        """The next entry."""
        if entry.kind is EntryKind.ATTACH:
            info = decode_attachment(entry.payload).info
            self.info = self.info or info
            self._plans = {key: plan for key, plan in self._plans.items() if key[0] != entry.worker}
        elif entry.kind is EntryKind.PLAN:
            plan = decode_plan(entry.payload)
            self._plans[entry.worker, plan.identity.seq] = plan
        elif entry.kind is EntryKind.RESULT:
            result = decode_result(entry.payload)
            answered = self._plans.pop((entry.worker, result.identity.seq), None)
            if answered is not None and result.rejection is None and answered.rows.num_rows:
                self.lines.append(_line(answered, result))


def _line(plan: ForwardPlan, result: ForwardResult) -> tuple[float, ...]:
    lengths = plan.rows.extend_lens
    decode_rows = int((lengths == 1).sum())
    prefill_tokens = int(lengths.sum()) - decode_rows
    return decode_rows, prefill_tokens, float(plan.rows.seq_lens.sum()), turn_s(result.timings)


def turn_s(timings: PlanTimings) -> float:
    """From the end of the plan before to the end of this one, while requests go on."""
    on_device = timings.host_to_device_ns + timings.forward_ns + timings.sample_ns + timings.device_to_host_ns
    return max(on_device + timings.bubble_ns, 1) / 1e9


def full_pool_pages(info: WorkerInfo) -> int:
    """Usable pages of the pool that holds whole sequences."""
    return next(pool.num_pages - 1 for pool in info.sub_pools if pool.kind is SubPoolKind.FULL)
