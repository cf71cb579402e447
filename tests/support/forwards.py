"""Drives a ModelRunner by hand-made batches: sequences of known ids, computed in any chunks, beside any others."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from protos.service.model_files import ModelFolder
from protos.wire.enums import ForwardMode, GraphRefusal
from worker_svc.attention.registry import attention_backend
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.page_group import PageGroup
from worker_svc.batch.row_groups import ExtendGroup
from worker_svc.forward_context import ForwardContext
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool
from worker_svc.model_runner import ModelRunner, RunnerOutput
from worker_svc.models.registry import load_model
from worker_svc.numerics import DTYPES, numerics_by_name

CPU = torch.device("cpu")


@dataclass(kw_only=True, eq=False)
class Row:
    """A sequence of known ids and how much of it is in the pool."""

    ids: Sequence[int]
    pages: list[int] = field(default_factory=list)
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
    page_size = translator.pools[0].geometry.page_size
    extend_lens = np.array(lens, np.int32)
    prefixes = np.array([row.kv_len for row in rows], np.int32)
    seq_lens = prefixes + extend_lens
    starts = (np.cumsum(extend_lens) - extend_lens).astype(np.int32)
    positions = np.concatenate([np.arange(a, b) for a, b in zip(prefixes, seq_lens, strict=True)])
    owners = np.repeat(np.arange(len(rows)), extend_lens)
    used = [row.pages[: -(-int(length) // page_size)] for row, length in zip(rows, seq_lens, strict=True)]
    pages = np.array([rows[owner].pages[pos // page_size] for owner, pos in zip(owners, positions, strict=True)])
    last = starts + extend_lens - 1
    indptr = np.cumsum([0, *(len(part) for part in used)]).astype(np.int32)
    indices = np.concatenate([np.array(part, np.int32) for part in used])
    last_lens = ((seq_lens - 1) % page_size + 1).astype(np.int32)
    ids = np.concatenate([row.ids[row.kv_len : row.kv_len + n] for row, n in zip(rows, lens, strict=True)])
    is_decode = all(length == 1 for length in lens)
    as_tensor = torch.from_numpy
    group = PageGroup(
        sub_pool=0,
        kv_indptr=as_tensor(indptr),
        kv_indices=as_tensor(indices),
        kv_last_page_len=as_tensor(last_lens),
        out_cache_loc=as_tensor(translator.slots(0, pages, positions % page_size)),
        kv_indptr_host=indptr,
        kv_indices_host=indices,
        kv_last_page_len_host=last_lens,
        start_positions_host=np.zeros(len(rows), np.int32),
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
        page_groups=(group,),
        logits_rows=torch.arange(len(positions)) if all_logits else as_tensor(last.astype(np.int64)),
        last_token_rows=as_tensor(last.astype(np.int64)),
        extend=None if is_decode else extend,
    )


class ForwardDriver:
    """A loaded model on a pool of its own. Pages are handed out in random order and come back dirty."""

    def __init__(
        self,
        folder: ModelFolder,
        *,
        numerics: str = "reproducible",
        dtype: str = "float32",
        num_pages: int = 256,
        page_size: int = 16,
    ) -> None:
        strategy = numerics_by_name(numerics, dtype=DTYPES[dtype], device=CPU)
        self.loaded = load_model(folder, numerics=strategy, dtype=DTYPES[dtype], device=CPU)
        config = self.loaded.config
        geometry = KVGeometry(
            num_pages=num_pages,
            page_size=page_size,
            num_layers=config.num_layers,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=DTYPES[dtype],
        )
        self.pool = TokenToKVPool(geometry, device=CPU)
        self.translator = IndexTranslator((self.pool,))
        self.runner = ModelRunner(self.loaded.model)
        self.context = ForwardContext(attention_backend(strategy.attention, self.pool))
        self.release_all()
        self.poison(0.5)

    def release_all(self) -> None:
        """Forget every row."""
        self._free = (np.random.default_rng(3).permutation(self.pool.geometry.num_pages - 1) + 1).tolist()

    def poison(self, value: float) -> None:
        """Fill every slot, the sink included."""
        for layer in range(self.pool.geometry.num_layers):
            self.pool.keys(layer).fill_(value)
            self.pool.values(layer).fill_(value)

    def row(self, ids: Sequence[int]) -> Row:
        count = -(-len(ids) // self.pool.geometry.page_size)
        pages, self._free = self._free[:count], self._free[count:]
        assert len(pages) == count, "the test's pool is too small"
        return Row(ids=ids, pages=pages)

    def release(self, *rows: Row) -> None:
        for row in rows:
            self._free = [*row.pages, *self._free]
            row.pages = []

    def step(self, rows: Sequence[Row], lens: Sequence[int], *, all_logits: bool = False) -> RunnerOutput:
        """Compute the next `lens[i]` ids of each row."""
        batch = make_batch(rows, lens, translator=self.translator, all_logits=all_logits)
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
