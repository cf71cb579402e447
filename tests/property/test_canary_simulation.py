"""The scheduling core's own plans in front of the canary: silent in every life, and awake to a swapped page in any.

Lives have shared prefixes, retraction, migration, failed rows, several plans in flight and window sub-pools.
"""

import random
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import torch

from protos.wire.enums import Feature
from tests.property.test_core_simulation import TURNS, Life
from tests.support import core_harness
from tests.support.fake_worker import FakeWorker, _row_tokens
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.canary_guard import KVCanary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry

CPU = torch.device("cpu")
LIVES = 8


class Pages:
    def __init__(self, pool):
        self.geometry = KVGeometry(
            num_pages=pool.num_pages,
            page_size=pool.page_size,
            num_layers=1,
            num_kv_heads=1,
            head_dim=1,
            dtype=torch.float32,
        )


class CanaryWorker(FakeWorker):
    """Holds every plan against a canary of its own."""

    seen: ClassVar[Counter[str]] = Counter()
    random = random.Random(0)

    def reset(self):
        super().reset()
        translator = IndexTranslator(tuple(Pages(pool) for pool in self._info.sub_pools))
        self.canary = KVCanary(translator, is_refusing=True, device=CPU)
        sizes = tuple(pool.page_size for pool in self._info.sub_pools)
        self.builder = BatchBuilder(translator=translator, page_sizes=sizes, device=CPU)

    def execute(self, plan):
        result = super().execute(plan)
        if result.rejection is None:
            self._guard(plan)
        return result

    def _guard(self, plan):
        ids = [
            [self._resolve(plan, row, token, offset) for offset, token in enumerate(tokens)]
            for row, tokens in enumerate(_row_tokens(plan))
        ]
        flat = np.array([token or 0 for row in ids for token in row], np.int32)
        (batch,) = self.builder.build(replace(plan, tokens=replace(plan.tokens, ids=flat, sources=None)))
        # A row whose reference is gone fails and writes nothing.
        gone = torch.tensor([None in row for row in ids for _ in row])
        batch = replace(batch, page_groups=tuple(group.diverted(gone) for group in batch.page_groups))
        expected = self.canary.expected(plan.rows, slice(0, plan.rows.num_rows))
        self.seen["known hashes"] += int((expected.hashes != 0).sum())
        self.seen["rows"] += plan.rows.num_rows
        if self.random.random() < 0.3:
            self._plant(batch, expected)
        _, verdict = self.canary.guard(batch, expected)
        assert verdict.violations == (), verdict.violations

    def _plant(self, batch, expected):
        """One page of one row becomes another page: that row must be named."""
        sub_pool = self.random.randrange(len(batch.page_groups))
        group, table = batch.page_groups[sub_pool], self.canary.tables[sub_pool]
        row = self.random.randrange(batch.num_reqs)
        entry = self.random.randrange(int(group.kv_indptr_host[row]), int(group.kv_indptr_host[row + 1]))
        place = entry - int(group.kv_indptr_host[row])
        prefix = int(batch.seq_lens_host[row] - batch.query_lens_host()[row])
        start = int(group.start_positions_host[row])
        needed = min(table.page_size, prefix - start - place * table.page_size)
        mine = int(group.kv_indices_host[entry])
        other = self.random.randrange(1, self._info.sub_pools[sub_pool].num_pages)
        if needed <= 0 or self._content(table, mine, needed) == self._content(table, other, needed):
            return
        indices = group.kv_indices_host.copy()
        indices[entry] = other
        groups = list(batch.page_groups)
        groups[sub_pool] = replace(group, kv_indices_host=indices)
        verdict = self.canary.check(replace(batch, page_groups=tuple(groups)), expected)
        found = [(violation.row, violation.sub_pool) for violation in verdict.violations]
        assert found == [(row, sub_pool)], (found, row, sub_pool, mine, other, needed)
        self.seen["planted"] += 1
        self.seen["planted in a window"] += sub_pool

    @staticmethod
    def _content(table, page, needed):
        slots = slice(page * table.page_size, page * table.page_size + needed)
        return table.hashes[slots].tolist(), int(table.fills[page]) >= needed


class CanaryLife(Life):
    """No plan is rejected: a chunk that is in flight behind a rejected one does read what was never written."""

    def __init__(self, seed):
        super().__init__(seed)
        self.rates["reject"] = 0

    def _info(self):
        info = super()._info()
        return replace(info, features=info.features | {Feature.CANARY})


def test_every_plan_of_the_core_is_clean_and_a_swapped_page_is_always_named(monkeypatch):
    monkeypatch.setattr(core_harness, "FakeWorker", CanaryWorker)
    CanaryWorker.seen.clear()
    faults = Counter()
    for seed in range(LIVES):
        life = CanaryLife(seed)
        for _ in range(TURNS):
            life.turn()
        life.settle()
        counters = life.harness.state.counters
        faults.update({name: getattr(counters, name) for name in ("retractions", "migrations", "failed_rows")})
        faults.update(life.other_events())
    seen = CanaryWorker.seen
    assert seen["planted"] > 100, seen
    assert seen["planted in a window"] > 10, seen
    assert seen["known hashes"] > 0.9 * seen["rows"], seen
    assert all(faults[name] >= 5 for name in ("retractions", "migrations", "failed_rows", "hit_tokens")), faults
