import numpy as np
import pytest
import torch

from tests.support import oracle
from worker_svc.batch.row_groups import LogprobGroup
from worker_svc.sampling.logprobs import sampled_logprobs
from worker_svc.sampling.sampler import SampledRows


def wanted(flags, counts):
    return LogprobGroup(wanted=np.array(flags, bool), top_counts=np.array(counts))


def sampled(ids, finite=None):
    finite = np.array(finite or [True] * len(ids))
    return SampledRows(token_ids=np.array(ids, np.int32), finite=finite, has_candidate=finite)


def test_values_are_of_the_raw_distribution():
    logits = torch.randn(3, 97, generator=torch.Generator().manual_seed(1)) * 4
    result = sampled_logprobs(logits, sampled([4, 5, 6]), wanted([1, 0, 1], [0, 3, 2]))
    reference = [oracle.log_softmax(row.numpy()) for row in logits]
    assert result.tokens == pytest.approx([reference[0][4], 0, reference[2][6]], abs=1e-6)
    assert result.top_counts.tolist() == [0, 3, 2]
    best = [np.argsort(-reference[1])[:3], np.argsort(-reference[2])[:2]]
    assert result.top_ids.tolist() == np.concatenate(best).tolist()
    expected = np.concatenate([reference[1][best[0]], reference[2][best[1]]])
    assert result.top_values == pytest.approx(expected, abs=1e-6)


def test_ties_go_to_the_lowest_id_and_counts_stop_at_the_width():
    logits = torch.tensor([[1.0, 3.0, 3.0, 0.0]])
    result = sampled_logprobs(logits, sampled([1]), wanted([0], [9]))
    assert result.top_ids.tolist() == [1, 2, 0, 3]


def test_a_row_is_the_same_alone_and_in_a_batch():
    logits = torch.randn(9, 1003, generator=torch.Generator().manual_seed(2))
    together = sampled_logprobs(logits, sampled(range(9)), wanted([1] * 9, [0] * 9)).tokens
    for row in range(9):
        alone = sampled_logprobs(logits[row : row + 1].clone(), sampled([row]), wanted([1], [0])).tokens
        assert alone[0] == together[row]


def test_a_row_that_is_not_finite_gives_nothing():
    logits = torch.tensor([[1.0, float("nan")], [1.0, 2.0]])
    result = sampled_logprobs(logits, sampled([0, 1], [False, True]), wanted([1, 1], [1, 1]))
    assert result.tokens[0] == 0
    assert result.top_counts.tolist() == [0, 1]
