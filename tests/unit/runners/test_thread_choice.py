"""The choice of threads, against machines that are made up: how long a step takes with each count."""

import pytest

from worker_svc.runners.thread_choice import MOST_BETWEEN_TRIES, PAIRS, ThreadChoice, candidate_counts


def run(choice, steps, seconds_of, *, num_tokens=16):
    """The counts that `steps` steps got."""
    used = []
    for _ in range(steps):
        threads = choice.before(num_tokens)
        choice.after(num_tokens, threads=threads, seconds=seconds_of(threads))
        used.append(threads)
    return used


@pytest.mark.parametrize(("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))])
def test_counts_that_are_tried(most, counts):
    assert candidate_counts(most) == counts


def test_more_threads_stay_where_they_help():
    used = run(ThreadChoice(2), 4000, lambda threads: 1.0 / threads)
    assert used[0] == 2
    assert used.count(1) <= PAIRS * (4000 // MOST_BETWEEN_TRIES + 6)


def test_one_thread_wins_beside_a_busy_neighbour_and_two_come_back_when_it_leaves():
    choice = ThreadChoice(2)
    run(choice, 1000, lambda threads: 1.0 / threads)
    busy = run(choice, 200, lambda threads: {1: 1.1, 2: 1.6}[threads])
    assert set(busy[100:]) == {1} or busy[100:].count(2) <= 2 * PAIRS
    quiet = run(choice, 2 * MOST_BETWEEN_TRIES, lambda threads: 1.0 / threads)
    assert quiet[-50:].count(2) >= 50 - PAIRS


def test_fewer_threads_win_a_tie():
    assert set(run(ThreadChoice(8), 400, lambda _: 1.0)[-100:]) <= {1, 2}


def test_the_best_of_many_counts_is_found():
    best = {1: 1.0, 2: 0.6, 4: 0.4, 8: 0.7}
    used = run(ThreadChoice(8), 600, best.__getitem__)
    assert used[-200:].count(4) > 150


def test_noise_within_the_margin_changes_nothing():
    slow = iter([1.0, 1.03, 0.99, 1.01] * 2000)
    used = run(ThreadChoice(2), 4000, lambda threads: next(slow) * (1.0 if threads == 2 else 1.2))
    assert used.count(1) < 100


def test_sizes_are_judged_apart():
    choice = ThreadChoice(2)
    for _ in range(300):
        run(choice, 1, lambda threads: 1.0 / threads, num_tokens=64)
        run(choice, 1, lambda threads: 1.0 * threads, num_tokens=1)
    assert choice.before(64) == 2
    assert choice.before(1) == 1


def test_one_core_has_nothing_to_choose():
    assert set(run(ThreadChoice(1), 100, lambda _: 1.0)) == {1}
