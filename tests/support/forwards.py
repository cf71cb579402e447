"""Drives a ModelRunner by hand-made batches: sequences of known ids, computed in any chunks, beside any others."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any

import numpy as np
import torch

from protos.service.model_files import ModelFolder
from protos.wire.enums import ForwardMode, GraphRefusal
from worker_svc.attention.flashinfer_wrappers import FlashInfer
from worker_svc.attention.registry import AttentionTools, attention_backend
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.page_group import PageGroup
from worker_svc.batch.row_groups import ExtendGroup
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.token_to_kv_pool import TokenToKVPool
from worker_svc.model_runner import ModelRunner, RunnerOutput
from worker_svc.models.pool_geometries import pool_geometries
from worker_svc.models.registry import ModelSource
from worker_svc.numerics import DTYPES, numerics_by_name

CPU = torch.device("cpu")


@dataclass(kw_only=True, eq=False)
class Row:
    """A sequence of known ids and how much of it is in the pools."""

    ids: Sequence[int]
    pages: list[int] = field(default_factory=list)
    """Of the full sub-pool."""
    window_pages: list[int] = field(default_factory=list)
    """Of the window sub-pool, by position as well; those that were given up are 0."""
    kv_len: int = 0
    logits: list[torch.Tensor] = field(default_factory=list)
    """Of every position computed so far, where they were asked for."""

    @property
    def left(self) -> int:
        return len(self.ids) - self.kv_len


def make_batch(
    rows: Sequence[Row], lens: Sequence[int], *, translator: IndexTranslator, all_logits: bool = False
) -> ForwardBatch:
    """The next `lens[i]` ids of each row, whose pages are there. One token each: a decode batch."""
    extend_lens = np.array(lens, np.int32)
    prefixes = np.array([row.kv_len for row in rows], np.int32)
    seq_lens = prefixes + extend_lens
    starts = (np.cumsum(extend_lens) - extend_lens).astype(np.int32)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(prefixes, seq_lens, strict=True)])
    last = starts + extend_lens - 1
    ids = np.concatenate([row.ids[row.kv_len : row.kv_len + n] for row, n in zip(rows, lens, strict=True)])
    is_decode = all(length == 1 for length in lens)
    as_tensor = torch.from_numpy
    groups = tuple(
        _page_group(rows, seq_lens, (np.repeat(np.arange(len(rows)), extend_lens), positions), translator, sub_pool)
        for sub_pool in range(len(translator.pools))
    )
    extend = ExtendGroup(
        extend_lens=as_tensor(extend_lens),
        prefix_lens=as_tensor(prefixes),
        extend_start_loc=as_tensor(starts),
        extend_lens_host=extend_lens,
        prefix_lens_host=prefixes,
        extend_start_loc_host=starts,
    )
    mode = ForwardMode.DECODE if is_decode else ForwardMode.EXTEND
    return ForwardBatch(
        forward_mode=mode,
        logical_mode=mode,
        graph=GraphRefusal.DISABLED,
        input_ids=as_tensor(ids.astype(np.int32)),
        positions=as_tensor(positions.astype(np.int64)),
        seq_lens=as_tensor(seq_lens),
        seq_lens_host=seq_lens,
        page_groups=groups,
        logits_rows=torch.arange(len(positions)) if all_logits else as_tensor(last.astype(np.int64)),
        last_token_rows=as_tensor(last.astype(np.int64)),
        extend=None if is_decode else extend,
    )


def _page_group(rows: Sequence[Row], seq_lens, tokens, translator: IndexTranslator, sub_pool: int) -> PageGroup:
    """`tokens`: owner and position of each. In a window sub-pool, pages before the window's are left out."""
    geometry = translator.pools[sub_pool].geometry
    page_size, window = geometry.page_size, geometry.window_tokens
    owners, positions = tokens
    lists = [row.window_pages if window else row.pages for row in rows]
    firsts = [max(0, row.kv_len - window + 1) // page_size if window else 0 for row in rows]
    used = [pages[first : -(-int(n) // page_size)] for pages, first, n in zip(lists, firsts, seq_lens, strict=True)]
    assert all(all(part) for part in used), "a page that is needed was given up"
    written = np.array([lists[owner][pos // page_size] for owner, pos in zip(owners, positions, strict=True)])
    indptr = np.cumsum([0, *(len(part) for part in used)]).astype(np.int32)
    indices = np.concatenate([np.array(part, np.int32) for part in used])
    last_lens = ((seq_lens - 1) % page_size + 1).astype(np.int32)
    return PageGroup(
        sub_pool=sub_pool,
        kv_indptr=torch.from_numpy(indptr),
        kv_indices=torch.from_numpy(indices),
        kv_last_page_len=torch.from_numpy(last_lens),
        out_cache_loc=torch.from_numpy(translator.slots(sub_pool, written, positions % page_size)),
        kv_indptr_host=indptr,
        kv_indices_host=indices,
        kv_last_page_len_host=last_lens,
        start_positions_host=np.array(firsts, np.int32) * page_size,
    )


def moved(value: Any, device: torch.device) -> Any:
    """A batch, or a part of one, with all its tensors on `device`."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(moved(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{each.name: moved(getattr(value, each.name), device) for each in fields(value)})
    return value


class ForwardDriver:
    """A loaded model on pools of its own. Pages are handed out in random order and come back dirty.

    Window pages that no later token sees are given up before each step and handed out again.
    """

    def __init__(
        self,
        folder: ModelFolder,
        *,
        numerics: str = "reproducible",
        dtype: str = "float32",
        num_pages: int = 256,
        page_size: int = 16,
        attention: str | None = None,
        order: KVOrder = KVOrder.HEADS,
        flashinfer: FlashInfer | None = None,
        device: torch.device = CPU,
    ) -> None:
        """`attention`: another back-end than that of the numerics, on pools of `order`."""
        self.device = device
        strategy = numerics_by_name(numerics, dtype=DTYPES[dtype], device=device)
        self.loaded = ModelSource(folder).load(numerics=strategy, dtype=DTYPES[dtype], device=device)
        geometries = pool_geometries(
            self.loaded.config, num_pages=num_pages, page_size=page_size, dtype=DTYPES[dtype], order=order
        )
        self.pools = tuple(TokenToKVPool(geometry, device=device) for geometry in geometries)
        self.pool = self.pools[0]
        self.translator = IndexTranslator(self.pools)
        self.runner = ModelRunner(self.loaded.model)
        tools = AttentionTools(num_q_heads=self.loaded.config.num_q_heads, dtype=DTYPES[dtype], flashinfer=flashinfer)
        name = attention or strategy.attention
        self.context = ForwardContext(*(attention_backend(name, pool, tools) for pool in self.pools))
        self.release_all()
        self.poison(0.5)

    def release_all(self) -> None:
        """Forget every row."""
        rng = np.random.default_rng(3)
        self._free = [(rng.permutation(pool.geometry.num_pages - 1) + 1).tolist() for pool in self.pools]

    def poison(self, value: float) -> None:
        """Fill every slot, the sinks included."""
        for pool in self.pools:
            for layer in range(pool.geometry.num_layers):
                pool.keys(layer).fill_(value)
                pool.values(layer).fill_(value)

    def row(self, ids: Sequence[int]) -> Row:
        count = -(-len(ids) // self.pool.geometry.page_size)
        return Row(ids=ids, pages=self._take(0, count))

    def release(self, *rows: Row) -> None:
        for row in rows:
            self._free[0] = [*row.pages, *self._free[0]]
            row.pages = []
            self._move_window(row, 0, first=len(row.window_pages))

    def _take(self, sub_pool: int, count: int) -> list[int]:
        free = self._free[sub_pool]
        pages, self._free[sub_pool] = free[:count], free[count:]
        assert len(pages) == count, "the test's pool is too small"
        return pages

    def _move_window(self, row: Row, end: int, *, first: int) -> None:
        """Give up the window pages below index `first`, and hold those up to `end`."""
        if len(self.pools) == 1:
            return
        given_up = [page for page in row.window_pages[:first] if page]
        row.window_pages[:first] = [0] * min(first, len(row.window_pages))
        self._free[1] = [*given_up, *self._free[1]]
        row.window_pages += self._take(1, max(0, end - len(row.window_pages)))

    def hold_pages(self, rows: Sequence[Row], lens: Sequence[int]) -> None:
        """Move every row's window to the next `lens[i]` ids, where there is a window sub-pool."""
        if len(self.pools) == 1:
            return
        page_size, window = self.pool.geometry.page_size, self.pools[1].geometry.window_tokens
        for row, length in zip(rows, lens, strict=True):
            first = max(0, row.kv_len - window + 1) // page_size
            self._move_window(row, -(-(row.kv_len + length) // page_size), first=first)

    def step(self, rows: Sequence[Row], lens: Sequence[int], *, all_logits: bool = False) -> RunnerOutput:
        """Compute the next `lens[i]` ids of each row."""
        self.hold_pages(rows, lens)
        batch = moved(make_batch(rows, lens, translator=self.translator, all_logits=all_logits), self.device)
        output = self.runner.forward(batch, self.context)
        begin = 0
        for index, (row, length) in enumerate(zip(rows, lens, strict=True)):
            row.kv_len += length
            count = length if all_logits else 1
            first = begin if all_logits else index
            row.logits += list(output.logits[first : first + count])
            begin += length
        return output

    def all_logits(self, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
        """[len(ids), width]: of every position, computed alone in chunks of the given sizes, the last repeated."""
        row = self.row(ids)
        sizes = [*chunks]
        while row.left:
            size = sizes.pop(0) if len(sizes) > 1 else sizes[0]
            self.step([row], [min(size, row.left)], all_logits=True)
        self.release(row)
        return torch.stack(row.logits)
