"""Plans as changes of others, on loopback: with their base, without it, against another one, and out of place."""

from dataclasses import replace

import pytest

from protos.wire.delta_making import changes_of
from protos.wire.digest import plan_digest
from protos.wire.enums import Feature
from tests.e2e.test_worker_service_calls import serving
from tests.support.fake_executor import FakeExecutor
from tests.support.plans import CORE_FEATURES, decode, extend, make_info, make_limits, make_plan, with_element

INFO = make_info(features=CORE_FEATURES | {Feature.DELTAS}, limits=make_limits(window=2))


@pytest.fixture
async def rig():
    executor = FakeExecutor(INFO)
    async with serving(build=lambda: executor) as (_, client, _):
        await client.attached()
        stream, _ = await client.open()
        yield executor, stream, client
    assert executor.is_closed


def step(seq):
    row = extend(0, 5, handle=7, pages=[3]) if seq == 1 else decode(3 + seq, handle=7, pages=[3])
    return make_plan([row], seq=seq, info=INFO)


def changes(seq, base=None):
    plan, base = step(seq), base or step(seq - 1)
    found = changes_of(plan, base, digest=plan_digest(plan), base_digest=plan_digest(base), page_sizes=[16])
    assert found is not None
    return found


async def test_a_change_of_the_plan_before_runs_as_the_plan_it_stands_for(rig):
    executor, stream, _ = rig
    await stream.run(step(1))
    for seq in (2, 3):
        result = await stream.run(changes(seq))
        assert plan_digest(executor.executed[-1]) == plan_digest(step(seq))
        assert result.rows.handles.tolist() == [7]


async def test_a_wrong_base_consumes_no_seq_and_what_is_behind_it_is_dropped(rig):
    executor, stream, _ = rig
    await stream.run(step(1))
    await stream.send(changes(2, base=with_element(step(1), "tokens.ids", 0, 9)))
    await stream.send(changes(3))
    assert (await stream.read()).need_full.seq == 2
    await stream.send(step(2))
    await stream.send(changes(3))
    assert [(await stream.result()).identity.seq for _ in range(2)] == [2, 3]
    assert [plan.identity.seq for plan in executor.executed] == [1, 2, 3]


async def test_a_refused_plan_is_no_base(rig):
    executor, stream, _ = rig
    refused = with_element(step(1), "tokens.ids", 0, 60_000)
    assert (await stream.run(refused)).rejection is not None
    await stream.send(changes(2, base=refused))
    assert (await stream.read()).need_full.seq == 2
    assert executor.calls == 0


async def test_nothing_of_an_older_pair_is_a_base(rig):
    _, stream, client = rig
    await stream.run(step(1))
    await client.attach(8, 1)
    again, _ = await client.open(epoch=8, term=1)
    identity = {"epoch": 8, "term": 1}
    plan = make_plan([decode(5, handle=7, pages=[3])], seq=2, info=INFO)
    first = make_plan([extend(0, 5, handle=7, pages=[3])], info=INFO)
    first = with_fence(first, **identity)
    await again.run(first)
    plan = with_fence(plan, **identity)
    delta = changes_of(plan, step(1), digest=plan_digest(plan), base_digest=plan_digest(step(1)), page_sizes=[16])
    await again.send(delta)
    assert (await again.read()).need_full.seq == 2


def with_fence(plan, *, epoch, term):
    return replace(plan, identity=replace(plan.identity, epoch=epoch, term=term))


async def test_a_change_that_does_not_fit_its_base_is_an_invalid_plan(rig):
    executor, stream, _ = rig
    await stream.run(step(1))
    result = await stream.run(with_element(changes(2), "delta.base_rows", 0, 5))
    assert (result.rejection.reason, result.rejection.field) == ("INVALID_PLAN", "delta.base_rows")
    assert executor.calls == 1
