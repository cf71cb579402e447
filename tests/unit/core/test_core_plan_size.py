"""Plans within the bytes that their worker takes: the bound, turns of rows that do not fit, and who never fits."""

import itertools
import random

import pytest

from protos.wire.codec import encode_plan
from protos.wire.enums import Feature
from protos.wire.errors import UnsupportedFeature
from protos.wire.limits import MAX_PLAN_BYTES
from scheduler_svc.core import plan_size as plan_size_module
from scheduler_svc.core.attachment import check_worker
from scheduler_svc.core.batch import Batch
from scheduler_svc.core.events import Grammar, RequestRefused, RequestSpec, Sampling, StreamKey
from scheduler_svc.core.plan_size import plan_size
from scheduler_svc.core.request import RequestStatus
from scheduler_svc.core.settings import CoreSettings
from tests.support.core_harness import CoreHarness, make_spec, oracle, small_info
from tests.support.plans import CORE_FEATURES, full_sub_pool, window_sub_pool


def harness_of(limit: int, *, budget_tokens: int = 64, **changes: object) -> CoreHarness:
    harness = CoreHarness(CoreSettings(budget_tokens=budget_tokens))
    harness.attach(info=small_info(max_plan_bytes=limit, **changes))
    return harness


def check(harness: CoreHarness) -> None:
    """Every plan fits, and every request got its tokens."""
    limit = harness.infos["w0"].limits.max_plan_bytes
    assert all(len(encode_plan(plan)) <= limit for _, plan in harness.plans)
    for spec in harness.specs.values():
        assert harness.output(spec.stream.stream_id) == oracle(harness.infos["w0"], spec)
    harness.assert_balanced()


def rows_of(harness: CoreHarness) -> dict[int, list[int]]:
    """By handle: which plans it is in."""
    found: dict[int, list[int]] = {}
    for index, (_, plan) in enumerate(harness.plans):
        for handle in plan.rows.handles.tolist():
            found.setdefault(handle, []).append(index)
    return found


def random_spec(rng: random.Random, stream_id: int) -> RequestSpec:
    ids = rng.sample(range(97), 20)
    sampling = Sampling(
        temperature=rng.choice([0.0, 0.7]),
        seed=rng.getrandbits(64),
        top_k=rng.choice([0, 4]),
        top_p=rng.choice([1.0, 0.5]),
        min_p=rng.choice([0.0, 0.1]),
        repetition_penalty=rng.choice([1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        sample_index=rng.choice([0, 3]),
        bias=tuple((token_id, 1.0) for token_id in ids[: rng.choice([0, 5])]),
        banned_ids=tuple(ids[5 : 5 + rng.choice([0, 0, 9])]),
    )
    return make_spec(
        stream_id,
        prompt=rng.randint(1, 40),
        max_tokens=rng.randint(1, 12),
        sampling=sampling,
        grammar=Grammar("regex", "ab") if rng.random() < 0.2 else None,
        output_logprobs=rng.random() < 0.3,
        top_logprobs=2,
    )


class Weighing(CoreHarness):
    """Compares each plan with what it was thought to take at most."""

    ratios: list[float]

    def _record_plan(self, worker, plan):
        super()._record_plan(worker, plan)
        sent = next(sent for sent in self.state.workers[worker].in_flight if sent.seq == plan.identity.seq)
        is_decode = [row.request.status is RequestStatus.RUNNING and not plan_row_extends(row) for row in sent.rows]
        batch = Batch(
            [row for row, decodes in zip(sent.rows, is_decode, strict=True) if decodes],
            [row for row, decodes in zip(sent.rows, is_decode, strict=True) if not decodes],
        )
        self.ratios.append(self.state.workers[worker].plan_size.at_most(batch) / len(encode_plan(plan)))


def plan_row_extends(row) -> bool:
    return row.seq_len - row.first_position > 1


@pytest.mark.parametrize("seed", range(6))
def test_no_plan_is_larger_than_it_was_thought_to_be(seed):
    rng = random.Random(seed)
    pools = [full_sub_pool(num_pages=400, page_size=4)]
    features = CORE_FEATURES
    if seed % 2:
        pools.append(window_sub_pool(num_pages=400, page_size=4, window_tokens=8))
        features |= {Feature.WINDOW_SUB_POOL}
    harness = Weighing(CoreSettings(budget_tokens=rng.choice([16, 64])))
    harness.ratios = []
    harness.attach(info=small_info(sub_pools=tuple(pools), features=features, window=1 + seed % 2))
    for index in range(20):
        harness.submit(random_spec(rng, index))
    harness.run()

    assert len(harness.ratios) > 10
    assert min(harness.ratios) >= 1
    assert max(harness.ratios) < 8, "the bound is of no use"


def test_rows_that_do_not_fit_one_plan_take_turns():
    harness = harness_of(1700, window=2)
    harness.submit(*[make_spec(index, max_tokens=12) for index in range(1, 9)])
    harness.run()

    check(harness)
    turns = rows_of(harness)
    assert max(plan.rows.num_rows for _, plan in harness.plans) < 8
    assert max(places[2] for places in turns.values()) <= min(places[-1] for places in turns.values())


def test_a_chunk_is_shortened_to_whole_pages_that_fit():
    harness = harness_of(2000, num_pages=200)
    harness.submit(make_spec(1, prompt=60, max_tokens=2))
    harness.run()

    check(harness)
    chunks = [plan.rows.extend_lens.tolist()[0] for _, plan in harness.plans]
    assert 1 < sum(1 for chunk in chunks if chunk > 1) < 15
    assert sum(chunks) == 61
    assert all(chunk % 4 == 0 for chunk in chunks[:-2])


def test_prompts_and_decode_rows_of_others_take_turns_too():
    harness = harness_of(1250, num_pages=400)
    harness.submit(make_spec(1, prompt=2, max_tokens=30))
    for index in range(2, 6):
        harness.deliver()
        harness.submit(make_spec(index, prompt=30, max_tokens=3))
    harness.run()

    check(harness)
    places = rows_of(harness)[1]
    assert max(later - earlier for earlier, later in itertools.pairwise(places)) <= 5


def test_masks_that_are_equal_are_counted_once(monkeypatch):
    monkeypatch.setattr(plan_size_module, "MAX_PLAN_MASKS", 2)
    harness = harness_of(MAX_PLAN_BYTES)
    same = Sampling(banned_ids=(1, 2, 3))
    harness.submit(*[make_spec(index, sampling=same) for index in range(5)])
    harness.run()

    check(harness)
    assert max(plan.rows.num_rows for _, plan in harness.plans) == 5


def test_no_plan_has_more_masks_than_the_wire_takes(monkeypatch):
    monkeypatch.setattr(plan_size_module, "MAX_PLAN_MASKS", 2)
    harness = harness_of(MAX_PLAN_BYTES)
    harness.submit(*[make_spec(index, sampling=Sampling(banned_ids=(index,)), max_tokens=6) for index in range(5)])
    harness.submit(make_spec(6, max_tokens=6))
    harness.run()

    check(harness)
    assert max(len(plan.masks.masks) for _, plan in harness.plans if plan.masks) == 2
    assert max(places[2] for places in rows_of(harness).values()) <= min(p[-1] for p in rows_of(harness).values())


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt": 400, "max_tokens": 100}, "max_tokens"),
        ({"sampling": Sampling(bias=tuple((index, 1.0) for index in range(90)))}, "sampling"),
        ({"sampling": Sampling(banned_ids=tuple(range(90)), repetition_penalty=1.1), "max_tokens": 60}, "sampling"),
    ],
)
def test_a_request_that_can_never_fit_a_plan_is_refused_by_name(changes, field):
    info = small_info(num_pages=400)
    harness = harness_of(plan_size(info).least(100) + 200, num_pages=400)
    harness.submit(make_spec(1, **changes), make_spec(2))
    harness.run()

    end = harness.end(1)
    assert isinstance(end, RequestRefused)
    assert (end.error.reason, end.error.field) == ("NEVER_FITS", field)
    assert harness.output(2) == oracle(harness.infos["w0"], harness.specs[StreamKey(0, 2)])


def test_a_request_goes_to_a_worker_whose_plans_it_fits():
    harness = harness_of(1300, num_pages=400)
    harness.attach("w1", small_info(num_pages=400, max_plan_bytes=MAX_PLAN_BYTES, max_rows=1))
    harness.submit(make_spec(1, prompt=600), make_spec(2, prompt=500), make_spec(3))
    harness.run()

    assert {worker for worker, plan in harness.plans if {1, 2} & set(plan.rows.handles.tolist())} == {"w1"}
    assert [len(harness.output(index)) for index in (1, 2, 3)] == [4, 4, 4]


@pytest.mark.parametrize("short_by", [0, 1])
def test_a_worker_that_takes_no_plan_at_all_is_refused(short_by):
    info = small_info()
    tiny = small_info(max_plan_bytes=plan_size(info).least(info.sub_pools[0].page_size) - short_by)
    if not short_by:
        check_worker(tiny)
        return
    with pytest.raises(UnsupportedFeature) as refused:
        check_worker(tiny)
    assert refused.value.field == "limits.max_plan_bytes"


@pytest.mark.parametrize("seed", range(20))
def test_whatever_the_limit_all_that_is_taken_ends_with_its_tokens(seed):
    rng = random.Random(seed)
    info = small_info(num_pages=rng.choice([15, 60]))
    limit = plan_size(info).least(52) + rng.choice([0, 300, 1500])
    harness = harness_of(limit, num_pages=info.sub_pools[0].num_pages, budget_tokens=rng.choice([4, 64]), window=2)
    for index in range(12):
        harness.submit(random_spec(rng, index))
        if harness.pending["w0"]:
            harness.deliver()
    harness.run()

    refused = [spec for spec in harness.specs.values() if isinstance(harness.ends[spec.stream], RequestRefused)]
    assert all(harness.ends[spec.stream].error.field == "sampling" for spec in refused)
    for spec in refused:
        del harness.specs[spec.stream]
    check(harness)
