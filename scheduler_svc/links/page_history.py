"""The tokens behind every page of one worker, as the answered plans say: what a new recording opens with.

Pure. A page is known by what is in it, its tokens and the chain of all before them, not by who wrote the one before it:
the scheduler exchanges pages of equal content. Kept are pages whose whole sequence is held by some pages: all that the
scheduler may still read, and some that it gave up. Only workers with one full sub-pool; of others nothing is known.
"""

import numpy as np

from protos.service.recording_payloads import LivePages, RecentTokens
from protos.wire.enums import RowStatus, SubPoolKind
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult, ResultColumns
from protos.wire.simulated_tokens import token_tags
from protos.wire.worker_info import WorkerInfo

Array = np.ndarray

_KEPT_RESULTS = 16
"""Plans that a plan's references may reach back; no window is larger."""


class PageHistory:
    """One term of one worker. Used by the recorder's thread."""

    def __init__(self, info: WorkerInfo) -> None:
        pool = info.sub_pools[0]
        self._is_known = len(info.sub_pools) == 1 and pool.kind is SubPoolKind.FULL
        self._page_size = pool.page_size
        self._tokens = np.zeros((pool.num_pages, pool.page_size), np.int32)
        self._chains = np.zeros((pool.num_pages, pool.page_size), np.uint64)
        """Of the sequence up to each token."""
        self._before = np.zeros(pool.num_pages, np.uint64)
        """Of the sequence before each page."""
        self._lengths = np.zeros(pool.num_pages, np.int32)
        self._starts = np.zeros(pool.num_pages, np.int32)
        self._results: dict[int, ResultColumns] = {}

    def lost(self) -> None:
        """Plans are missing: from here on nothing is known for sure."""
        self._is_known = False

    def answered(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """The plan ran and gave this."""
        rows, seq = result.rows, plan.identity.seq
        self._results.pop(seq - _KEPT_RESULTS, None)
        if rows is None:
            return
        if self._is_known and plan.page_tables and plan.rows.num_rows:
            # A failed row wrote nothing that may be read: it begins again where it stood, or before.
            self._write(plan, written=rows.statuses != RowStatus.FAILED)
        self._results[seq] = rows

    def snapshot(self) -> LivePages:
        """What is known now."""
        pages, parents = self._live()
        indptr = np.concatenate([[0], np.cumsum(self._lengths[pages], dtype=np.int64)])
        is_used = np.arange(self._page_size) < self._lengths[pages][:, None]
        return LivePages(
            is_complete=self._is_known,
            pages=pages.astype(np.int32),
            parents=parents.astype(np.int32),
            indptr=indptr,
            token_ids=self._tokens[pages][is_used],
            recent=self._recent(),
        )

    def _write(self, plan: ForwardPlan, *, written: Array) -> None:
        rows, table = plan.rows, plan.page_tables[0]
        lengths, firsts = rows.extend_lens.astype(np.int64), rows.first_positions.astype(np.int64)
        owners = np.repeat(np.arange(rows.num_rows), lengths)
        begins = np.cumsum(lengths) - lengths
        positions = np.arange(len(owners)) - begins[owners] + firsts[owners]
        index, offsets = np.divmod(positions, self._page_size)
        pages = table.indices[table.indptr[owners] + index]
        ids = self._literals(plan)
        sums = np.cumsum(token_tags(ids, positions), dtype=np.uint64)
        before, is_whole = self._before_rows(plan)
        skipped = np.where(begins > 0, sums[begins - 1], np.uint64(0))
        chains = sums + (before - skipped)[owners]
        previous = np.empty_like(chains)
        previous[1:] = chains[:-1]
        previous[begins] = before

        kept = written[owners]
        pages, offsets, positions = pages[kept], offsets[kept], positions[kept]
        is_first = offsets == 0
        begun = pages[is_first]
        self._starts[begun] = positions[is_first]
        self._before[begun] = previous[kept][is_first]
        self._tokens[pages, offsets] = ids[kept]
        self._chains[pages, offsets] = chains[kept]
        self._lengths[pages] = offsets + 1
        self._lengths[pages[~is_whole[owners[kept]]]] = 0

    def _before_rows(self, plan: ForwardPlan) -> tuple[Array, Array]:
        """[num_rows] each: the chain before a row's first token here, and whether that is known."""
        table, firsts = plan.page_tables[0], plan.rows.first_positions.astype(np.int64)
        index, offsets = np.divmod(np.maximum(firsts - 1, 0), self._page_size)
        pages = table.indices[table.indptr[:-1] + index]
        is_held = (self._lengths[pages] > offsets) & (self._starts[pages] == index * self._page_size)
        chains = np.where(firsts > 0, self._chains[pages, offsets], np.uint64(0))
        return chains, is_held | (firsts == 0)

    def _literals(self, plan: ForwardPlan) -> Array:
        """[num_tokens] ids with references looked up; a row whose reference leads nowhere has failed."""
        tokens = plan.tokens
        if tokens.sources is None or tokens.ref_seqs is None or tokens.ref_rows is None:
            return np.asarray(tokens.ids)
        ids = tokens.ids.copy()
        places = np.flatnonzero(tokens.sources)
        for seq in np.unique(tokens.ref_seqs).tolist():
            sampled = self._results.get(seq)
            if sampled is not None:
                is_here = (tokens.ref_seqs == seq) & (tokens.ref_rows < len(sampled.token_ids))
                ids[places[is_here]] = sampled.token_ids[tokens.ref_rows[is_here]]
        return ids

    def _live(self) -> tuple[Array, Array]:
        """Pages whose sequence is held back to its first token, and for each a page that holds what is before it."""
        self._lengths[0] = 0
        held = np.flatnonzero(self._lengths)
        held = held[np.argsort(self._starts[held], kind="stable")]
        starts, begins = np.unique(self._starts[held], return_index=True)
        levels = np.split(held, begins[1:]) if len(held) else []
        pages, parents = [held[:0]], [held[:0]]
        ends, enders, next_start = np.zeros(1, np.uint64), np.zeros(1, np.int64), 0
        for start, level in zip(starts.tolist(), levels, strict=True):
            if start != next_start or not len(ends):
                break
            places = np.minimum(np.searchsorted(ends, self._before[level]), len(ends) - 1)
            follows = ends[places] == self._before[level]
            pages.append(level[follows])
            parents.append(enders[places[follows]])
            full = pages[-1][self._lengths[pages[-1]] == self._page_size]
            order = np.argsort(self._chains[full, -1], kind="stable")
            enders, ends = full[order], self._chains[full[order], -1]
            next_start = start + self._page_size
        return np.concatenate(pages), np.concatenate(parents)

    def _recent(self) -> RecentTokens:
        columns: dict[str, list[Array]] = {
            name: [] for name in ("seqs", "rows", "handles", "attempts", "positions", "token_ids")
        }
        for seq, result in self._results.items():
            rows = np.flatnonzero(result.statuses == RowStatus.TOKEN)
            columns["seqs"].append(np.full(len(rows), seq, np.uint64))
            columns["rows"].append(rows.astype(np.uint32))
            for name in ("handles", "attempts", "positions", "token_ids"):
                columns[name].append(getattr(result, name)[rows])
        kinds = {"seqs": np.uint64, "rows": np.uint32, "handles": np.uint64, "attempts": np.uint32}
        return RecentTokens(
            **{
                name: np.concatenate([np.zeros(0, kinds.get(name, np.int32)), *parts])
                for name, parts in columns.items()
            }
        )
