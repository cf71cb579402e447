import weakref

import numpy as np
import torch

from worker_svc.batch.row_groups import PromptLogprobGroup
from worker_svc.sampling.prompt_logprobs import BLOCK_BYTES, block_rows, prompt_logprobs

WIDTH = 50
HEAD = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(40, 8, generator=torch.Generator().manual_seed(2))


def group(token_rows, targets, top):
    count = len(token_rows)
    return PromptLogprobGroup(
        rows=np.zeros(count, np.int64),
        token_rows=np.array(token_rows),
        target_ids=np.array(targets),
        top_counts=np.full(count, top),
    )


def test_values_and_best_are_the_log_softmax_of_the_wanted_states():
    wanted = group([3, 0, 39], [7, 0, 49], 4)
    given = prompt_logprobs(HIDDEN, lambda states: states @ HEAD, wanted, max_rows=2)
    known = (HIDDEN[[3, 0, 39]].double() @ HEAD.double()).log_softmax(-1)
    torch.testing.assert_close(torch.from_numpy(given.values).double(), known[[0, 1, 2], [7, 0, 49]], atol=1e-5, rtol=0)
    assert given.top_ids.tolist() == known.topk(4).indices.flatten().tolist()
    assert given.finite.all()


def test_at_most_one_block_of_logits_lives_at_a_time():
    sizes, alive = [], []

    def logits_of(states):
        assert not [one for one in alive if one() is not None], "an earlier block still lives"
        made = states @ HEAD
        sizes.append(len(made))
        alive.append(weakref.ref(made))
        return made

    prompt_logprobs(HIDDEN, logits_of, group(range(40), [1] * 40, 3), max_rows=16)
    assert sizes == [16, 16, 8]


def test_a_block_is_whole_products_within_its_bytes():
    for width in (49_152, 262_144, 1_000, 10_000_000):
        rows = block_rows(width)
        assert rows % 16 == 0
        assert rows == 16 or rows * width * 4 <= BLOCK_BYTES


def test_positions_that_are_not_finite_are_told_and_give_nothing():
    hidden = HIDDEN.clone()
    hidden[1, 2] = float("nan")
    given = prompt_logprobs(hidden, lambda states: states @ HEAD, group([0, 1, 2], [1, 1, 1], 2), max_rows=16)
    assert given.finite.tolist() == [True, False, True]
    assert given.top_counts.tolist() == [2, 0, 2]
    assert given.values[1] == 0
