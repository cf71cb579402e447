"""Scheduler core, links' exchange and worker protocol in virtual time: every stream gets its tokens."""

import random
from collections import Counter

import pytest

from tests.simulation.campaign import BREAKS, CampaignReport, run_seed
from tests.simulation.mutants import MUTANTS, notices, switched_off
from tests.simulation.virtual import Connection, Network, Process, VirtualTime
from tests.support.code_measures import ROOT

SEEDS = 100
MORE_SEEDS = 12
"""Any change of the core moves what a seed does a little."""


@pytest.mark.timeout(600)
def test_no_seed_breaks_an_invariant_and_all_of_them_move_enough():
    report = CampaignReport(Counter(), [], 0)
    for seed in range(SEEDS):
        try:
            report.add(run_seed(seed))
        except BREAKS as error:
            error.add_note(f"make sim SEED={seed}")
            raise
    assert not report.too_little(), report.text(0.0)


@pytest.mark.parametrize("seed", [5, 23])
def test_the_same_seed_gives_the_same_run(seed):
    first, second = run_seed(seed), run_seed(seed)
    assert first.checker.digest == second.checker.digest
    assert first.checker.counts == second.checker.counts


@pytest.mark.parametrize(
    "mutant", [mutant for mutant in MUTANTS if mutant.seed is not None], ids=lambda mutant: mutant.name
)
def test_a_guard_that_is_off_is_noticed(mutant):
    assert any(notices(mutant, seed) for seed in range(mutant.seed, mutant.seed + MORE_SEEDS))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_finds_its_guard_and_somebody_to_notice(mutant):
    with switched_off(mutant):
        pass
    assert mutant.seed is not None or list(ROOT.glob(mutant.tests))


def test_what_a_stream_carries_arrives_in_the_order_of_sending():
    """Also where one message holds up others: all of those are due at one time, which rounding makes several."""
    time, got = VirtualTime(), []
    ends = Process(time, "client"), Process(time, "server")
    network = Network(time, random.Random(1), slow_share=0.3)
    stream = Connection(network, *ends, on_break=(lambda: None, lambda: None))
    for number in range(2000):
        time.after(number / 997, lambda number=number: stream.to_server(lambda: got.append(number)))
    time.run(10.0)
    assert got == list(range(2000))
