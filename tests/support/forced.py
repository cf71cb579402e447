"""Known ids fed instead of sampled ones: how far the log-probabilities of every step are from the known ones."""

import torch

from tests.support.forwards import ForwardDriver


def differences(driver: ForwardDriver, cases: list[dict], *, prompt_chunk: int, answer_chunk: int) -> torch.Tensor:
    """[n, 5] of the five best log-probabilities at every step of all cases, which run as rows of the same batches.

    Every prompt but for its last id is computed first, in chunks of its own size.
    """
    rows = [driver.row([*case["prompt_ids"], *case["greedy_ids"][:-1]]) for case in cases]
    ends = [len(case["prompt_ids"]) - 1 for case in cases]
    while waiting := [(row, end) for row, end in zip(rows, ends, strict=True) if row.kv_len < end]:
        driver.step([row for row, _ in waiting], [min(prompt_chunk, end - row.kv_len) for row, end in waiting])
    for row in rows:
        row.logits.clear()
    while waiting := [row for row in rows if row.left]:
        driver.step(waiting, [min(answer_chunk, row.left) for row in waiting], all_logits=True)
    driver.release_all()
    known = known_top5(cases)
    found = torch.log_softmax(torch.stack([logits for row in rows for logits in row.logits]), -1).double()
    assert len(found) == len(known)
    return (found.gather(1, known[:, :, 0].long()) - known[:, :, 1]).abs()


def known_top5(cases: list[dict]) -> torch.Tensor:
    """[n, 5, 2]: id and log-probability."""
    return torch.tensor([step for case in cases for step in case["top5_logprobs"]], dtype=torch.float64)
