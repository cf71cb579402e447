"""A straightforward scheduler over an Executor: one plan at a time, decode rows first, then prompt chunks.

Every plan is validated and sent through the codec, so what the executor sees are read-only views of bytes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from protos.wire.canary_chain import chain_hash, domain_seed
from protos.wire.codec import decode_plan, encode_plan
from protos.wire.enums import Feature, HiddenMode, RowFailure, RowStatus
from protos.wire.plan import ForwardPlan, LogprobColumns, SamplingColumns
from protos.wire.result import ForwardResult
from protos.wire.validate import validate_plan
from tests.support import plans
from worker_svc.executor import Executor


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to run, and what it gave."""

    prompt_ids: Sequence[int]
    max_new: int
    forced_ids: Sequence[int] | None = None
    """Fed instead of the sampled ids."""
    stop_ids: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0
    top_logprobs: int = 0
    score_from: int | None = None
    """First position whose following token's log-probability is asked for."""
    score_top: int = 0
    hidden_mode: HiddenMode = HiddenMode.NULL
    """LAST only with the prompt's last chunk."""
    prefill_only: bool = False
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    """Of each sampled token, where `top_logprobs` is not 0."""
    top: list[list[tuple[int, float]]] = field(default_factory=list)
    prompt_logprobs: list[float] = field(default_factory=list)
    prompt_top: list[list[tuple[int, float]]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    """One a token, as far as asked for."""
    failure: RowFailure | None = None
    pages: list[int] = field(default_factory=list)
    kv_len: int = 0
    handle: int = 0

    @property
    def known_ids(self) -> list[int]:
        """The prompt and the ids that follow it, those that are fed."""
        fed = self.token_ids if self.forced_ids is None else self.forced_ids[: len(self.token_ids)]
        return [*self.prompt_ids, *fed]

    @property
    def is_done(self) -> bool:
        if self.prefill_only and self.kv_len == len(self.prompt_ids):
            return True
        if self.failure is not None or (len(self.token_ids) >= self.max_new and not self.prefill_only):
            return True
        return bool(self.token_ids) and self.token_ids[-1] in self.stop_ids


class PlanDriver:
    """Runs requests to their end on one executor with one full sub-pool."""

    def __init__(self, executor: Executor, *, budget_tokens: int = 256, page_seed: int = 0) -> None:
        self.executor = executor
        self.info = executor.worker_info()
        self.results: list[ForwardResult] = []
        self.change: Callable[[ForwardPlan], ForwardPlan] = lambda plan: plan
        """What happens to a plan on its way."""
        self._budget_tokens = budget_tokens
        self._seq = 0
        (self._pool,) = self.info.sub_pools
        order = np.random.default_rng(page_seed).permutation(self._pool.num_pages - 1) + 1
        self._free_pages = order.tolist()

    def run(self, *requests: Request) -> list[list[int]]:
        """The sampled ids of each request; all start at once."""
        for handle, request in enumerate(requests, start=1):
            request.handle = handle
        waiting = list(requests)
        while waiting:
            self._step(waiting)
            for request in waiting:
                if request.is_done:
                    self._free_pages += request.pages
                    request.pages = []
            waiting = [request for request in waiting if not request.is_done]
        return [request.token_ids for request in requests]

    def _step(self, waiting: list[Request]) -> None:
        rows, placed = self._rows(waiting)
        self._seq += 1
        plan = plans.make_plan(
            rows,
            info=self.info,
            seq=self._seq,
            sampling=_sampling(placed),
            logprobs=_logprobs(placed, rows),
        )
        sample_indices = plans.u32(*(request.sample_index for request, _ in placed))
        modes = [_hidden_mode(request, row) for (request, _), row in zip(placed, rows, strict=True)]
        hidden_modes = plans.u8(*modes) if set(modes) - {HiddenMode.NULL} else None
        columns = replace(plan.rows, sample_indices=sample_indices, hidden_modes=hidden_modes, **self._canary(placed))
        plan = decode_plan(encode_plan(self.change(replace(plan, rows=columns))))
        validate_plan(plan, self.info)
        result = self.executor.execute(plan)
        self.results.append(result)
        for row, (request, length) in enumerate(placed):
            self._consume(request, length, row=row, result=result)

    def _canary(self, placed: list[tuple[Request, int]]) -> dict[str, np.ndarray]:
        if Feature.CANARY not in self.info.features:
            return {}
        seed = domain_seed(b"driver")
        known = [np.array(request.known_ids[: request.kv_len]) for request, _ in placed]
        return {
            "canary_seeds": plans.u64(*[seed] * len(placed)),
            "canary_hashes": plans.u64(*(chain_hash(seed, ids, 0) for ids in known)),
        }

    def _rows(self, waiting: list[Request]) -> tuple[list[plans.Row], list[tuple[Request, int]]]:
        budget = self._budget_tokens
        rows, placed = [], []
        decoding = [request for request in waiting if len(request.known_ids) - request.kv_len == 1 and request.kv_len]
        for request in decoding + [request for request in waiting if request not in decoding]:
            length = len(request.known_ids) - request.kv_len
            if request not in decoding:
                length = min(length, budget)
                budget -= length
            if length == 0 or len(rows) >= self.info.limits.max_rows:
                continue
            end = request.kv_len + length
            while len(request.pages) * self._pool.page_size < end:
                request.pages.append(self._free_pages.pop())
            rows.append(
                plans.Row(
                    cached=request.kv_len,
                    extend=length,
                    samples=int(end == len(request.known_ids) and not request.prefill_only),
                    handle=request.handle,
                    ids=request.known_ids[request.kv_len : end],
                    pages=list(request.pages),
                )
            )
            placed.append((request, length))
        return rows, placed

    def _consume(self, request: Request, length: int, *, row: int, result: ForwardResult) -> None:
        columns = result.rows
        assert columns is not None
        request.kv_len += length
        assert columns.handles[row] == request.handle
        assert columns.positions[row] == request.kv_len - 1
        if columns.statuses[row] == RowStatus.FAILED:
            request.failure = RowFailure(int(columns.failures[row]))
        _take_inputs(request, result, row=row)
        if columns.statuses[row] != RowStatus.TOKEN:
            return
        request.token_ids.append(int(columns.token_ids[row]))
        if request.top_logprobs:
            logprobs = result.logprobs
            span = slice(logprobs.output_top_indptr[row], logprobs.output_top_indptr[row + 1])
            request.logprobs.append(float(logprobs.output[row]))
            ids, values = logprobs.output_top_ids[span].tolist(), logprobs.output_top_values[span].tolist()
            request.top.append(list(zip(ids, values, strict=True)))


def _sampling(placed: list[tuple[Request, int]]) -> SamplingColumns | None:
    requests = [request for request, _ in placed]
    if not any(request.temperature for request in requests):
        return None
    return SamplingColumns(
        temperatures=plans.f32(*(request.temperature for request in requests)),
        top_ks=plans.u32(*(request.top_k for request in requests)),
        top_ps=plans.f32(*(request.top_p for request in requests)),
        min_ps=plans.f32(*(request.min_p for request in requests)),
        seeds=plans.u64(*(request.seed for request in requests)),
    )


def _logprobs(placed: list[tuple[Request, int]], rows: list[plans.Row]) -> LogprobColumns | None:
    counts = [request.top_logprobs for request, _ in placed]
    scored = [
        _scored(request, row) if request.score_from is not None else (row.cached + row.extend, [])
        for (request, _), row in zip(placed, rows, strict=True)
    ]
    wants_prompt = any(targets for _, targets in scored)
    if not any(counts) and not wants_prompt:
        return None
    columns = LogprobColumns()
    if any(counts):
        wanted = plans.u8(*(int(count > 0) for count in counts))
        columns = LogprobColumns(output_wanted=wanted, output_top_counts=plans.u8(*counts))
    if wants_prompt:
        columns = replace(
            columns,
            prompt_starts=plans.i32(*(start for start, _ in scored)),
            prompt_top_counts=plans.u8(*(request.score_top for request, _ in placed)),
            target_indptr=plans.u32(0, *np.cumsum([len(targets) for _, targets in scored])),
            target_ids=plans.i32(*(token for _, targets in scored for token in targets)),
        )
    return columns


def _scored(request: Request, row: plans.Row) -> tuple[int, list[int]]:
    """First position and the tokens that follow. Behind the prompt's end of a row that does not sample comes a 0."""
    end = row.cached + row.extend
    assert request.score_from is not None
    start = min(max(request.score_from, row.cached), end)
    following = [*request.known_ids, 0][start + 1 : end + 1]
    return start, following[: end - start - row.samples]


def _hidden_mode(request: Request, row: plans.Row) -> HiddenMode:
    if request.hidden_mode is HiddenMode.LAST and row.cached + row.extend < len(request.prompt_ids):
        return HiddenMode.NULL
    return request.hidden_mode if row.cached < len(request.prompt_ids) else HiddenMode.NULL


def _take_inputs(request: Request, result: ForwardResult, *, row: int) -> None:
    logprobs, states = result.logprobs, result.hidden_states
    if logprobs is not None and logprobs.prompt is not None:
        span = range(logprobs.prompt_indptr[row], logprobs.prompt_indptr[row + 1])
        request.prompt_logprobs += logprobs.prompt[span.start : span.stop].tolist()
        for position in span:
            best = slice(logprobs.prompt_top_indptr[position], logprobs.prompt_top_indptr[position + 1])
            pairs = zip(logprobs.prompt_top_ids[best].tolist(), logprobs.prompt_top_values[best].tolist(), strict=True)
            request.prompt_top.append(list(pairs))
    if states is not None:
        assert states.dtype == "float32"
        table = states.states.view(np.float32).reshape(-1, states.hidden_size)
        request.states += list(table[states.indptr[row] : states.indptr[row + 1]])
