"""The scheduling core with exact fake workers around it. After every step: invariants, and order of every stream."""

from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from protos.wire.codec import encode_plan
from protos.wire.enums import FinishReason, RowFailure
from protos.wire.limits import MAX_PLAN_BYTES
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, PlanRejection
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import (
    Event,
    Grammar,
    Instruction,
    MaskReady,
    NeedMask,
    PromptAnswered,
    RequestCancelled,
    RequestFinished,
    RequestRefused,
    RequestSpec,
    RequestSubmitted,
    ResultReceived,
    Sampling,
    SendPlan,
    StreamKey,
    TokensReleased,
    WorkerAttached,
    WorkerLost,
)
from scheduler_svc.core.scheduler import step
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.state import SchedulerState, check_invariants
from tests.support.fake_worker import Draw, FakeWorker, RowRules, expected_output, mix
from tests.support.plans import CORE_FEATURES, full_sub_pool, make_info, make_limits
from worker_svc.executor import Executor

NEVER = 1e9


def small_info(
    *, num_pages: int = 65, page_size: int = 4, window: int = 1, logits_width: int = 97, **changes: object
) -> WorkerInfo:
    limits = {
        "window": window,
        "context_tokens": 1024,
        "max_rows": 64,
        "max_tokens": 128,
        "max_plan_bytes": MAX_PLAN_BYTES,
    }
    limits |= {name: changes.pop(name) for name in list(changes) if name in limits}
    values: dict[str, object] = {
        "sub_pools": (full_sub_pool(num_pages=num_pages, page_size=page_size),),
        "limits": make_limits(**limits),
        "logits_width": logits_width,
        "features": CORE_FEATURES,
    }
    return make_info(**(values | changes))


def make_spec(
    stream_id: int,
    *,
    prompt: int | Sequence[int] = 5,
    max_tokens: int = 4,
    sampling: Sampling | None = None,
    deadline_s: float = NEVER,
    **changes: object,
) -> RequestSpec:
    """A prompt of that many tokens, made from the stream id, or of these tokens."""
    ids = [(stream_id * 31 + 7 * index) % 97 for index in range(prompt)] if isinstance(prompt, int) else prompt
    return RequestSpec(
        stream=StreamKey(0, stream_id),
        request_id=f"request-{stream_id}",
        prompt_ids=np.array(ids, np.int32),
        sampling=sampling or Sampling(),
        max_tokens=max_tokens,
        deadline_s=deadline_s,
        **changes,
    )


def oracle(info: WorkerInfo, spec: RequestSpec) -> list[int]:
    """What the request gets when nothing goes wrong, and whatever goes wrong."""
    sampling = spec.sampling
    draw = Draw(
        sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, sampling.seed, sampling.sample_index
    )

    def ends(token_id: int, count: int) -> bool:
        return token_id in spec.stop_token_ids and count > spec.min_tokens

    def rules(output: list[int]) -> RowRules:
        strengths = (sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
        return RowRules(
            strengths, tuple(spec.prompt_ids.tolist()), tuple(output), sampling.bias, _allowed(info, spec, output)
        )

    return expected_output(info, spec.prompt_ids.tolist(), draw, max_tokens=spec.max_tokens, ends=ends, rules=rules)


def _allowed(info: WorkerInfo, spec: RequestSpec, output: list[int]) -> frozenset[int] | None:
    """None: all."""
    whole = frozenset(range(info.logits_width))
    allowed = whole & frozenset(spec.sampling.allowed_ids or whole) - frozenset(spec.sampling.banned_ids)
    if len(output) < spec.min_tokens:
        allowed -= spec.stop_token_ids
    if spec.grammar is not None:
        allowed &= grammar_ids(spec.grammar, output)
    return None if allowed == whole else allowed


def grammar_ids(grammar: Grammar, output: Sequence[int]) -> frozenset[int]:
    """A made-up grammar: about three of four ids, by the whole output."""
    return frozenset(token_id for token_id in range(97) if mix(len(grammar.source), token_id, *output) % 4)


def mask_answer(wanted: NeedMask) -> MaskReady:
    flags = np.zeros(104, np.uint8)
    flags[list(grammar_ids(wanted.grammar, wanted.output_ids.tolist()))] = 1
    return MaskReady(wanted.stream, len(wanted.output_ids), np.packbits(flags, bitorder="little"))


class CoreHarness:
    """Drives `step`; holds plans until `deliver` runs them."""

    steps_a_check = 1
    """Runs of very many steps look at the books more rarely."""

    def __init__(self, settings: CoreSettings | None = None) -> None:
        self.state = SchedulerState.create(settings or CoreSettings())
        self.steps = 0
        self.now = 0.0
        self.infos: dict[str, WorkerInfo] = {}
        self.workers: dict[str, Executor] = {}
        self.pending: dict[str, deque[ForwardPlan]] = {}
        self.specs: dict[StreamKey, RequestSpec] = {}
        self.outputs: dict[StreamKey, list[int]] = {}
        self.logprobs: dict[StreamKey, list[object]] = {}
        self.prompts: dict[StreamKey, PromptAnswered] = {}
        self.ends: dict[StreamKey, RequestFinished | RequestRefused] = {}
        self.plans: list[tuple[str, ForwardPlan]] = []
        self.masks: deque[NeedMask] = deque()
        """Questions without an answer."""
        self.terms: dict[str, int] = {}
        self.fail_row: Callable[[ForwardPlan, int], RowFailure | None] = lambda plan, row: None
        self.reject: Callable[[ForwardPlan], PlanRejection | None] = lambda plan: None

    def step(self, *events: Event) -> list[Instruction]:
        self.steps += 1
        out = step(self.state, events, self.now)
        if self.steps % self.steps_a_check == 0:
            check_invariants(self.state)
        for instruction in out:
            self._record(instruction)
        return out

    def attach(self, name: str = "w0", info: WorkerInfo | None = None) -> list[Instruction]:
        info = info or self.infos.get(name) or small_info()
        self.infos[name] = info
        self.terms[name] = self.terms.get(name, 0) + 1
        self.workers[name] = self.make_worker(info)
        self.pending[name] = deque()
        return self.step(WorkerAttached(name, info, 1, self.terms[name]))

    def make_worker(self, info: WorkerInfo) -> Executor:
        return FakeWorker(
            info, fail_row=lambda plan, row: self.fail_row(plan, row), reject=lambda plan: self.reject(plan)
        )

    def lose(self, name: str = "w0") -> list[Instruction]:
        del self.workers[name]
        self.pending[name].clear()
        return self.step(WorkerLost(name))

    def submit(self, *specs: RequestSpec) -> list[Instruction]:
        for spec in specs:
            self.specs[spec.stream] = spec
        return self.step(*[RequestSubmitted(spec) for spec in specs])

    def resume(self, spec: RequestSpec, output_ids: Sequence[int]) -> list[Instruction]:
        """Another scheduler's request, whose caller has these tokens."""
        self.specs[spec.stream] = spec
        self.outputs[spec.stream] = list(output_ids)
        return self.step(RequestSubmitted(spec, tuple(output_ids)))

    def cancel(self, stream_id: int, reason: FinishReason = FinishReason.ABORT) -> list[Instruction]:
        return self.step(RequestCancelled(StreamKey(0, stream_id), reason))

    def answer_mask(self) -> list[Instruction]:
        return self.step(mask_answer(self.masks.popleft()))

    def execute(self, name: str = "w0") -> ForwardResult:
        """Run the worker's next plan, without giving the result to the core."""
        return self.workers[name].execute(self.pending[name].popleft())

    def deliver(self, name: str = "w0") -> list[Instruction]:
        return self.step(ResultReceived(name, self.execute(name)))

    def run(self, *, most_steps: int = 10_000) -> None:
        """Deliver until nothing is in flight."""
        for _ in range(most_steps):
            busy = [name for name in self.workers if self.pending[name]]
            if not busy and not self.masks:
                return
            if self.masks:
                self.answer_mask()
            for name in busy:
                self.deliver(name)
        raise AssertionError("the core did not come to rest")

    def output(self, stream_id: int) -> list[int]:
        return self.outputs.get(StreamKey(0, stream_id), [])

    def end(self, stream_id: int) -> RequestFinished | RequestRefused | None:
        return self.ends.get(StreamKey(0, stream_id))

    def assert_balanced(self) -> None:
        """Nothing is held any more."""
        assert not self.state.streams
        assert not len(self.state.waiting)
        assert self.state.waiting.tokens == 0
        for worker in self.state.workers.values():
            assert not worker.running
            assert worker.memory.available() == [allocator.usable for allocator in worker.memory.allocators]

    def _record(self, instruction: Instruction) -> None:
        match instruction:
            case SendPlan(worker, plan):
                self._record_plan(worker, plan)
            case PromptAnswered():
                assert instruction.stream not in self.ends, "an answer after the last word"
                assert instruction.stream not in self.prompts, "a prompt answered twice"
                assert not self.outputs.get(instruction.stream), "a prompt answered after its first token"
                self.prompts[instruction.stream] = instruction
            case TokensReleased():
                got = self.outputs.setdefault(instruction.stream, [])
                assert instruction.stream not in self.ends, "a token after the last word"
                assert instruction.first_pos == len(got), "a token skipped or repeated"
                got.extend(instruction.token_ids)
                self.logprobs.setdefault(instruction.stream, []).extend(instruction.logprobs)
            case RequestFinished() | RequestRefused():
                assert instruction.stream not in self.ends, "two last words"
                self.ends[instruction.stream] = instruction
            case NeedMask():
                assert instruction.stream not in self.ends, "a mask wanted after the last word"
                assert instruction.output_ids.tolist() == self.outputs.get(instruction.stream, [])
                self.masks.append(instruction)

    def _record_plan(self, worker: str, plan: ForwardPlan) -> None:
        live = {request.handle for request in self.state.streams.values()}
        handles = set(plan.rows.handles.tolist())
        assert handles <= live or worker not in self.state.workers, "a plan with a request that had ended"
        limit = self.infos[worker].limits.max_plan_bytes
        assert limit == MAX_PLAN_BYTES or len(encode_plan(plan)) <= limit, "a plan larger than its worker takes"
        self.plans.append((worker, plan))
        self.pending[worker].append(plan)
