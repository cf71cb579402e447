"""A model that is a pure function of a row's whole history, read back through the page table.

Its "KV" is the token id and position of each slot. So a wrong slot, page, position or length changes the logits of the
row it belongs to, and the logits of a history can be computed without any batch.
"""

from collections.abc import Sequence

import numpy as np
import torch

from protos.wire.worker_info import WorkerInfo
from worker_svc.batch.staging import PlanStaging
from worker_svc.device.host_staging import Transfers
from worker_svc.model_runner import RunnerOutput
from worker_svc.runners.dispatch import RunnerDispatch
from worker_svc.tp_model_worker import TpModelWorker

WIDTH = 211
POISON = WIDTH - 1
"""A history that holds this id has a NaN hidden state; the model never prefers it."""


def history_logits(history: Sequence[int]) -> np.ndarray:
    """[WIDTH] float32, a function of the ids and their order only."""
    logits = (np.random.default_rng(list(history)).normal(size=WIDTH) * 3).astype(np.float32)
    logits[POISON] = -20
    return logits


class FlatTranslator:
    """Page p starts at slot p * page_size."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size

    def slots(self, sub_pool: int, pages: np.ndarray, offsets: np.ndarray) -> np.ndarray:
        return pages * self._page_size + offsets


class HistoryRunner:
    """A ForwardRunner over one full sub-pool."""

    replays_graphs = False

    def __init__(self, info: WorkerInfo) -> None:
        (self.pool,) = info.sub_pools
        self.slot_ids = np.full(self.pool.num_pages * self.pool.page_size, -1)
        self.slot_positions = np.full_like(self.slot_ids, -1)
        self.batches = []
        self.states = []
        self.largest_block = 0

    def refusal(self, batch):
        return None

    def padded_tokens(self, batch):
        return 0

    def forward(self, batch):
        assert batch.num_tokens > 0
        batch.check()
        self.batches.append(batch)
        (pages,) = batch.page_groups
        slots = pages.out_cache_loc.numpy()
        self.slot_ids[slots] = batch.input_ids.numpy()
        self.slot_positions[slots] = batch.positions.numpy()
        histories = [self._history(batch, pages, row) for row in range(batch.num_reqs)]
        wanted = np.searchsorted(batch.last_token_rows.numpy(), batch.logits_rows.numpy())
        logits = [history_logits(histories[row]) for row in wanted]
        finite = torch.tensor([POISON not in history for history in histories])
        return RunnerOutput(
            last_hidden=torch.zeros(batch.num_reqs, 1),
            logits=torch.from_numpy(np.array(logits, np.float32).reshape(-1, WIDTH)),
            finite=finite,
            hidden=self._hidden(batch, histories) if batch.wants_all_hidden else None,
        )

    def _hidden(self, batch, histories) -> torch.Tensor:
        """[num_tokens, 1]: of each token the place of its history, from which `logits` finds it again."""
        ends = batch.last_token_rows.numpy()
        lengths = batch.query_lens_host()
        self.states = [
            history[: len(history) - (end - token)]
            for history, end, length in zip(histories, ends, lengths, strict=True)
            for token in range(end - length + 1, end + 1)
        ]
        return torch.arange(len(self.states), dtype=torch.float32)[:, None]

    def logits(self, hidden):
        histories = [self.states[int(place)] for place in hidden[:, 0]]
        self.largest_block = max(self.largest_block, len(histories))
        poisoned = [history_logits(history) * (np.nan if POISON in history else 1) for history in histories]
        return torch.from_numpy(np.array(poisoned, np.float32).reshape(-1, WIDTH))

    def _history(self, batch, pages, row) -> list[int]:
        row_pages = pages.kv_indices_host[pages.kv_indptr_host[row] : pages.kv_indptr_host[row + 1]]
        slots = (row_pages[:, None] * self.pool.page_size + np.arange(self.pool.page_size)).ravel()
        slots = slots[: batch.seq_lens_host[row]]
        assert self.slot_positions[slots].tolist() == list(range(len(slots)))
        return self.slot_ids[slots].tolist()


def tiny_worker(info: WorkerInfo, runners=None, *, transfers: Transfers | None = None) -> TpModelWorker:
    """A TpModelWorker around the history model."""
    (pool,) = info.sub_pools
    return TpModelWorker(
        info=info,
        staging=PlanStaging(
            info=info, translator=FlatTranslator(pool.page_size), device=torch.device("cpu"), transfers=transfers
        ),
        dispatch=RunnerDispatch(runners if runners is not None else [HistoryRunner(info)]),
    )
