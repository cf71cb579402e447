"""How well the cost model predicts a real mixed load: SmolLM2 in this process, the core's plans, their device times.

Each plan's prediction is the one it was sent with, before its own time was learnt from. The recorded run, with rows,
prefill tokens, context, predicted and measured time of each plan, is left in `build/bench_cost_model.json`.

    python -m pytest -m bench -s tests/bench/test_bench_cost_model.py
"""

import json
import random
import statistics
import time
from dataclasses import asdict, dataclass

import numpy as np
import pytest

from protos.wire.plan import ForwardPlan
from scheduler_svc.core.events import (
    Event,
    PlanTimed,
    RequestFinished,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    Sampling,
    SendPlan,
    StreamKey,
    WorkerAttached,
)
from scheduler_svc.core.scheduler import step
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState
from tests.bench.peers import ROOT
from tests.support.model import model_folder
from worker_svc.build import build_tp_model_worker
from worker_svc.runners.executor_settings import ExecutorSettings

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(1800)]
REQUESTS = {"fast": 60, "reproducible": 20}
"""By numerics: the slower ones get fewer."""
AT_ONCE = 10
PROMPTS, OUTPUTS = (4, 24, 80, 300, 900), (4, 16, 48, 96)
MOST_TIMES_HINDSIGHT, LEAST_HINDSIGHT = 1.5, 0.05
"""The median error may be so many times that of the same formula fitted to the whole run afterwards: what is beyond the
formula, and the noise of the machine, are in both."""
WORKER = "w0"


@dataclass
class PlanRecord:
    """One plan of the recorded run."""

    rows: int
    tokens: int
    prefill_tokens: int
    context: int
    budget_tokens: int
    budget_ms: int
    predicted_s: float | None
    measured_s: float = 0.0

    @property
    def error(self) -> float | None:
        """Relative to what was measured."""
        return None if self.predicted_s is None else abs(self.predicted_s - self.measured_s) / self.measured_s

    @property
    def is_full(self) -> bool:
        """Whether it carries about as many prefill tokens as it may."""
        return self.prefill_tokens > 0.9 * self.budget_tokens


class Run:
    """The core and an executor, one plan after the other, as the loop would drive them."""

    def __init__(self, numerics: str) -> None:
        settings = ExecutorSettings(numerics=numerics, num_pages=2000)
        self.executor = build_tp_model_worker(model_folder(), settings)
        self.requests = REQUESTS[numerics]
        self.random = random.Random(5)
        self.state = SchedulerState.create(CoreSettings())
        self.pending: list[tuple[ForwardPlan, PlanRecord]] = []
        self.records: list[PlanRecord] = []
        self.open = 0
        self.tell(WorkerAttached(WORKER, self.executor.worker_info(), 1, 1))

    @property
    def target_s(self) -> float:
        return self.state.workers[WORKER].budget_rule.target_s

    def drive(self) -> list[PlanRecord]:
        """Keep a mixed load going until every request has ended."""
        submitted = 0
        while submitted < self.requests or self.open:
            if submitted < self.requests and self.open < AT_ONCE and self.random.random() < 0.4:
                submitted += 1
                self.open += 1
                self.tell(RequestSubmitted(self.spec(submitted)))
            if self.pending:
                plan, record = self.pending.pop(0)
                result = self.executor.execute(plan)
                self.records.append(record)
                self.tell(ResultReceived(WORKER, result), record=record)
        return self.records

    def spec(self, number: int) -> RequestSpec:
        rng = np.random.default_rng(number)
        return RequestSpec(
            stream=StreamKey(0, number),
            request_id=str(number),
            prompt_ids=rng.integers(100, 40_000, self.random.choice(PROMPTS), dtype=np.int32),
            sampling=Sampling(temperature=0.8, seed=number),
            max_tokens=self.random.choice(OUTPUTS),
            deadline_s=1e12,
        )

    def tell(self, event: Event, *, record: PlanRecord | None = None) -> None:
        for said in step(self.state, [event], time.monotonic()):
            match said:
                case SendPlan(_, plan):
                    self.pending.append((plan, self.record(plan)))
                case PlanTimed(_, predicted_s, measured_s):
                    assert record is not None
                    assert predicted_s == record.predicted_s
                    record.measured_s = measured_s
                case RequestFinished():
                    self.open -= 1

    def record(self, plan: ForwardPlan) -> PlanRecord:
        worker = self.state.workers[WORKER]
        sent = next(sent for sent in worker.in_flight if sent.seq == plan.identity.seq)
        lengths = plan.rows.extend_lens
        return PlanRecord(
            rows=plan.rows.num_rows,
            tokens=sent.shape.tokens,
            prefill_tokens=int(lengths[lengths > 1].sum()),
            context=sent.shape.context,
            budget_tokens=worker.budget_tokens,
            budget_ms=plan.identity.budget_ms,
            predicted_s=sent.predicted_s,
        )


@pytest.mark.parametrize("numerics", ["fast", "reproducible"])
def test_the_cost_model_on_a_recorded_run(numerics: str) -> None:
    run = Run(numerics)
    records = [record for record in run.drive() if record.predicted_s is not None]
    errors = [record.error for record in records if record.error is not None]
    full = [record for record in records if record.is_full and record.budget_tokens > 64]
    budget_errors = [abs(record.measured_s - run.target_s) / run.target_s for record in full]
    late = [record for record in records if record.measured_s > record.budget_ms / 1e3]
    print(f"\n{numerics}: {len(records)} plans predicted, of {len(run.records)}")
    for name, some in {
        "all": records,
        "decode only": [record for record in records if not record.prefill_tokens],
        "with prefill": [record for record in records if record.prefill_tokens],
    }.items():
        found = [record.error for record in some if record.error is not None]
        print(f"  {name:13} {len(found):5} plans, error of time: {_quantiles(found)}")
    hindsight = hindsight_errors(records)
    print(f"  in hindsight  {len(hindsight):5} plans, error of time: {_quantiles(hindsight)}")
    print(
        f"  full budgets  {len(full):5} plans, error against {run.target_s * 1e3:.0f} ms: {_quantiles(budget_errors)}"
    )
    print(f"  plans past their deadline: {len(late)}")
    _keep(numerics, run.records)

    assert len(records) > 0.8 * len(run.records)
    assert statistics.median(errors) <= MOST_TIMES_HINDSIGHT * max(statistics.median(hindsight), LEAST_HINDSIGHT)
    assert not late


def hindsight_errors(records: list[PlanRecord]) -> list[float]:
    """Relative errors of the best base, cost a token and cost of context for all of them together."""
    measured = np.array([record.measured_s for record in records])
    features = np.array([[1, record.tokens, record.context] for record in records]) / measured[:, None]
    coefficients, *_ = np.linalg.lstsq(features, np.ones(len(records)), rcond=None)
    return np.abs(features @ coefficients - 1).tolist()


def _quantiles(errors: list[float]) -> str:
    if len(errors) < 2:
        return "too few"
    tenths = statistics.quantiles(errors, n=10)
    return f"median {statistics.median(errors):.1%}, p90 {tenths[-1]:.1%}"


def _keep(numerics: str, records: list[PlanRecord]) -> None:
    path = ROOT / "build" / "bench_cost_model.json"
    path.parent.mkdir(exist_ok=True)
    kept = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(kept | {numerics: [asdict(record) for record in records]}, indent=1))
