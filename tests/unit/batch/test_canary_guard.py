"""The canary against hand-made plans: clean runs are silent, planted corruption is named in the step that reads it."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from protos.wire import canary_chain
from protos.wire.enums import SubPoolKind
from protos.wire.errors import UnsupportedFeature
from tests.support import plans
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.canary_guard import KVCanary, make_canary
from worker_svc.kv.index_translator import IndexTranslator
from worker_svc.kv.token_to_kv_pool import KVGeometry

CPU = torch.device("cpu")
SEED = canary_chain.domain_seed(b"somebody")
P = 4


class Pages:
    geometry = KVGeometry(num_pages=64, page_size=P, num_layers=1, num_kv_heads=1, head_dim=1, dtype=torch.float32)


def ids_of(row, count=40):
    return np.random.default_rng(row).integers(0, 1000, count)


class Steps:
    """Runs forwards of rows (ids, cached, extend, pages) through one canary."""

    def __init__(self, *, mode="refuse", knows_hashes=True, info=None):
        self.info = info or plans.make_info(sub_pools=(plans.full_sub_pool(num_pages=64, page_size=P),))
        translator = IndexTranslator(tuple(Pages() for _ in self.info.sub_pools))
        self.canary = make_canary(mode, translator, device=CPU)
        self.builder = BatchBuilder(translator=translator, page_sizes=(P,) * len(self.info.sub_pools), device=CPU)
        self.knows_hashes = knows_hashes
        self.pages = plans.Pages()

    def run(self, *rows, seed=SEED):
        """Each row: (ids, cached, extend) and, for the full sub-pool, pages."""
        plan = plans.make_plan(
            [
                plans.Row(cached=cached, extend=extend, ids=ids[cached : cached + extend].tolist(), pages=pages)
                for ids, cached, extend, pages in rows
            ],
            info=self.info,
            pages=self.pages,
        )
        hashes = [canary_chain.chain_hash(seed, ids[:cached], 0) for ids, cached, _, _ in rows]
        columns = replace(
            plan.rows,
            canary_seeds=plans.u64(*[seed] * len(rows)),
            canary_hashes=plans.u64(*hashes) if self.knows_hashes else None,
        )
        (batch,) = self.builder.build(replace(plan, rows=columns))
        self.before = batch
        self.batch, verdict = self.canary.guard(batch, self.canary.expected(columns, slice(0, len(rows))))
        assert verdict.is_bad.tolist() == [
            row in {violation.row for violation in verdict.violations} for row in range(len(rows))
        ]
        return [(found.row, found.position, found.slot) for found in verdict.violations]


A, B = ids_of(1), ids_of(2)


def filled(**options):
    """Row A has 10 tokens in pages 1, 2, 3, row B 9 in 4, 5, 6."""
    steps = Steps(**options)
    assert steps.run((A, 0, 10, [1, 2, 3]), (B, 0, 9, [4, 5, 6])) == []
    return steps


def test_the_devices_chain_is_that_of_the_wire():
    steps = filled()
    table = steps.canary.tables[0]
    slots = [P * page + offset for page in (1, 2, 3) for offset in range(P)][:10]
    found = table.hashes[slots].numpy().view(np.uint64).tolist()
    assert found == [canary_chain.chain_hash(SEED, A[: n + 1], 0) for n in range(10)]
    assert table.tokens[slots].tolist() == A[:10].tolist()
    assert table.positions[slots].tolist() == list(range(10))


@pytest.mark.parametrize("cuts", [[10], [1] * 10, [3, 4, 3], [4, 4, 2], [9, 1]])
def test_any_chunking_leaves_the_same_shadow_and_no_violation(cuts):
    steps, whole = Steps(), filled()
    cached = 0
    for cut in cuts:
        assert steps.run((A, cached, cut, [1, 2, 3][: -(-(cached + cut) // P)])) == []
        cached += cut
    for name in ("tokens", "positions", "hashes"):
        mine, theirs = (getattr(each.canary.tables[0], name)[P : 3 * P + 2] for each in (steps, whole))
        assert torch.equal(mine, theirs)
    assert torch.equal(steps.canary.tables[0].heads[1:4], whole.canary.tables[0].heads[1:4])


def test_decoding_on_and_crossing_pages_is_silent():
    steps = filled()
    for cached in range(9, 20):
        last = -(-(cached + 1) // P)
        assert steps.run((B, cached, 1, [4, 5, 6, 7, 8, 9][:last])) == []


def test_shared_prefix_pages_are_right_for_every_row_that_shares_the_prefix():
    steps = filled()
    mate = np.concatenate([A[:8], ids_of(9)])
    assert steps.run((A, 10, 1, [1, 2, 3]), (mate, 8, 3, [1, 2, 20])) == []
    assert steps.run((A, 11, 1, [1, 2, 3]), (mate, 11, 1, [1, 2, 20])) == []


def test_pages_given_back_and_taken_by_another_are_its_own_once_written():
    steps = filled()
    assert steps.run((ids_of(7), 0, 6, [2, 1])) == []
    assert steps.run((ids_of(7), 6, 1, [2, 1])) == []


def test_a_retracted_row_goes_on_from_any_earlier_position_on_the_same_pages():
    steps = filled()
    other = np.concatenate([A[:6], ids_of(8)])
    assert steps.run((other, 6, 1, [1, 2])) == []
    assert steps.run((other, 7, 4, [1, 2, 3])) == []
    assert steps.run((other, 11, 1, [1, 2, 3])) == []


def test_a_swapped_page_is_named_with_row_position_and_slot():
    assert filled().run((A, 10, 1, [1, 2, 3]), (B, 9, 1, [4, 2, 6])) == [(1, 4, 2 * P)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_every_single_swapped_page_of_a_row_is_named(place):
    """Page 0 of another row follows from the seed as well: what lies behind it and the plan's word tell them apart."""
    pages = [1, 2, 3]
    pages[place] = [4, 5, 6][place]
    assert filled().run((A, 10, 1, pages)) == [(0, place * P, pages[place] * P)]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_swapped_page_is_caught_where_the_plan_says_nothing_of_hashes(place):
    pages = [1, 2, 3]
    pages[place] = [4, 5, 6][place]
    found = filled(knows_hashes=False).run((A, 10, 1, pages))
    assert [(row, position // P) for row, position, _ in found] in ([(0, place)], [(0, place + 1)])


@pytest.mark.parametrize("count", [1, 2])
def test_of_swapped_pages_that_follow_from_each_other_the_last_is_named(count):
    """Those in front of it may be a prefix that the two rows share."""
    pages = [4, 5, 6][:count] + [1, 2, 3][count:]
    assert filled().run((A, 10, 1, pages)) == [(0, (count - 1) * P, pages[count - 1] * P)]


def test_a_whole_table_that_is_another_rows_is_caught_by_the_expected_hash():
    """Also where the row has one page: nothing in the pool tells it from the other, only the plan's word does."""
    steps = filled()
    assert steps.run((A, 9, 1, [4, 5, 6])) == [(0, 8, 6 * P)]
    steps = Steps()
    assert steps.run((A, 0, 2, [1]), (B, 0, 2, [2])) == []
    assert steps.run((A, 2, 1, [2])) == [(0, 1, 2 * P + 1)]


def test_another_domains_page_is_caught_even_with_the_same_tokens():
    steps = filled()
    assert steps.run((A, 10, 1, [1, 2, 3]), seed=SEED + 1) == [(0, 0, P)]


def test_an_overwritten_slot_is_caught_at_the_next_read_of_its_owner():
    steps = filled()
    assert steps.run((ids_of(5), 0, 2, [2])) == []
    assert steps.run((A, 10, 1, [1, 2, 3])) == [(0, 4, 2 * P)]


@pytest.mark.parametrize("slot", range(P, 3 * P + 2))
def test_one_overwritten_slot_anywhere_in_a_row_is_named(slot):
    """A write of some other token to a slot of A, as a wrong slot in a plan would do it."""
    steps = filled(mode="count")
    table = steps.canary.tables[0]
    position = int(table.positions[slot])
    wrong = steps.builder.build(plans.make_plan([plans.extend(0, 1, ids=[999])], info=steps.info))[0]
    group = replace(wrong.page_groups[0], out_cache_loc=torch.tensor([slot]))
    wrong = replace(wrong, page_groups=(group,), positions=torch.tensor([position]))
    steps.canary.guard(wrong, steps.canary.expected(plans.make_decode_plan(1).rows, slice(0, 1)))
    assert steps.run((A, 10, 1, [1, 2, 3])) == [(0, position, slot)]


def test_a_page_that_was_never_written_is_caught():
    assert Steps().run((A, 5, 1, [1, 2])) == [(0, 0, P)]
    assert filled().run((A, 12, 1, [1, 2, 3, 4])) == [(0, 10, 3 * P + 2)]


def test_a_refused_row_writes_nothing_and_its_mates_write():
    steps = filled()
    before = steps.canary.tables[0].hashes.clone()
    steps.run((A, 10, 1, [1, 2, 3]), (B, 9, 1, [4, 2, 6]))
    assert steps.batch.page_groups[0].out_cache_loc.tolist() == [3 * P + 2, 0]
    changed = (steps.canary.tables[0].hashes != before).nonzero().flatten().tolist()
    assert set(changed) <= {0, 3 * P + 2}
    assert steps.run((A, 11, 1, [1, 2, 3]), (B, 9, 1, [4, 5, 6])) == []


def test_a_counting_canary_runs_the_batch_as_it_is():
    steps = filled(mode="count")
    assert steps.run((B, 9, 1, [4, 2, 6])) == [(0, 4, 2 * P)]
    assert steps.batch is steps.before


def test_window_sub_pools_are_checked_on_the_pages_they_still_list():
    pools = (
        plans.full_sub_pool(num_pages=64, page_size=P),
        plans.window_sub_pool(num_pages=64, page_size=P, window_tokens=6),
    )
    steps = Steps(info=plans.make_info(sub_pools=pools))
    assert steps.info.sub_pools[1].kind is SubPoolKind.WINDOW
    assert steps.run((A, 0, 20, [1, 2, 3, 4, 5])) == []
    steps.pages.next_page[1] = 1 + (20 - 6) // P
    assert steps.run((A, 20, 1, [1, 2, 3, 4, 5, 6])) == []
    steps.pages.next_page[1] = 2
    found = steps.run((A, 20, 1, [1, 2, 3, 4, 5, 6]))
    assert found[0][:2] == (0, 12)


def test_off_is_no_canary_and_another_word_is_refused():
    translator = IndexTranslator((Pages(),))
    assert make_canary("off", translator, device=CPU) is None
    assert isinstance(make_canary("count", translator, device=CPU), KVCanary)
    with pytest.raises(UnsupportedFeature, match="off, count, refuse"):
        make_canary("sing", translator, device=CPU)
