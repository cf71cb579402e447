"""Attention in fixed tiles, in a fixed order: a query's output has the same bits in any batch and any chunking.

Tiles of 8 query tokens x 64 KV slots at multiples of 64 positions, upwards, with running maximum and sum. Every product
has the same shape whatever the batch, so the order of every sum is fixed; a tile that a query does not see leaves its
maximum and sum as they are, bit for bit. Reference for the other back-ends; float32.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protos.wire.errors import UnsupportedFeature
from worker_svc.attention.base import NothingFixed
from worker_svc.attention.paged_rows import PagedRows, first_slots, group_by_length, paged_rows, visible_slots
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.kv.token_to_kv_pool import TokenToKVPool

QUERY_TILE = 8
KV_TILE = 64
_CHECKED_TILES = (1, 2, 3, 5, 12, 17)
_CHECKED_SHARES = (1, 2, 3, 4, 8)
"""Query heads per KV head."""

Array = np.ndarray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileStep:
    """The next KV tile of those query tiles that have one more, from the first on. On the device."""

    kv_tiles: Tensor
    """[count] int64: among all KV tiles of the gathered rows."""
    hidden: Tensor | None
    """[1, count, 8, 1, 64] bool, slots a query must not see. `None`: all are seen."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TileGroup:
    """Query tiles of some rows, those that need most KV tiles first. All tensors on the device."""

    kv: PagedRows
    tokens: Tensor
    """[num_tiles * 8] int64: token of each query; a short tile repeats its last one."""
    targets: Tensor
    """[k] int64: tokens whose output comes from this group."""
    sources: Tensor
    """[k] int64: their place among the queries."""
    steps: tuple[TileStep, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TiledMetadata:
    """One step's plan. Lives until the step's forward is done."""

    out_cache_loc: Tensor
    groups: tuple[TileGroup, ...]


class TiledAttention(NothingFixed):
    """The reproducible back-end."""

    parts = ()

    def __init__(self, pool: TokenToKVPool) -> None:
        """Raises UnsupportedFeature on a CPU where a tile's bits depend on the tiles beside it."""
        self.pool = pool
        _check_tiles(pool.geometry.head_dim)

    def plan(self, batch: ForwardBatch) -> TiledMetadata:
        """Cut the batch into tiles."""
        geometry = self.pool.geometry
        pages = batch.page_groups[geometry.sub_pool]
        rows = np.flatnonzero(batch.query_lens_host() > 0)
        unit = math.lcm(KV_TILE, geometry.page_size)
        firsts = first_slots(pages, unit=unit)
        groups = []
        for members, width in group_by_length(rows, batch.seq_lens_host - firsts, unit=unit):
            kv = paged_rows(members, pages, batch.seq_lens_host, firsts=firsts, width=width, pool=self.pool)
            groups.append(_tile_group(batch, kv, window_tokens=geometry.attention_window))
        return TiledMetadata(out_cache_loc=pages.out_cache_loc, groups=tuple(groups))

    def run(self, queries: Tensor, keys: Tensor, values: Tensor, *, layer: int, metadata: TiledMetadata) -> Tensor:
        """See `AttentionBackend.run`."""
        self.pool.write(layer, slots=metadata.out_cache_loc, keys=keys, values=values)
        output = torch.empty_like(queries, memory_format=torch.contiguous_format)
        for group in metadata.groups:
            output[group.targets] = self._attend(queries, group, layer=layer)
        return output.view(len(queries), -1)

    def _attend(self, queries: Tensor, group: TileGroup, *, layer: int) -> Tensor:
        """[k, num_q_heads, head_dim]: outputs of the group's tokens."""
        heads, head_dim = self.pool.geometry.num_kv_heads, self.pool.geometry.head_dim
        tiles, share = len(group.tokens) // QUERY_TILE, queries.shape[1] // heads
        keys = _tiles(group.kv.gather(self.pool.keys(layer), queries.dtype))
        values = _tiles(group.kv.gather(self.pool.values(layer), queries.dtype))
        query = queries.index_select(0, group.tokens).view(tiles, QUERY_TILE, heads, share, head_dim)
        query = query.permute(2, 0, 1, 3, 4).reshape(heads, tiles, QUERY_TILE * share, head_dim) * head_dim**-0.5
        running = _RunningSoftmax(query)
        for step in group.steps:
            chosen = (part.index_select(1, step.kv_tiles) for part in (keys, values))
            running.add(*chosen, hidden=step.hidden)
        output = running.output().view(heads, tiles, QUERY_TILE, share, head_dim).permute(1, 2, 0, 3, 4)
        return output.reshape(tiles * QUERY_TILE, heads * share, head_dim).index_select(0, group.sources)


class _RunningSoftmax:
    """Softmax-weighted sum of values over KV tiles, one tile at a time."""

    def __init__(self, query: Tensor) -> None:
        self._query = query
        # Not infinite: where nothing was seen yet, differences must be numbers.
        self._maximum = query.new_full((*query.shape[:-1], 1), torch.finfo(query.dtype).min)
        self._sum = query.new_zeros((*query.shape[:-1], 1))
        self._weighted = torch.zeros_like(query)

    def add(self, keys: Tensor, values: Tensor, *, hidden: Tensor | None) -> None:
        """Add one KV tile [heads, n, 64, head_dim] for the first n query tiles."""
        heads, count, _, _ = keys.shape
        scores = torch.matmul(self._query[:, :count], keys.transpose(-1, -2))
        if hidden is not None:
            scores.view(heads, count, QUERY_TILE, -1, KV_TILE).masked_fill_(hidden, -math.inf)
        maximum, total, weighted = (part[:, :count] for part in (self._maximum, self._sum, self._weighted))
        new_maximum = torch.maximum(maximum, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_maximum).exp_()
        rescale = maximum.sub(new_maximum).exp_()
        total.mul_(rescale).add_(weights.sum(-1, keepdim=True))
        weighted.mul_(rescale).add_(torch.matmul(weights, values))
        maximum.copy_(new_maximum)

    def output(self) -> Tensor:
        """[heads, num_tiles, 8 * share, head_dim]."""
        return self._weighted / self._sum


def _check_tiles(head_dim: int) -> None:
    """Each tile's products must have the same bits alone, beside others, and with its queries in another order."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, _CHECKED_TILES[-1], KV_TILE, head_dim, generator=generator)
    for share in _CHECKED_SHARES:
        query = torch.randn(_CHECKED_TILES[-1], QUERY_TILE * share, head_dim, generator=generator)
        known = _attend_once(query, keys, values)
        for count in _CHECKED_TILES:
            found = _attend_once(query[-count:].flip(1), keys[-count:], values[-count:]).flip(1)
            if not torch.equal(found, known[-count:]):
                message = f"on this CPU attention gives other bits for {count} tiles than for more: use numerics fast"
                raise UnsupportedFeature(message, field="numerics")


def _attend_once(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    running = _RunningSoftmax(query[None])
    running.add(keys[None], values[None], hidden=None)
    return running.output()[0]


def _tiles(gathered: Tensor) -> Tensor:
    """[heads, n, width, head_dim] -> [heads, n * width / 64, 64, head_dim]."""
    heads, _, _, head_dim = gathered.shape
    return gathered.view(heads, -1, KV_TILE, head_dim)


def _tile_group(batch: ForwardBatch, kv: PagedRows, *, window_tokens: int) -> TileGroup:
    query_lens = batch.query_lens_host().astype(np.int64)
    starts = np.cumsum(query_lens) - query_lens
    lens = query_lens[kv.rows]
    counts = -(-lens // QUERY_TILE)
    member = np.repeat(np.arange(len(kv.rows)), counts)
    first = (np.arange(len(member)) - np.repeat(np.cumsum(counts) - counts, counts)) * QUERY_TILE
    offsets = np.minimum(first[:, None] + np.arange(QUERY_TILE), lens[member][:, None] - 1)
    positions = (batch.seq_lens_host - query_lens)[kv.rows][member][:, None] + offsets
    lowest = np.maximum(positions[:, 0] - window_tokens + 1, 0) // KV_TILE if window_tokens else np.zeros_like(member)
    order = np.argsort(lowest - positions[:, -1] // KV_TILE, kind="stable")
    member, first, positions, offsets, lowest = (part[order] for part in (member, first, positions, offsets, lowest))
    tokens = starts[kv.rows][member][:, None] + offsets
    is_real = (first[:, None] + np.arange(QUERY_TILE)) == offsets
    device = kv.pages.device
    return TileGroup(
        kv=kv,
        tokens=torch.from_numpy(tokens.ravel()).to(device),
        targets=torch.from_numpy(tokens[is_real]).to(device),
        sources=torch.from_numpy(np.flatnonzero(is_real)).to(device),
        steps=tuple(_steps(kv, member, positions, lowest, window_tokens=window_tokens)),
    )


def _steps(kv: PagedRows, member: Array, positions: Array, lowest: Array, *, window_tokens: int) -> Iterator[TileStep]:
    """KV tile after KV tile of query tiles, those with most of them first; `lowest`: the first one each sees."""
    numbers = positions[:, -1] // KV_TILE + 1 - lowest
    before = member * (kv.width // KV_TILE) - kv.firsts[member] // KV_TILE
    for index in range(int(numbers[0])):
        count = int((numbers > index).sum())
        tiles = lowest[:count] + index
        slots = (tiles[:, None] * KV_TILE + np.arange(KV_TILE))[:, None]
        seen = visible_slots(slots, positions[:count, :, None], window_tokens=window_tokens)
        hidden = None if seen.all() else torch.from_numpy(~seen)[None, :, :, None, :].to(kv.pages.device)
        yield TileStep(kv_tiles=torch.from_numpy(before[:count] + tiles).to(kv.pages.device), hidden=hidden)
