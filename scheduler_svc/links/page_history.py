"""The tokens behind every page of one worker, as the answered plans say: what a new recording opens with.

Pure. A page is kept while its whole sequence before it is: so all that the scheduler may still read is here, and some
pages that it gave up. Only workers with one full sub-pool; of others nothing is known.
"""

import numpy as np

from protos.service.plan_recording import LivePages
from protos.wire.enums import RowStatus, SubPoolKind
from protos.wire.plan import ForwardPlan
from protos.wire.result import ForwardResult
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
        self._lengths = np.zeros(pool.num_pages, np.int32)
        self._versions = np.zeros(pool.num_pages, np.int64)
        self._starts = np.zeros(pool.num_pages, np.int32)
        self._parents = np.zeros(pool.num_pages, np.int32)
        self._parent_versions = np.zeros(pool.num_pages, np.int64)
        self._results: dict[int, Array] = {}

    def lost(self) -> None:
        """Plans are missing: from here on nothing is known for sure."""
        self._is_known = False

    def answered(self, plan: ForwardPlan, result: ForwardResult) -> None:
        """The plan ran and gave this."""
        rows = result.rows
        seq = plan.identity.seq
        tokens = np.zeros(0, np.int32)
        if rows is not None:
            tokens = np.where(rows.statuses == RowStatus.TOKEN, rows.token_ids, -1).astype(np.int32)
            self._write(plan, failed=rows.statuses == RowStatus.FAILED)
        self._results[seq] = tokens
        self._results.pop(seq - _KEPT_RESULTS, None)

    def snapshot(self) -> LivePages:
        """What is known now."""
        is_live = self._live()
        pages = np.flatnonzero(is_live)
        pages = pages[np.argsort(self._starts[pages], kind="stable")]
        indptr = np.concatenate([[0], np.cumsum(self._lengths[pages], dtype=np.int64)])
        is_used = np.arange(self._page_size) < self._lengths[pages][:, None]
        results = list(self._results.values())
        return LivePages(
            is_complete=self._is_known,
            pages=pages.astype(np.int32),
            parents=np.where(self._starts[pages] > 0, self._parents[pages], 0).astype(np.int32),
            indptr=indptr,
            token_ids=self._tokens[pages][is_used],
            result_seqs=np.array(list(self._results), np.uint64),
            result_indptr=np.cumsum([0, *(len(tokens) for tokens in results)], dtype=np.int64),
            result_tokens=np.concatenate([np.zeros(0, np.int32), *results]),
        )

    def _write(self, plan: ForwardPlan, *, failed: Array) -> None:
        rows, table = plan.rows, plan.page_tables[0] if plan.page_tables else None
        if not self._is_known or table is None or not rows.num_rows:
            return
        lengths = rows.extend_lens.astype(np.int64)
        owners = np.repeat(np.arange(rows.num_rows), lengths)
        ends = np.cumsum(lengths)
        positions = np.arange(len(owners)) - (ends - lengths)[owners] + rows.first_positions[owners]
        index, offsets = np.divmod(positions, self._page_size)
        places = table.indptr[owners] + index
        pages = table.indices[places]
        is_first = offsets == 0
        begun = pages[is_first]
        self._versions[begun] += 1
        self._starts[begun] = positions[is_first]
        parents = table.indices[np.maximum(places[is_first] - 1, 0)]
        self._parents[begun] = np.where(positions[is_first] > 0, parents, 0)
        self._parent_versions[begun] = self._versions[self._parents[begun]]
        self._tokens[pages, offsets] = self._literals(plan)
        self._lengths[pages] = offsets + 1
        broken = pages[failed[owners]]
        self._versions[broken] += 1
        self._lengths[broken] = 0

    def _literals(self, plan: ForwardPlan) -> Array:
        """[num_tokens] ids with references looked up; a row whose reference leads nowhere has failed."""
        tokens = plan.tokens
        if tokens.sources is None or tokens.ref_seqs is None or tokens.ref_rows is None:
            return np.asarray(tokens.ids)
        ids = tokens.ids.copy()
        places = np.flatnonzero(tokens.sources)
        for place, seq, row in zip(places.tolist(), tokens.ref_seqs.tolist(), tokens.ref_rows.tolist(), strict=True):
            sampled = self._results.get(seq)
            if sampled is not None and row < len(sampled):
                ids[place] = sampled[row]
        return ids

    def _live(self) -> Array:
        """[num_pages] bool: pages whose sequence is whole back to its first token."""
        held = self._lengths > 0
        is_live = held & (self._starts == 0)
        for start in np.unique(self._starts[held]).tolist():
            if start == 0:
                continue
            pages = np.flatnonzero(held & (self._starts == start))
            parents = self._parents[pages]
            is_whole = (
                is_live[parents]
                & (self._lengths[parents] == self._page_size)
                & (self._versions[parents] == self._parent_versions[pages])
                & (self._starts[parents] == start - self._page_size)
            )
            is_live[pages] = is_whole
        is_live[0] = False
        return np.asarray(is_live)
