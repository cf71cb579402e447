"""Who holds the Lease, and when: candidates over one record with versions, under a clock that the test moves."""

import asyncio
import contextlib
from dataclasses import dataclass, field, replace

import pytest
from prometheus_client import CollectorRegistry

from protos.wire.errors import InvalidRequest, SyncError, UnavailableError
from scheduler_svc.cluster_config import LeaseRole
from scheduler_svc.links.lease import LeaseKeeper, LeaseRecord, LeaseSettings
from scheduler_svc.metrics import create_metrics

SHORT_S = 0.005
"""A fifth of it is a keeper's real pause; what runs out does so by the test's clock alone."""
OTHERS_S = 10


@dataclass
class Authority:
    """The Lease as an API server would keep it: a write over an old version is refused."""

    record: LeaseRecord = field(
        default_factory=lambda: LeaseRecord(holder="", duration_s=0, renewals="", wanted_by="", found=0)
    )
    error: Exception | None = None
    reads: int = 0
    writes: int = 0

    async def read(self):
        self.reads += 1
        if self.error is not None:
            raise self.error
        return self.record

    async def write(self, record, *, renews):
        await asyncio.sleep(0)  # others may write meanwhile
        if self.error is not None:
            raise self.error
        if record.found != self.record.found:
            return False
        self.writes += 1
        renewals = f"at {self.writes}" if renews else record.renewals
        self.record = replace(record, renewals=renewals, found=record.found + 1)
        return True

    def put(self, **values):
        """Another writer."""
        self.record = replace(self.record, found=self.record.found + 1, **values)


class Candidates:
    """Keepers on one authority and one clock."""

    def __init__(self, stack):
        self.authority = Authority()
        self.now = 100.0
        self.metrics = create_metrics(CollectorRegistry()).workers
        self._stack = stack

    def start(self, name, role=LeaseRole.PRIMARY):
        keeper = LeaseKeeper(
            self.authority,
            LeaseSettings(identity=name, role=role, duration_s=SHORT_S),
            renewals=self.metrics.lease_renewals,
            clock=lambda: self.now,
        )
        keeper.running = asyncio.create_task(keeper.run())
        self._stack.push_async_callback(_ended, keeper.running)
        return keeper

    async def looks(self, number=3):
        """So many looks at the Lease later."""
        seen = self.authority.reads
        await until(lambda: self.authority.reads >= seen + number)

    def renewed(self, outcome):
        return self.metrics.lease_renewals.labels(outcome)._value.get()


async def _ended(task):
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, SyncError, InvalidRequest):
        await task


async def until(holds):
    async with asyncio.timeout(30):
        while not holds():
            await asyncio.sleep(0)


async def holds(keeper):
    async with asyncio.timeout(30):
        await keeper.held()


def waits(keeper):
    return not keeper._held.is_set() and not keeper.running.done()


@pytest.fixture
async def candidates():
    async with contextlib.AsyncExitStack() as stack:
        yield Candidates(stack)


async def test_a_free_lease_is_taken_at_once_and_kept(candidates):
    keeper = candidates.start("a")
    await holds(keeper)
    await until(lambda: candidates.renewed("ok") >= 3)

    assert candidates.authority.record.holder == "a"
    assert not keeper.running.done()


async def test_of_many_that_race_one_holds_it(candidates):
    keepers = [candidates.start(name) for name in "abcde"]
    await until(lambda: candidates.authority.record.holder != "")
    await candidates.looks(20)

    assert sum(keeper._held.is_set() for keeper in keepers) == 1


async def test_a_lease_that_is_renewed_is_never_taken(candidates):
    candidates.authority.put(holder="other", duration_s=OTHERS_S)
    keeper = candidates.start("a")
    for number in range(5):
        await candidates.looks()
        candidates.now += OTHERS_S - 1
        candidates.authority.put(renewals=str(number))
        await candidates.looks()

    assert waits(keeper)


async def test_a_lease_that_ran_out_is_taken_after_its_own_duration_by_our_clock(candidates):
    candidates.authority.put(holder="dead", duration_s=OTHERS_S, renewals="long ago")
    keeper = candidates.start("a")
    await candidates.looks()
    candidates.now += OTHERS_S - 0.1
    await candidates.looks()
    assert waits(keeper)

    candidates.now += 0.1
    await holds(keeper)
    assert candidates.authority.record.holder == "a"


async def test_who_sees_that_another_holds_it_ends(candidates):
    keeper = candidates.start("a")
    await holds(keeper)
    candidates.authority.put(holder="b")

    with pytest.raises(SyncError, match="b holds the Lease") as raised:
        await keeper.running
    assert raised.value.field == "lease_object"
    assert candidates.authority.record.holder == "b"


async def test_who_is_no_longer_named_ends(candidates):
    keeper = candidates.start("a")
    await holds(keeper)
    candidates.authority.put(holder="")

    with pytest.raises(SyncError, match="nobody holds the Lease"):
        await keeper.running


@pytest.mark.parametrize("error", [UnavailableError("no answer"), InvalidRequest("no such object: Lease x")])
async def test_while_the_lease_cannot_be_renewed_its_holder_serves_on(candidates, error):
    keeper = candidates.start("a")
    await holds(keeper)
    candidates.authority.error = error
    await until(lambda: candidates.renewed("failed") >= 3)
    candidates.now += 1000
    assert not keeper.running.done()

    candidates.authority.error = None
    renewed = candidates.renewed("ok")
    await until(lambda: candidates.renewed("ok") > renewed)
    assert not keeper.running.done()


async def test_a_holder_that_was_cut_off_ends_once_it_sees_that_it_was_replaced(candidates):
    keeper = candidates.start("a")
    await holds(keeper)
    candidates.authority.error = UnavailableError("cut off")
    await until(lambda: candidates.renewed("failed") >= 1)
    candidates.authority.put(holder="b")
    candidates.authority.error = None

    with pytest.raises(SyncError):
        await keeper.running


async def test_a_holder_has_its_whole_time_again_after_the_authority_was_away(candidates):
    candidates.authority.put(holder="other", duration_s=OTHERS_S, renewals="before")
    keeper = candidates.start("a")
    await candidates.looks()
    candidates.authority.error = UnavailableError("no answer")
    await candidates.looks()
    candidates.now += 100 * OTHERS_S
    candidates.authority.error = None
    await candidates.looks()
    assert waits(keeper), "nobody could renew it meanwhile"

    candidates.now += OTHERS_S
    await holds(keeper)


async def test_an_unreachable_authority_is_waited_for(candidates):
    candidates.authority.error = UnavailableError("no answer")
    keeper = candidates.start("a")
    await candidates.looks(5)
    assert waits(keeper)

    candidates.authority.error = None
    await holds(keeper)


async def test_a_missing_lease_is_an_operators_business(candidates):
    candidates.authority.error = InvalidRequest("no such object: Lease x")
    with pytest.raises(InvalidRequest, match="no such object"):
        await candidates.start("a").running


async def test_a_released_lease_is_taken_at_once(candidates):
    first, second = candidates.start("a"), candidates.start("b")
    await holds(first)
    await candidates.looks()
    assert waits(second)
    first.running.cancel()
    await first.release()

    await holds(second)


async def test_nobody_releases_what_another_holds(candidates):
    keeper, other = candidates.start("a"), candidates.start("c")
    await holds(keeper)
    keeper.running.cancel()
    candidates.authority.put(holder="b", duration_s=OTHERS_S)
    await keeper.release()
    await other.release()
    candidates.authority.error = UnavailableError("no answer")
    await keeper.release()

    assert candidates.authority.record.holder == "b"


async def test_a_standby_gives_way_to_a_primary_that_has_waited_and_does_not_snatch_it_back(candidates):
    standby = candidates.start("s", LeaseRole.STANDBY)
    await holds(standby)
    candidates.authority.put(duration_s=OTHERS_S)
    primary = candidates.start("p")
    await candidates.looks(6)
    assert not standby.running.done(), "the primary may not be warm yet"

    candidates.now += 1
    with pytest.raises(SyncError, match="gives way to p"):
        await standby.running
    again = candidates.start("s2", LeaseRole.STANDBY)
    await standby.release()
    await holds(primary)
    await candidates.looks()
    assert waits(again)
    assert candidates.authority.record.wanted_by == "", "a claim ends with the taking"


async def test_a_primary_gives_way_to_nobody(candidates):
    keeper = candidates.start("a")
    await holds(keeper)
    candidates.authority.put(duration_s=OTHERS_S)
    second = candidates.start("b")
    await candidates.looks()
    candidates.now += 1
    await until(lambda: candidates.authority.record.wanted_by == "b")
    await candidates.looks(6)

    assert not keeper.running.done()
    assert waits(second)


async def test_a_claim_of_a_primary_that_died_runs_out(candidates):
    candidates.authority.put(wanted_by="dead", duration_s=OTHERS_S)
    standby = candidates.start("s", LeaseRole.STANDBY)
    await candidates.looks()
    assert waits(standby)

    candidates.now += OTHERS_S
    await holds(standby)
    await until(lambda: candidates.renewed("ok") >= 2)
    assert not standby.running.done()
