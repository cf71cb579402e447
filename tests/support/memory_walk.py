"""Worker memory beside a slow model of it: what each page holds, which prefixes are cached, and who was used last.

The model knows prefixes as whole tuples of tokens and pages as numbers with a content; it has no tree, no counts of use
and no heap. After every operation both must agree.
"""

from array import array
from collections import Counter
from dataclasses import dataclass, field

from protos.wire.worker_info import SubPool
from scheduler_svc.memory.memory_check import check_memory
from scheduler_svc.memory.page_holding import MemoryKey, PageHolding
from scheduler_svc.memory.prefix_match import PrefixMatch
from scheduler_svc.memory.worker_memory import WorkerMemory
from tests.support.plans import full_sub_pool, window_sub_pool

BOOKS = 3
Prefix = tuple[bytes, tuple[int, ...]]


def sub_pools(*, page_size: int, pages: int, window: int | None) -> tuple[SubPool, ...]:
    """The window sub-pool is the smaller one, so that its pages are given up first."""
    pools = (full_sub_pool(num_pages=pages + 1, page_size=page_size),)
    if window is not None:
        pools += (window_sub_pool(num_pages=pages // 2 + 2, page_size=page_size, window_tokens=window),)
    return pools


@dataclass(eq=False)
class Reader:
    """One request as the walk sees it."""

    domain: bytes
    tokens: "array[int]"
    holding: PageHolding
    kv_len: int
    shares: bool = True
    trusts: bool = True
    path: list[Prefix] = field(default_factory=list)
    """The cached prefixes whose pages it uses."""


class MemoryWalk:
    """Operations take any integers; what makes no sense now does nothing."""

    def __init__(self, *, page_size: int, pages: int, window: int | None = None) -> None:
        pools = sub_pools(page_size=page_size, pages=pages, window=window)
        self.page_size, self.pages, self.window = page_size, pages, window
        self.memory = WorkerMemory(MemoryKey("w0", 0), pools, slack_tokens=page_size)
        self.readers: list[Reader] = []
        self.contents: list[dict[int, Prefix]] = [{} for _ in pools]
        self.cached: dict[Prefix, tuple[int, int]] = {}
        """Of each cached prefix when it was last let go, and its number."""
        self.clock = 0
        self.hits = 0
        self.evicted = 0
        self.exchanged = 0
        self.cut = 0
        self.steps = 0
        """Operations that did something."""
        self.borders: Counter[tuple[int, bool]] = Counter()
        """Prompts that end at a page border, or one token before or behind: by that, and whether anything was found."""

    # --- operations

    def begin(self, domain: int, book: int, pages: int, more: int, *, trusts: bool = True) -> None:
        """A request whose prompt is the beginning of a book, and its own last token."""
        length = max(1, (pages % 5) * self.page_size + more % 5 - 2)
        tokens = array("i", [(position * 7 + book % BOOKS) % 50 for position in range(length)])
        if more % 3 == 0:
            tokens[-1] = 60 + more % 20
        name = b"domain%d" % (domain % 2)
        match = PrefixMatch(self.memory.cache, name) if not trusts else self.memory.match(name, tokens, None)
        if trusts:
            self._check_match(name, tokens, match)
        needs = zip(self.memory.demand.most(length), self.memory.shared(match), self.memory.available(), strict=True)
        if any(need - shared > available for need, shared, available in needs):
            return
        before = self._page_counts()
        path = [self._prefix(name, tokens, index) for index in range(match.pages)]
        self._use_room(-(-length // self.page_size) - match.pages, keep=path)
        holding = self.memory.reserve(tokens, match, trusts_cache=trusts)
        self.hits += match.pages
        self.steps += 1
        offset = (length + 1) % self.page_size - 1
        if length > 1 and offset in (-1, 0, 1):
            self.borders[offset, match.pages > 0] += 1
        reader = Reader(name, tokens, holding, kv_len=match.pages * self.page_size, trusts=trusts, path=path)
        self.readers.append(reader)
        assert before[0] - self._page_counts()[0] <= -(-length // self.page_size)

    def advance(self, who: int, count: int) -> None:
        """Compute some more known tokens of a request, and let the pages enter the cache."""
        reader = self._reader(who)
        if reader is None:
            return
        end = min(len(reader.tokens), reader.kv_len + 1 + count % (2 * self.page_size))
        if end <= reader.kv_len or not self.memory.can_grow(reader.holding, end):
            return
        self._use_room(-(-end // self.page_size) - reader.holding.lists[0].end, keep=[])
        self.memory.grow(reader.holding, end)
        self._write(reader, end)
        reader.kv_len = end
        self.steps += 1
        self._share(reader)
        self.memory.commit(reader.holding, reader.tokens, end)

    def append(self, who: int, token: int) -> None:
        """A request gets a token."""
        reader = self._reader(who)
        if reader is not None and len(reader.tokens) < self.pages * self.page_size:
            reader.tokens.append(token % 3)
            self.steps += 1

    def end(self, who: int) -> None:
        """A request gives everything back."""
        reader = self._reader(who)
        if reader is not None:
            self._end(reader)
            self.steps += 1

    def distrust(self, who: int) -> None:
        """A request had bad numbers: what it used or brought in is gone, with all that follows from it."""
        reader = self._reader(who)
        if reader is None:
            return
        if reader.path and reader.holding.path[0].is_attached:
            self._forget(reader.path[0])
        self.memory.distrust(reader.holding)
        self._end(reader)
        self.steps += 1

    def flush(self) -> None:
        """Forget everything."""
        unused = [prefix for prefix in self.cached if not self._is_used(prefix)]
        freed = self.memory.cache.flush()
        self.cached.clear()
        self.steps += 1
        for reader in self.readers:
            reader.shares = False
        if self.window is None:
            assert freed == len(unused)

    # --- agreement

    def check(self) -> None:
        """That memory and model say the same."""
        check_memory(self.memory, [reader.holding for reader in self.readers])
        for reader in self.readers:
            self._check_contents(reader)
        found = {self._of_node(node) for node in self.memory.cache.nodes()}
        assert found == set(self.cached)
        free = self.memory.allocators[0].free
        used = {page for reader in self.readers for page in reader.holding.lists[0].held().tolist()}
        unused = sum(1 for prefix in self.cached if not self._is_used(prefix))
        assert free + unused + len(used) == self.pages
        assert self.memory.available()[0] == free + unused

    def _check_match(self, domain: bytes, tokens: "array[int]", match: PrefixMatch) -> None:
        """The longest cached prefix that leaves a token, cut to where the window before it is whole."""
        most = (len(tokens) - 1) // self.page_size
        whole = 0
        while whole < most and self._prefix(domain, tokens, whole) in self.cached:
            whole += 1
        assert len(match.path) == whole
        usable = whole
        while usable and self.window is not None and not self._is_window_whole(match, usable):
            usable -= 1
        assert match.pages == usable
        self.cut += whole - usable

    def _is_window_whole(self, match: PrefixMatch, pages: int) -> bool:
        assert self.window is not None
        positions = range(max(0, pages * self.page_size - self.window), pages * self.page_size)
        return all(match.path[position // self.page_size].pages[1] for position in positions)

    def _check_contents(self, reader: Reader) -> None:
        """Every position that later ones attend to has the KV of exactly the reader's tokens, in its domain."""
        for sub_pool, pages in enumerate(reader.holding.lists):
            for index in range(pages.first, reader.kv_len // self.page_size):
                expected = self._prefix(reader.domain, reader.tokens, index)
                assert self.contents[sub_pool][pages.page(index)] == expected
        if self.window is not None:
            border = reader.kv_len // self.page_size * self.page_size
            assert reader.holding.lists[1].first * self.page_size <= max(0, border - self.window)

    # --- the model

    def _write(self, reader: Reader, end: int) -> None:
        for sub_pool, pages in enumerate(reader.holding.lists):
            for index in range(reader.kv_len // self.page_size, -(-end // self.page_size)):
                others = [
                    page
                    for other in self.readers
                    if other is not reader
                    for page in other.holding.lists[sub_pool].held().tolist()
                ]
                assert pages.page(index) not in others, "a page is written that another reads"
                self.contents[sub_pool][pages.page(index)] = self._prefix(reader.domain, reader.tokens, index, end)

    def _share(self, reader: Reader) -> None:
        for index in range(len(reader.path), reader.kv_len // self.page_size):
            if reader.path and reader.path[-1] not in self.cached:
                reader.shares = False
            prefix = self._prefix(reader.domain, reader.tokens, index)
            if not reader.shares or (not reader.trusts and prefix in self.cached):
                reader.shares = False
                return
            if prefix in self.cached:
                self.exchanged += 1
            else:
                self.cached[prefix] = (0, 0)
            reader.path.append(prefix)

    def _end(self, reader: Reader) -> None:
        used = [prefix for prefix in reader.path if self._uses(reader, prefix)]
        self.readers.remove(reader)
        self.memory.release(reader.holding)
        self.clock += 1
        for prefix in used:
            if prefix in self.cached and not self._is_used(prefix):
                self.cached[prefix] = (self.clock, 0)

    def _forget(self, top: Prefix) -> None:
        domain, tokens = top
        gone = [p for p in self.cached if p[0] == domain and p[1][: len(tokens)] == tokens]
        for prefix in gone:
            del self.cached[prefix]
        for reader in self.readers:
            if any(prefix in gone for prefix in reader.path):
                reader.shares = False

    def _use_room(self, pages: int, *, keep: list[Prefix]) -> None:
        """The model's eviction: unused leaves, least recently used first."""
        free = self.memory.allocators[0].free
        while pages > free:
            leaves = [
                prefix
                for prefix in self.cached
                if not self._is_used(prefix) and prefix not in keep and not self._has_child(prefix)
            ]
            serials = {self._of_node(node): node.serial for node in self.memory.cache.nodes()}
            oldest = min(leaves, key=lambda prefix: (self.cached[prefix][0], serials[prefix]))
            del self.cached[oldest]
            self.evicted += 1
            free += 1

    def _has_child(self, prefix: Prefix) -> bool:
        domain, tokens = prefix
        longer = len(tokens) + self.page_size
        return any(d == domain and len(t) == longer and t[: len(tokens)] == tokens for d, t in self.cached)

    def _is_used(self, prefix: Prefix) -> bool:
        return any(prefix in reader.path for reader in self.readers if self._uses(reader, prefix))

    def _uses(self, reader: Reader, prefix: Prefix) -> bool:
        """Whether the reader's page is the cached one, and not one from before the prefix was forgotten."""
        index = len(prefix[1]) // self.page_size - 1
        return index < len(reader.path) and reader.path[index] == prefix and reader.holding.path[index].is_attached

    def _prefix(self, domain: bytes, tokens: "array[int]", index: int, end: int | None = None) -> Prefix:
        stop = (index + 1) * self.page_size
        return domain, tuple(tokens[: stop if end is None else min(stop, end)])

    def _of_node(self, node) -> Prefix:
        keys = []
        while node.parent is not None:
            keys.append(array("i", node.key))
            node = node.parent
        return node.key, tuple(token for key in reversed(keys) for token in key)

    def _page_counts(self) -> list[int]:
        return [allocator.free for allocator in self.memory.allocators]

    def _reader(self, who: int) -> Reader | None:
        return self.readers[who % len(self.readers)] if self.readers else None
