"""Attention steps with known keys and values, and the dense computation that they are held to."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from tests.support.forwards import Row, make_batch
from worker_svc.attention.base import AttentionBackend
from worker_svc.batch.forward_batch import ForwardBatch, PaddedShape
from worker_svc.batch.page_group import PageGroup
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.kv_order import KVOrder
from worker_svc.kv.token_to_kv_pool import KVGeometry, TokenToKVPool

LAYER = 1
NUM_LAYERS = 2
NUM_PAGES = 80
PLANS = {
    "prefill": ([0, 0, 0], [1, 64, 30]),
    "decode": ([0, 15, 16, 63, 64, 200], [1, 1, 1, 1, 1, 1]),
    "chunks": ([16, 7, 100], [16, 60, 9]),
    "mixed": ([130, 0, 5, 64, 0], [1, 40, 1, 8, 1]),
    "empty rows": ([20, 0, 33, 90], [0, 17, 0, 1]),
}
"""Tokens already in the pool, and tokens computed now, by row."""


@dataclass(frozen=True, kw_only=True)
class Heads:
    """Shape of one attention layer."""

    queries: int = 6
    keys: int = 2
    dim: int = 64

    @property
    def share(self) -> int:
        return self.queries // self.keys


def make_pool(
    fill: float,
    *,
    heads: Heads | None = None,
    order: KVOrder = KVOrder.HEADS,
    dtype: torch.dtype = torch.float32,
    page_size: int = 16,
    window_tokens: int = 0,
    keeps_all: bool = False,
    device: str = "cpu",
) -> TokenToKVPool:
    """A pool whose every slot, the sink's too, holds `fill`. `keeps_all`: its pages are not given up."""
    shape = heads or Heads()
    geometry = KVGeometry(
        num_pages=NUM_PAGES * 16 // page_size,
        page_size=page_size,
        num_layers=NUM_LAYERS,
        num_kv_heads=shape.keys,
        head_dim=shape.dim,
        dtype=dtype,
        order=order,
        window_tokens=0 if keeps_all else window_tokens,
        seen_tokens=window_tokens if keeps_all else 0,
    )
    pool = TokenToKVPool(geometry, device=torch.device(device))
    for layer in range(NUM_LAYERS):
        pool.pages(layer).fill_(fill)
    return pool


@dataclass(kw_only=True)
class Step:
    """Rows with known keys and values; their prefixes are in the pool, the rest is computed by the step."""

    prefixes: Sequence[int]
    lens: Sequence[int]
    heads: Heads = field(default_factory=Heads)
    dtype: torch.dtype = torch.float32
    page_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        rng = torch.Generator().manual_seed(self.seed)

        def drawn(count: int, heads: int) -> torch.Tensor:
            return torch.randn(count, heads, self.heads.dim, generator=rng).to(self.dtype)

        self.first_pages = [0] * len(self.prefixes)
        self.totals = [a + b for a, b in zip(self.prefixes, self.lens, strict=True)]
        self.keys = [drawn(total, self.heads.keys) for total in self.totals]
        self.values = [drawn(total, self.heads.keys) for total in self.totals]
        self.queries = [drawn(total, self.heads.queries) for total in self.totals]
        pages = iter(np.random.default_rng(0).permutation(NUM_PAGES * 16 // self.page_size - 1) + 1)
        self.rows = [
            Row(
                ids=range(total),
                pages=[int(next(pages)) for _ in range(-(-total // self.page_size))],
                kv_len=prefix,
            )
            for total, prefix in zip(self.totals, self.prefixes, strict=True)
        ]

    def store(self, pool: TokenToKVPool, *, begin: int = 0, end: Sequence[int] | None = None) -> None:
        """Put each row's keys and values from `begin` to its prefix, or `end`, into the pool."""
        for index, row in enumerate(self.rows):
            part = range(begin, (end or self.prefixes)[index])
            slots = [row.pages[p // self.page_size] * self.page_size + p % self.page_size for p in part]
            self._write(pool, torch.tensor(slots, dtype=torch.int64), index, slice(part.start, part.stop))

    def forget_before(self, window: int) -> None:
        """List no page any more that lies wholly before what the step's first token sees."""
        self.first_pages = [max(0, prefix + 1 - window) // self.page_size for prefix in self.prefixes]

    @property
    def forgotten(self) -> list[int]:
        return [page for row, first in zip(self.rows, self.first_pages, strict=True) for page in row.pages[:first]]

    def batch(self, pool: TokenToKVPool) -> ForwardBatch:
        for row in self.rows:
            row.window_pages = row.pages
        batch = make_batch(self.rows, self.lens, translator=IndexTranslator((pool,)))
        (group,) = batch.page_groups
        return replace(batch, page_groups=(self._listed(group, device=pool.keys(LAYER).device),))

    def _listed(self, group: PageGroup, *, device: torch.device) -> PageGroup:
        """The pages of each row from its first listed one on."""
        used = [
            row.pages[first : -(-total // self.page_size)]
            for row, first, total in zip(self.rows, self.first_pages, self.totals, strict=True)
        ]
        indptr = np.cumsum([0, *(len(pages) for pages in used)]).astype(np.int32)
        indices = np.concatenate(used).astype(np.int32)
        return replace(
            group,
            out_cache_loc=group.out_cache_loc.to(device),
            kv_indptr=torch.from_numpy(indptr),
            kv_indices=torch.from_numpy(indices),
            kv_indptr_host=indptr,
            kv_indices_host=indices,
            start_positions_host=np.array(self.first_pages, np.int32) * self.page_size,
        )

    def run(self, backend: AttentionBackend, pool: TokenToKVPool, *, padded: PaddedShape | None = None) -> torch.Tensor:
        """[num_tokens, heads * dim] on the CPU. The prefixes are in the pool already. `padded`: as a graph pads it."""
        batch = self.batch(pool)
        batch = batch if padded is None else batch.pad(padded)
        tensors = self.new_tensors(device=pool.keys(LAYER).device, padding=batch.num_tokens - sum(self.lens))
        return backend.run(*tensors, layer=LAYER, metadata=backend.plan(batch))[: sum(self.lens)].cpu()

    def new_tensors(self, *, device: torch.device, padding: int = 0) -> tuple[torch.Tensor, ...]:
        """Queries, keys and values of the step's tokens, and NaN for `padding` tokens behind them."""

        def new(parts: Sequence[torch.Tensor]) -> torch.Tensor:
            real = torch.cat([part[prefix:] for part, prefix in zip(parts, self.prefixes, strict=True)])
            return torch.cat([real, real.new_full((padding, *real.shape[1:]), float("nan"))]).to(device)

        return new(self.queries), new(self.keys), new(self.values)

    def dense(self, *, window: int = 0, kv_dtype: torch.dtype | None = None) -> torch.Tensor:
        """The same in float64, of keys and values rounded to the pool's type."""
        outputs = [
            _dense_row(
                query[prefix:].double(),
                *(part.to(kv_dtype or self.dtype).double().repeat_interleave(self.heads.share, 1) for part in kv),
                first=prefix,
                window=window,
            )
            for query, prefix, *kv in zip(self.queries, self.prefixes, self.keys, self.values, strict=True)
        ]
        return torch.cat(outputs)

    def _write(self, pool: TokenToKVPool, slots: torch.Tensor, index: int, part: slice) -> None:
        device = pool.keys(LAYER).device
        keys, values = (parts[index][part].to(device) for parts in (self.keys, self.values))
        pool.write(LAYER, slots=slots.to(device), keys=keys, values=values)


def planned(name: str, **options) -> Step:
    """The step of that name in `PLANS`."""
    prefixes, lens = PLANS[name]
    return Step(prefixes=prefixes, lens=lens, **options)


def _dense_row(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, first: int, window: int) -> torch.Tensor:
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[-1] ** 0.5
    positions = first + torch.arange(len(query))[:, None]
    slots = torch.arange(len(key))
    hidden = slots > positions
    if window:
        hidden |= slots <= positions - window
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value).flatten(1)
