"""The canary's shadow of one sub-pool: token, position and chain hash of a slot; how far a page is whole.

    slots [0, fill) of a page    one chain: consecutive positions, each hash made from the one before it
    head of a page               the hash that its slot 0 was chained to
    slots from fill on           left over from whoever had the page before

So a page is known to be whole by its head, its first position and its fill, and reading a row costs as many look-ups as
it has pages. Knows nothing of batches. Page 0 shadows the sink and means nothing.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from protos.wire import canary_chain

BYTES_PER_SLOT = 4 + 4 + 8
BYTES_PER_PAGE = 4 * 8
FIRST, UNLISTED = -1, -2


def canary_bytes(page_size: int) -> int:
    """What the shadow of one page takes."""
    return BYTES_PER_SLOT * page_size + BYTES_PER_PAGE


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageReads:
    """Pages that hold positions below their row's first token, in row order. E entries, on the device."""

    pages: Tensor
    """[E] int64"""
    positions: Tensor
    """[E] int64: position of the page's slot 0."""
    needed: Tensor
    """[E] int64: how many of its slots are read, from the first."""
    heads: Tensor
    """[E] int64: the hash it must be chained to, where it is the row's first page."""
    previous_pages: Tensor
    """[E] int64: the row's page before it; FIRST: there is none; UNLISTED: it has left the table."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PageSpans:
    """The part of each page that is written now, in token order. S spans, on the device."""

    first_tokens: Tensor
    """[S] int64: index of the first token of the span."""
    last_tokens: Tensor
    """[S] int64: index of the last one."""
    begins: Tensor
    """[S] int64: offset of that token in its page."""
    ends: Tensor
    """[S] int64: offset behind the last."""


class CanaryTable:
    """Made with its sub-pool, written by every step, lives as long as the process."""

    def __init__(self, *, num_pages: int, page_size: int, device: torch.device) -> None:
        self.page_size = page_size
        num_slots = num_pages * page_size
        self.tokens = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.positions = torch.full((num_slots,), -1, dtype=torch.int32, device=device)
        self.hashes = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.heads = torch.zeros(num_pages, dtype=torch.int64, device=device)
        self.fills = torch.zeros(num_pages, dtype=torch.int64, device=device)
        # Of the first and last slot once more, page by page: a read touches nothing else.
        self.firsts = torch.full((num_pages,), -1, dtype=torch.int64, device=device)
        self.tails = torch.zeros(num_pages, dtype=torch.int64, device=device)

    def first_wrong(self, reads: PageReads) -> Tensor:
        """[E] int64: offset of the first slot of the page that does not hold what it should; page_size: all do."""
        pages, previous = reads.pages, reads.previous_pages
        fills = self.fills.index_select(0, pages)
        chained_to = torch.where(previous >= 0, self.tails.index_select(0, previous.clamp(min=0)), reads.heads)
        is_chained = (self.heads.index_select(0, pages) == chained_to) | (previous == UNLISTED)
        is_placed = self.firsts.index_select(0, pages) == reads.positions
        whole = torch.where(is_chained & is_placed, fills, 0)
        return torch.where(whole >= reads.needed, self.page_size, whole)

    def first_unchained(self, page: int) -> int:
        """Offset of the first slot whose hash does not follow from the one before it; page_size: all do.

        Reads every slot of the page, so it is for pages of which `first_wrong` said that something is: a token that was
        written in the midst of them ended their whole part behind itself. The page has a first position.
        """
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        hashes = self.hashes[slots].cpu().numpy().view(np.uint64)
        before = np.roll(hashes, 1)
        before[0] = self.heads[page : page + 1].cpu().numpy().view(np.uint64)[0]
        mixed = canary_chain.mixed(self.tokens[slots].cpu().numpy(), int(self.firsts[page]))
        wrong = np.flatnonzero(hashes != before * np.uint64(canary_chain.FACTOR) + mixed)
        return int(wrong[0]) if len(wrong) else self.page_size

    def record(
        self, slots: Tensor, *, tokens: Tensor, positions: Tensor, hashes: tuple[Tensor, Tensor], spans: PageSpans
    ) -> None:
        """Tokens were written.

        Args:
            slots: [n] int64, 0 = the sink.
            tokens: [n] int32.
            positions: [n] int64.
            hashes: [n] int64 each: the chain before and after the token.
            spans: of the same tokens.
        """
        before, after = hashes
        self.tokens[slots] = tokens
        self.positions[slots] = positions.to(torch.int32)
        self.hashes[slots] = after
        pages = torch.div(slots[spans.first_tokens], self.page_size, rounding_mode="floor")
        fills = self.fills[pages]
        # A span that begins behind the whole part leaves a gap: the page is whole up to that only.
        self.fills[pages] = torch.where(spans.begins <= fills, spans.ends, fills)
        begins_page, ends_page = spans.begins == 0, spans.ends == self.page_size
        self.heads[pages] = torch.where(begins_page, before[spans.first_tokens], self.heads[pages])
        self.firsts[pages] = torch.where(begins_page, positions[spans.first_tokens], self.firsts[pages])
        self.tails[pages] = torch.where(ends_page, after[spans.last_tokens], self.tails[pages])
