"""Plans that compute the pages a recording opens with: plain prefill of every sequence, shared parts once. Pure."""

from collections.abc import Iterator

import numpy as np

from protos.service.recording_payloads import LivePages
from protos.wire.enums import ForwardMode, GraphRefusal
from protos.wire.errors import DataFault
from protos.wire.plan import Forward, ForwardPlan, PageTable, PlanIdentity, RowColumns, TokenColumns
from protos.wire.worker_info import WorkerInfo

Array = np.ndarray


def rebuild_plans(live: LivePages, info: WorkerInfo) -> Iterator[ForwardPlan]:
    """Prefill plans, numbered from 1, one sequence at a time.

    Raises:
        DataFault: pages are missing, or contradict each other.
    """
    if not live.is_complete:
        raise DataFault("the recording does not know every page it begins with", field="recording")
    paths = _Paths(live, page_size=info.sub_pools[0].page_size)
    seq = 0
    for path, first_new in paths.leaves():
        for begin, end in _chunks(first_new, len(path), pages_a_plan=_pages_a_plan(info)):
            seq += 1
            yield paths.plan(path[:end], begin, seq=seq, incarnation=info.incarnation)


class _Paths:
    """The tree of pages."""

    def __init__(self, live: LivePages, *, page_size: int) -> None:
        self._page_size = page_size
        pages = live.pages.tolist()
        self._parents = dict(zip(pages, live.parents.tolist(), strict=True))
        spans = zip(pages, live.indptr[:-1].tolist(), live.indptr[1:].tolist(), strict=True)
        self._tokens = {page: live.token_ids[begin:end] for page, begin, end in spans}

    def leaves(self) -> Iterator[tuple[list[int], int]]:
        """For each page that no other follows: the pages up to it, and how many of them are computed already."""
        inner = set(self._parents.values())
        computed: set[int] = set()
        for leaf in self._parents:
            if leaf in inner:
                continue
            path = self._path(leaf)
            first_new = next(index for index, page in enumerate(path) if page not in computed)
            computed.update(path)
            yield path, first_new

    def plan(self, path: list[int], begin: int, *, seq: int, incarnation: bytes) -> ForwardPlan:
        """Compute the pages path[begin:]."""
        ids = np.concatenate([self._tokens[page] for page in path[begin:]]).astype(np.int32)
        first = begin * self._page_size
        seq_len = first + len(ids)
        one = Forward(
            mode=ForwardMode.EXTEND,
            logical_mode=ForwardMode.EXTEND,
            row_begin=0,
            row_end=1,
            graph=GraphRefusal.DISABLED,
        )
        return ForwardPlan(
            identity=PlanIdentity(epoch=1, term=1, seq=seq, incarnation=incarnation),
            forwards=(one,),
            rows=RowColumns(
                handles=np.array([seq], np.uint64),
                attempts=np.zeros(1, np.uint32),
                seq_lens=np.array([seq_len], np.int32),
                extend_lens=np.array([len(ids)], np.int32),
                first_positions=np.array([first], np.int32),
                samples=np.zeros(1, np.uint8),
            ),
            tokens=TokenColumns(ids=ids),
            page_tables=(
                PageTable(
                    sub_pool=0,
                    indptr=np.array([0, len(path)], np.int32),
                    indices=np.array(path, np.int32),
                    last_page_lens=np.array([(seq_len - 1) % self._page_size + 1], np.int32),
                    written_pages=np.array(path[begin:], np.int32),
                ),
            ),
        )

    def _path(self, leaf: int) -> list[int]:
        path = [leaf]
        while parent := self._parents[path[-1]]:
            if parent not in self._parents or len(path) > len(self._parents):
                raise DataFault(f"page {path[-1]} of the recording follows one it does not hold", field="recording")
            if len(self._tokens[parent]) != self._page_size:
                raise DataFault(f"page {parent} of the recording is followed and not full", field="recording")
            path.append(parent)
        return path[::-1]


def _pages_a_plan(info: WorkerInfo) -> int:
    return max(info.limits.max_tokens // info.sub_pools[0].page_size, 1)


def _chunks(begin: int, end: int, *, pages_a_plan: int) -> Iterator[tuple[int, int]]:
    """[begin, end) in parts."""
    for first in range(begin, end, pages_a_plan):
        yield first, min(first + pages_a_plan, end)
