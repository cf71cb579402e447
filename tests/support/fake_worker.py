"""An exact worker without a model: a wrong page, order, reference, position, seed or token id is a wrong token.

KV is one tag per (sub-pool, page, offset): a hash chain over the tokens of the sequence and their positions, read and
written through the page tables. A sampled token is a hash of all tags the row sees through its tables, so it is right
only if every page holds what the plan's author believes. `expected_output` computes the same without pages.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from protos.wire.enums import RowFailure, RowStatus, SubPoolKind
from protos.wire.plan import ForwardPlan, Mask, PageTable
from protos.wire.result import ForwardOutcome, ForwardResult, PlanRejection, ResultColumns, ResultLogprobs
from protos.wire.validate import validate_plan
from protos.wire.worker_info import SubPool, WorkerInfo
from tests.support.fake_inputs import with_inputs

_WORD = (1 << 64) - 1
_START = 0x243F6A8885A308D3


def mix(*values: int) -> int:
    state = _START
    for value in values:
        state = ((state ^ (value & _WORD)) * 0x9E3779B97F4A7C15) & _WORD
        state ^= state >> 29
    return state


@dataclass(frozen=True, slots=True)
class Draw:
    """The sampling of one row, as far as it changes the token."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    sample_index: int = 0

    def word(self) -> int:
        if self.temperature == 0:
            return 0
        bits = [_float_bits(value) for value in (self.temperature, self.top_p, self.min_p)]
        return mix(*bits, self.top_k, self.seed, self.sample_index)


def tag_after(previous: int, token_id: int, position: int) -> int:
    return mix(previous, token_id, position)


@dataclass(frozen=True, slots=True)
class RowRules:
    """The penalties, bias and mask of one row, as far as they change the token."""

    strengths: tuple[float, float, float] = (1.0, 0.0, 0.0)
    prompt_ids: tuple[int, ...] = ()
    output_ids: tuple[int, ...] = ()
    """With repetition, in any order."""
    bias: tuple[tuple[int, float], ...] = ()
    allowed: frozenset[int] | None = None

    def word(self) -> int:
        words = [mix(token_id, _float_bits(value)) for token_id, value in sorted(self.bias)]
        if self.strengths != (1, 0, 0):
            prompt = sorted(set(self.prompt_ids)) if self.strengths[0] != 1 else []
            words += [mix(1, *map(_float_bits, self.strengths)), mix(2, *prompt), mix(3, *sorted(self.output_ids))]
        return mix(*words)


NO_RULES = RowRules()


def pick_token(
    views: Sequence[Sequence[int]], draw: Draw, *, position: int, logits_width: int, rules: RowRules = NO_RULES
) -> int:
    """The token at `position`, from the tags each sub-pool shows."""
    word = mix(*[mix(*view) for view in views], draw.word(), rules.word(), position)
    if rules.allowed is None:
        return word % logits_width
    allowed = sorted(rules.allowed)
    return allowed[word % len(allowed)]


def _float_bits(value: float) -> int:
    return int(np.float32(value).view(np.uint32))


def expected_output(
    info: WorkerInfo,
    prompt_ids: Sequence[int],
    draw: Draw,
    *,
    max_tokens: int,
    ends: Callable[[int, int], bool],
    rules: Callable[[list[int]], RowRules] = lambda output: NO_RULES,
) -> list[int]:
    """What a request must get; `ends(token_id, output tokens so far, this one included)` ends it early."""
    tokens = [int(token) for token in prompt_ids]
    tags: list[int] = []
    output: list[int] = []
    while len(output) < max_tokens:
        for position in range(len(tags), len(tokens)):
            tags.append(tag_after(tags[-1] if tags else 0, tokens[position], position))
        views = [tags[_first_visible(pool, len(tags)) :] for pool in info.sub_pools]
        token = pick_token(views, draw, position=len(tags), logits_width=info.logits_width, rules=rules(output))
        tokens.append(token)
        output.append(token)
        if ends(token, len(output)):
            break
    return output


def _first_visible(pool: SubPool, seq_len: int) -> int:
    return max(0, seq_len - pool.window_tokens) if pool.kind is SubPoolKind.WINDOW else 0


@dataclass(frozen=True, slots=True)
class _Sampled:
    """What the ring keeps of one row."""

    handle: int
    attempt: int
    position: int
    token_id: int


class FakeWorker:
    """An `Executor`. Plans must come in order; a plan that `validate_plan` refuses raises."""

    def __init__(
        self,
        info: WorkerInfo,
        *,
        fail_row: Callable[[ForwardPlan, int], RowFailure | None] = lambda plan, row: None,
        reject: Callable[[ForwardPlan], PlanRejection | None] = lambda plan: None,
    ) -> None:
        self._info = info
        self._fail_row = fail_row
        self._reject = reject
        self.executed: list[ForwardPlan] = []
        self.reset()

    def worker_info(self) -> WorkerInfo:
        return self._info

    def reset(self) -> None:
        """A new life of the pages: every slot holds a value of its own that no sequence has."""
        self._next_seq = 1
        self._ring: dict[int, list[_Sampled | None]] = {}
        self._kv = [
            [mix(0xDEAD, sub_pool, slot) for slot in range(pool.num_pages * pool.page_size)]
            for sub_pool, pool in enumerate(self._info.sub_pools)
        ]

    @property
    def next_seq(self) -> int:
        return self._next_seq

    def close(self) -> None:
        self._ring.clear()

    def execute(self, plan: ForwardPlan) -> ForwardResult:
        validate_plan(plan, self._info)
        assert plan.identity.seq == self._next_seq, "plans executed out of order"
        self._next_seq += 1
        self.executed.append(plan)
        self._ring.pop(plan.identity.seq - self._info.limits.window - 2, None)
        rejection = self._reject(plan)
        if rejection is not None:
            self._ring[plan.identity.seq] = []
            return ForwardResult(identity=plan.identity, rejection=rejection)
        answers = [self._run_row(plan, row, tokens) for row, tokens in enumerate(_row_tokens(plan))]
        failed = [isinstance(answer, RowFailure) for answer in answers]
        self._ring[plan.identity.seq] = [
            _sampled(plan, row, answer) if isinstance(answer, int) else None for row, answer in enumerate(answers)
        ]
        result = _result(plan, answers, logits_width=self._info.logits_width)
        return with_inputs(result, plan, lambda row: [] if failed[row] else self._tags(plan, row))

    def _tags(self, plan: ForwardPlan, row: int) -> list[int]:
        """What the first sub-pool holds of the row's tokens in this plan."""
        slots = _slots(plan.page_tables[0], row, page_size=self._info.sub_pools[0].page_size)
        first, end = int(plan.rows.first_positions[row]), int(plan.rows.seq_lens[row])
        return [self._kv[0][slots[position]] for position in range(first, end)]

    def _run_row(self, plan: ForwardPlan, row: int, tokens: list[int | tuple[int, int]]) -> int | RowFailure | None:
        """A token, a failure, or None for a row that does not sample."""
        ids = [self._resolve(plan, row, token, offset) for offset, token in enumerate(tokens)]
        if None in ids:
            return RowFailure.DEPENDENCY
        failure = self._fail_row(plan, row)
        first, seq_len = int(plan.rows.first_positions[row]), int(plan.rows.seq_lens[row])
        views = []
        for table, pool, kv in zip(plan.page_tables, self._info.sub_pools, self._kv, strict=True):
            slots = _slots(table, row, page_size=pool.page_size)
            for position, token_id in zip(range(first, seq_len), ids, strict=True):
                previous = kv[slots[position - 1]] if position else 0
                spoiled = 0xBAD if failure is RowFailure.NAN else 0
                kv[slots[position]] = tag_after(previous, token_id, position) ^ spoiled
            views.append([kv[slots[position]] for position in range(_first_visible(pool, seq_len), seq_len)])
        if failure is not None:
            return failure
        if not plan.rows.samples[row]:
            return None
        referenced = [ids[offset] for offset, token in enumerate(tokens) if not isinstance(token, int)]
        rules = row_rules(plan, row, logits_width=self._info.logits_width, referenced=referenced)
        width = self._info.logits_width
        return pick_token(views, _draw(plan, row), position=seq_len, logits_width=width, rules=rules)

    def _resolve(self, plan: ForwardPlan, row: int, token: int | tuple[int, int], offset: int) -> int | None:
        if isinstance(token, int):
            return token
        seq, source_row = token
        ring_rows = self._ring.get(seq)
        assert ring_rows is not None, "a reference to a plan that left the ring"
        source = ring_rows[source_row] if source_row < len(ring_rows) else None
        if source is None or (source.handle, source.attempt) != (plan.rows.handles[row], plan.rows.attempts[row]):
            return None
        assert source.position == plan.rows.first_positions[row] + offset, "a reference to another position's token"
        return source.token_id


def _row_tokens(plan: ForwardPlan) -> Iterator[list[int | tuple[int, int]]]:
    """Ids, or (seq, row) of references, row after row."""
    tokens = plan.tokens
    references = iter(())
    if tokens.sources is not None:
        assert tokens.ref_seqs is not None
        assert tokens.ref_rows is not None
        references = zip(tokens.ref_seqs.tolist(), tokens.ref_rows.tolist(), strict=True)
    sources = [0] * len(tokens.ids) if tokens.sources is None else tokens.sources.tolist()
    resolved = [
        next(references) if source else token for token, source in zip(tokens.ids.tolist(), sources, strict=True)
    ]
    begin = 0
    for length in plan.rows.extend_lens.tolist():
        yield resolved[begin : begin + length]
        begin += length


def _slots(table: PageTable, row: int, *, page_size: int) -> dict[int, int]:
    """Position -> slot of the row in one sub-pool."""
    start = 0 if table.start_positions is None else int(table.start_positions[row])
    pages = table.indices[table.indptr[row] : table.indptr[row + 1]].tolist()
    return {
        start + index * page_size + offset: page * page_size + offset
        for index, page in enumerate(pages)
        for offset in range(page_size)
    }


def _draw(plan: ForwardPlan, row: int) -> Draw:
    columns = plan.sampling
    if columns is None or columns.temperatures is None or columns.temperatures[row] == 0:
        return Draw()
    return Draw(
        temperature=float(columns.temperatures[row]),
        top_k=0 if columns.top_ks is None else int(columns.top_ks[row]),
        top_p=1.0 if columns.top_ps is None else float(columns.top_ps[row]),
        min_p=0.0 if columns.min_ps is None else float(columns.min_ps[row]),
        seed=0 if columns.seeds is None else int(columns.seeds[row]),
        sample_index=0 if plan.rows.sample_indices is None else int(plan.rows.sample_indices[row]),
    )


def row_rules(plan: ForwardPlan, row: int, *, logits_width: int, referenced: Sequence[int] = ()) -> RowRules:
    """What the plan's columns say of one row; referenced tokens count as output."""

    def csr(indptr: np.ndarray, *columns: np.ndarray) -> list[list[float]]:
        return [column[indptr[row] : indptr[row + 1]].tolist() for column in columns]

    values: dict[str, object] = {}
    penalties, sampling, masks = plan.penalties, plan.sampling, plan.masks
    if penalties is not None:
        ids, counts = csr(penalties.output_indptr, penalties.output_ids, penalties.output_counts)
        repeated = [token_id for token_id, count in zip(ids, counts, strict=True) for _ in range(count)]
        columns = (penalties.repetition, penalties.frequency, penalties.presence)
        values["strengths"] = tuple(float(column[row]) for column in columns)
        values["prompt_ids"] = tuple(csr(penalties.prompt_indptr, penalties.prompt_ids)[0])
        values["output_ids"] = (*repeated, *referenced)
    if sampling is not None and sampling.bias_indptr is not None:
        values["bias"] = tuple(zip(*csr(sampling.bias_indptr, sampling.bias_ids, sampling.bias_values), strict=True))
    if masks is not None and masks.row_masks[row]:
        values["allowed"] = _allowed(masks.masks[int(masks.row_masks[row]) - 1], logits_width)
    return RowRules(**values)


def _allowed(mask: Mask, logits_width: int) -> frozenset[int]:
    if mask.allowed_bits is not None:
        flags = np.unpackbits(mask.allowed_bits, count=logits_width, bitorder="little")
        return frozenset(np.flatnonzero(flags).tolist())
    if mask.allowed_ids is not None:
        return frozenset(mask.allowed_ids.tolist())
    return frozenset(range(logits_width)) - frozenset(mask.denied_ids.tolist())


def _sampled(plan: ForwardPlan, row: int, token_id: int) -> _Sampled:
    rows = plan.rows
    return _Sampled(int(rows.handles[row]), int(rows.attempts[row]), int(rows.seq_lens[row]), token_id)


def _result(plan: ForwardPlan, answers: list[int | RowFailure | None], *, logits_width: int) -> ForwardResult:
    rows = plan.rows
    failures = [answer if isinstance(answer, RowFailure) else 0 for answer in answers]
    tokens = [0 if answer is None or isinstance(answer, RowFailure) else answer for answer in answers]
    statuses = [
        RowStatus.NONE if answer is None else RowStatus.FAILED if isinstance(answer, RowFailure) else RowStatus.TOKEN
        for answer in answers
    ]
    return ForwardResult(
        identity=plan.identity,
        rows=ResultColumns(
            handles=rows.handles,
            attempts=rows.attempts,
            positions=rows.seq_lens - 1,
            statuses=np.array(statuses, np.uint8),
            token_ids=np.array(tokens, np.int32),
            failures=np.array(failures, np.uint8) if any(failures) else None,
            finite=np.array([failure != RowFailure.NAN for failure in failures], np.uint8),
        ),
        forwards=tuple(
            ForwardOutcome(
                mode=forward.mode,
                graph=forward.graph,
                real_tokens=int(rows.extend_lens[forward.row_begin : forward.row_end].sum()),
                padded_tokens=0,
                forward_ns=1,
                canary_hits=failures[forward.row_begin : forward.row_end].count(RowFailure.CANARY),
            )
            for forward in plan.forwards
        ),
        logprobs=_logprobs(plan, tokens, logits_width=logits_width),
    )


def expected_logprob(token_id: int) -> float:
    return float(np.float32(-(token_id % 1000) / 1000))


def _logprobs(plan: ForwardPlan, tokens: list[int], *, logits_width: int) -> ResultLogprobs | None:
    wanted = plan.logprobs
    if wanted is None or wanted.output_wanted is None:
        return None
    output = [
        expected_logprob(token) if want else 0.0 for token, want in zip(tokens, wanted.output_wanted, strict=True)
    ]
    if wanted.output_top_counts is None:
        return ResultLogprobs(output=np.array(output, np.float32))
    counts = wanted.output_top_counts.tolist()
    ids = [(token + rank) % logits_width for token, count in zip(tokens, counts, strict=True) for rank in range(count)]
    return ResultLogprobs(
        output=np.array(output, np.float32),
        output_top_indptr=np.concatenate([[0], np.cumsum(counts)]).astype(np.uint32),
        output_top_ids=np.array(ids, np.int32),
        output_top_values=np.array([expected_logprob(token) for token in ids], np.float32),
    )
