"""The rules of a plan once more, slow and obvious: plain loops over plain numbers, no code shared with `protos.wire`.

`first_problem` says what is wrong with a decoded plan, or `None`. The fast validation must agree with it.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from protos.wire.enums import Feature, GraphRefusal
from protos.wire.plan import Forward, ForwardPlan, Mask, PageTable
from protos.wire.worker_info import SubPool, WorkerInfo

HAS_ROWS = {"EXTEND": True, "DECODE": True, "MIXED": True, "IDLE": False}
GRAPH_OF = {"EXTEND": "PREFILL", "MIXED": "PREFILL", "DECODE": "DECODE"}


def first_problem(plan: ForwardPlan, info: WorkerInfo) -> str | None:
    for part in (_identity, _features, _rows, _forwards, _tokens, _pages, _operations, _sampling):
        for problem in part(plan, info):
            return f"{part.__name__}: {problem}"
    for part in (_bias, _penalties, _masks, _logprobs, _delta):
        for problem in part(plan, info):
            return f"{part.__name__}: {problem}"
    return None


def _numbers(array: Any) -> list[Any]:
    return [] if array is None else array.tolist()


def _identity(plan: ForwardPlan, _: WorkerInfo) -> Iterator[str]:
    if len(plan.identity.incarnation) != 16:
        yield "incarnation"
    if plan.identity.seq < 1:
        yield "seq"
    if len(plan.identity.required_features) > 64:
        yield "too many required features"


def _features(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    has = {int(feature) for feature in info.features}
    for value in plan.identity.required_features:
        if value not in has:
            yield f"required {value}"
    yield from (f"reserved {name}" for name in plan.reserved)
    tokens, rows, sampling, logprobs = plan.tokens, plan.rows, plan.sampling, plan.logprobs
    used = {
        Feature.TOKEN_REFERENCES: [tokens.sources, tokens.ref_seqs, tokens.ref_rows],
        Feature.SPECULATION: [
            tokens.ref_offsets,
            rows.length_source_seqs,
            rows.length_source_rows,
            *(forward.write_window for forward in plan.forwards),
        ],
        Feature.ATTENTION_DP: [rows.dp_ranks],
        Feature.SPLIT_PREFILL: [forward.layers for forward in plan.forwards],
        Feature.PAGE_OPERATIONS: [plan.page_operations],
        Feature.PENALTIES: [plan.penalties],
        Feature.MASKS: [plan.masks],
        Feature.DELTAS: [plan.delta],
        Feature.HIDDEN_STATES: [rows.hidden_modes],
        Feature.CANARY: [rows.canary_seeds, rows.canary_hashes],
        Feature.LOGIT_BIAS: [sampling and sampling.bias_indptr],
        Feature.OUTPUT_LOGPROBS: [logprobs and logprobs.output_wanted, logprobs and logprobs.output_top_counts],
        Feature.PROMPT_LOGPROBS: [logprobs and logprobs.prompt_starts],
        Feature.WINDOW_SUB_POOL: [table.start_positions for table in plan.page_tables],
        Feature.GRAPHS: [None if isinstance(f.graph, GraphRefusal) else f.graph for f in plan.forwards],
    }
    for feature, parts in used.items():
        if any(part is not None for part in parts) and int(feature) not in has:
            yield f"uses {feature.name}"


def _rows(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    rows = plan.rows
    count = len(rows.handles)
    names = [name for name in type(rows).__slots__ if getattr(rows, name) is not None]
    columns = {name: _numbers(getattr(rows, name)) for name in names}
    if any(len(column) != count for column in columns.values()):
        yield "column length"
        return
    if count > min(info.limits.max_rows, 4096):
        yield "too many rows"
    if "canary_hashes" in columns and "canary_seeds" not in columns:
        yield "canary hashes without seeds"
    if len(set(columns["handles"])) != count:
        yield "handle twice"
    for row in range(count):
        extend, first, end = (columns[name][row] for name in ("extend_lens", "first_positions", "seq_lens"))
        if extend < 1 or first < 0 or first + extend != end or end > info.limits.context_tokens:
            yield f"lengths of row {row}"
        if columns["samples"][row] not in (0, 1):
            yield f"samples of row {row}"
        if not 0 <= columns.get("sample_indices", [0] * count)[row] < 16:
            yield f"sample index of row {row}"
        if not 1 <= columns.get("hidden_modes", [1] * count)[row] <= info.max_hidden_mode:
            yield f"hidden mode of row {row}"
    states = {1: lambda _: 0, 2: lambda _: 1, 3: lambda row: columns["extend_lens"][row]}
    modes = columns.get("hidden_modes", [])
    if sum(states.get(mode, lambda _: 0)(row) for row, mode in enumerate(modes)) > info.limits.max_hidden_states:
        yield "too many hidden states"


def _forwards(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    if not 1 <= len(plan.forwards) <= 16:
        yield "number of forwards"
    covered: list[int] = []
    for forward in plan.forwards:
        span = range(forward.row_begin, forward.row_end)
        if not len(covered) == forward.row_begin <= forward.row_end <= plan.rows.num_rows:
            yield "row range"
            return
        covered += span
        lengths = [int(plan.rows.extend_lens[row]) for row in span]
        for mode in (forward.mode, forward.logical_mode):
            if mode not in info.modes or HAS_ROWS.get(mode.name) is None:
                yield f"mode {mode.name}"
            elif HAS_ROWS[mode.name] != bool(lengths):
                yield f"rows of mode {mode.name}"
            elif mode.name == "DECODE" and set(lengths) != {1}:
                yield "lengths of a decode"
        yield from _graph(forward, info, lengths)
    if covered != list(range(plan.rows.num_rows)):
        yield "rows not covered"


def _graph(forward: Forward, info: WorkerInfo, lengths: list[int]) -> Iterator[str]:
    graph = forward.graph
    if isinstance(graph, GraphRefusal):
        return
    if GRAPH_OF.get(forward.mode.name) != graph.phase.name:
        yield "graph phase"
    if not any(entry.phase == graph.phase and graph.bucket in entry.sizes for entry in info.buckets):
        yield "bucket unknown"
    if (len(lengths) if graph.phase.name == "DECODE" else sum(lengths)) > graph.bucket:
        yield "bucket too small"


def _tokens(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    tokens = plan.tokens
    ids = _numbers(tokens.ids)
    if len(ids) != sum(_numbers(plan.rows.extend_lens)) or len(ids) > min(info.limits.max_tokens, 65536):
        yield "number of tokens"
    if any(not 0 <= token < info.logits_width for token in ids):
        yield "id"
    sources = [0] * len(ids) if tokens.sources is None else _numbers(tokens.sources)
    if len(sources) != len(ids) or any(source not in (0, 1) for source in sources):
        yield "sources"
        return
    referring = [token for token, source in zip(ids, sources, strict=True) if source == 1]
    for name, is_optional in (("ref_seqs", False), ("ref_rows", False), ("ref_offsets", True)):
        array = getattr(tokens, name)
        if len(_numbers(array)) != len(referring) and not (is_optional and array is None):
            yield "number of references"
    if tokens.sources is None and any(a is not None for a in (tokens.ref_seqs, tokens.ref_rows, tokens.ref_offsets)):
        yield "references without sources"
    if any(token != 0 for token in referring):
        yield "reference with an id"
    if any(not 1 <= seq < plan.identity.seq for seq in _numbers(tokens.ref_seqs)):
        yield "reference seq"
    if any(row >= info.limits.max_rows for row in _numbers(tokens.ref_rows)):
        yield "reference row"


def _pages(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    if [table.sub_pool for table in plan.page_tables] != list(range(len(info.sub_pools))):
        yield "tables"
        return
    for table, sub_pool in zip(plan.page_tables, info.sub_pools, strict=True):
        yield from _page_table(plan, table, sub_pool)


def _page_table(plan: ForwardPlan, table: PageTable, sub_pool: SubPool) -> Iterator[str]:
    count, size = plan.rows.num_rows, sub_pool.page_size
    indptr, indices = _numbers(table.indptr), _numbers(table.indices)
    starts = [0] * count if table.start_positions is None else _numbers(table.start_positions)
    last_lens = _numbers(table.last_page_lens)
    if len(indptr) != count + 1 or len(starts) != count or len(last_lens) != count:
        yield "table column length"
        return
    if indptr[0] != 0 or indptr != sorted(indptr) or indptr[-1] != len(indices):
        yield "indptr"
        return
    if any(not 1 <= page < sub_pool.num_pages for page in indices):
        yield "page"
    written: list[list[int]] = []
    listed: list[list[int]] = []
    for row in range(count):
        pages = indices[indptr[row] : indptr[row + 1]]
        first, end = int(plan.rows.first_positions[row]), int(plan.rows.seq_lens[row])
        begin = starts[row]
        needed_from = max(0, first - (sub_pool.window_tokens - 1)) if sub_pool.kind.name == "WINDOW" else 0
        if begin < 0 or begin % size or begin > needed_from:
            yield f"start of row {row}"
        if len(pages) != len(range(begin, end, size)) or len(set(pages)) != len(pages):
            yield f"pages of row {row}"
        if last_lens[row] != len(range((end - 1) // size * size, end)):
            yield f"last page of row {row}"
        numbers = sorted({position // size for position in range(first, end)})
        if any(not 0 <= number - begin // size < len(pages) for number in numbers):
            yield f"written positions of row {row}"
            return
        written.append([pages[number - begin // size] for number in numbers])
        listed.append(pages)
    if [page for pages in written for page in pages] != _numbers(table.written_pages):
        yield "written pages"
    for row, pages in enumerate(written):
        others = {page for other, listed_pages in enumerate(listed) if other != row for page in listed_pages}
        if others & set(pages):
            yield f"another row lists a page that row {row} writes"


def _operations(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    operations = plan.page_operations
    if operations is None:
        return
    columns = [_numbers(getattr(operations, name)) for name in ("kinds", "orders", "sub_pools", "sources", "targets")]
    if len({len(column) for column in columns}) != 1:
        yield "column length"
        return
    for kind, order, sub_pool, source, target in zip(*columns, strict=True):
        if kind not in (1, 2) or order not in (1, 2) or sub_pool >= len(info.sub_pools):
            yield "operation"
            continue
        usable = range(1, info.sub_pools[sub_pool].num_pages)
        if target not in usable or (source not in usable or source == target if kind == 1 else source != 0):
            yield "operation's pages"


def _sampling(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    sampling = plan.sampling
    if sampling is None:
        return
    rules = {
        "temperatures": lambda value: 0 <= value <= 100,
        "top_ks": lambda value: value <= info.logits_width,
        "top_ps": lambda value: 2.0**-126 <= value <= 1,
        "min_ps": lambda value: 0 <= value <= 1,
        "seeds": lambda value: True,
    }
    for name, rule in rules.items():
        array = getattr(sampling, name)
        if array is not None and (len(array) != plan.rows.num_rows or not all(map(rule, _numbers(array)))):
            yield name
    if sampling.seeds is None and any(value > 0 for value in _numbers(sampling.temperatures)):
        yield "no seeds"


def _csr(plan: ForwardPlan, indptr: Any, *contents: Any) -> list[tuple[Any, ...]] | None:
    """The rows of a CSR table, each a tuple of content lists; `None` if the table is broken."""
    bounds = _numbers(indptr)
    lists = [_numbers(content) for content in contents]
    if len(bounds) != plan.rows.num_rows + 1 or bounds[0] != 0 or bounds != sorted(bounds):
        return None
    if any(content is None or len(content) != bounds[-1] for content in contents):
        return None
    return [tuple(values[begin:end] for values in lists) for begin, end in pairwise(bounds)]


def _ids_are_good(ids: list[int], info: WorkerInfo) -> bool:
    return len(set(ids)) == len(ids) and all(0 <= token < info.logits_width for token in ids)


def _bias(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    sampling = plan.sampling
    if sampling is None:
        return
    if sampling.bias_indptr is None:
        if sampling.bias_ids is not None or sampling.bias_values is not None:
            yield "content without indptr"
        return
    table = _csr(plan, sampling.bias_indptr, sampling.bias_ids, sampling.bias_values)
    if table is None:
        yield "table"
        return
    for ids, values in table:
        if not _ids_are_good(ids, info) or not all(map(math.isfinite, values)):
            yield "content"


def _penalties(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    penalties = plan.penalties
    if penalties is None:
        return
    for name, rule in (
        ("repetition", lambda value: 2.0**-126 <= value <= 10),
        ("frequency", lambda value: -2 <= value <= 2),
        ("presence", lambda value: -2 <= value <= 2),
    ):
        values = _numbers(getattr(penalties, name))
        if len(values) != plan.rows.num_rows or not all(map(rule, values)):
            yield name
    prompt = _csr(plan, penalties.prompt_indptr, penalties.prompt_ids)
    output = _csr(plan, penalties.output_indptr, penalties.output_ids, penalties.output_counts)
    if prompt is None or output is None:
        yield "table"
        return
    if not all(_ids_are_good(ids, info) for (ids,) in prompt):
        yield "prompt ids"
    for ids, counts in output:
        if not _ids_are_good(ids, info) or any(not 1 <= n <= info.limits.context_tokens for n in counts):
            yield "output ids"


def _masks(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    masks = plan.masks
    if masks is None:
        return
    row_masks = _numbers(masks.row_masks)
    if len(row_masks) != plan.rows.num_rows or any(number > len(masks.masks) for number in row_masks):
        yield "row masks"
    if len(masks.masks) > 1024:
        yield "too many"
    for mask in masks.masks:
        if not _allowed(mask, info.logits_width):
            yield "mask"


def _allowed(mask: Mask, width: int) -> set[int]:
    """The ids a mask leaves; empty if the mask is broken."""
    if mask.allowed_bits is not None:
        bits = _numbers(mask.allowed_bits)
        if len(bits) != math.ceil(width / 8):
            return set()
        return {token for token in range(width) if bits[token // 8] >> (token % 8) & 1}
    ids = set(_numbers(mask.allowed_ids if mask.allowed_ids is not None else mask.denied_ids))
    if any(token >= width for token in ids):
        return set()
    return ids if mask.allowed_ids is not None else set(range(width)) - ids


def _logprobs(plan: ForwardPlan, info: WorkerInfo) -> Iterator[str]:
    logprobs = plan.logprobs
    if logprobs is None:
        return
    for name, high in (
        ("output_wanted", 1),
        ("output_top_counts", info.limits.max_logprobs),
        ("prompt_top_counts", info.limits.max_logprobs),
    ):
        array = getattr(logprobs, name)
        if array is not None and (len(array) != plan.rows.num_rows or max(_numbers(array), default=0) > high):
            yield name
    targets = (logprobs.prompt_top_counts, logprobs.target_indptr, logprobs.target_ids)
    if logprobs.prompt_starts is None:
        if any(array is not None for array in targets):
            yield "targets without starts"
        return
    starts = _numbers(logprobs.prompt_starts)
    table = _csr(plan, logprobs.target_indptr, logprobs.target_ids)
    if len(starts) != plan.rows.num_rows or table is None:
        yield "table"
        return
    tops = _numbers(logprobs.prompt_top_counts) or [0] * len(starts)
    if sum(len(table[row][0]) * (1 + 2 * top) for row, top in enumerate(tops)) > 1 << 20:
        yield "too many prompt values"
    for row, start in enumerate(starts):
        first, end = int(plan.rows.first_positions[row]), int(plan.rows.seq_lens[row])
        known_end = end - 1 if plan.rows.samples[row] else end
        if not first <= start <= end or len(table[row][0]) != len(range(start, known_end)):
            yield f"positions of row {row}"
        if any(not 0 <= token < info.logits_width for token in table[row][0]):
            yield f"targets of row {row}"


def _delta(plan: ForwardPlan, _: WorkerInfo) -> Iterator[str]:
    delta = plan.delta
    if delta is None:
        return
    if not 1 <= delta.base_seq < plan.identity.seq or len(delta.base_digest) != 16:
        yield "base"
    base_rows = _numbers(delta.base_rows)
    if len(base_rows) != plan.rows.num_rows or any(row > 4096 for row in base_rows):
        yield "base rows"
