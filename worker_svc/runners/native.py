"""Runs a forward as one call of the native kernels: weights, pages and threads are theirs.

The CPU's path for fast numerics. Takes every batch. Guards: a row's logits have the same bits in any batch and any
chunking.
"""

import time

import numpy as np
import torch
from torch import Tensor

from kernels.errors import KernelError
from kernels.native_model import NativeModel, StepInput, StepOutput, StepPages
from protos.wire.enums import GraphRefusal
from protos.wire.errors import DeviceFault
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.page_group import PageGroup
from worker_svc.batch.row_groups import BestLogits, wants_logits
from worker_svc.model_runner import RunnerOutput
from worker_svc.runners.thread_choice import ThreadChoice


class NativeRunner:
    """A `ForwardRunner`. Owns nothing: the model is the stack's."""

    replays_graphs = False

    def __init__(self, model: NativeModel, *, most_threads: int | None = None) -> None:
        """Steps get up to `most_threads`, as many as measured times say; None: as many as the pool has."""
        self._model = model
        self._threads = None if most_threads is None else ThreadChoice(most_threads)

    def refusal(self, batch: ForwardBatch) -> GraphRefusal | None:  # noqa: ARG002 - the protocol's signature
        """Never."""
        return None

    def forward(self, batch: ForwardBatch) -> RunnerOutput:
        """Run `batch`.

        Raises:
            DeviceFault: the kernels refused what validation let through; nothing was computed.
        """
        wanted = wants_logits(batch.sampling, batch.logprobs, num_logits=batch.num_logits)
        inputs = _step_input(batch, wanted=wanted)
        try:
            output = self._step(inputs)
        except KernelError as error:
            raise DeviceFault(f"native kernels: {error}") from error
        assert output.last_hidden is not None, "asked for"
        return RunnerOutput(
            last_hidden=torch.from_numpy(output.last_hidden),
            logits=torch.from_numpy(output.logits),
            finite=torch.from_numpy(output.finite),
            best=BestLogits(
                ids=output.best_ids.astype(np.int64),
                values=output.best_logits,
                places=np.where(wanted, np.cumsum(wanted) - 1, -1),
            ),
            hidden=None if output.all_hidden is None else torch.from_numpy(output.all_hidden),
        )

    def logits(self, hidden: Tensor) -> Tensor:
        """Of final hidden states.

        Raises:
            DeviceFault: the kernels refused.
        """
        try:
            return torch.from_numpy(self._model.logits(hidden.numpy()))
        except KernelError as error:
            raise DeviceFault(f"native kernels: {error}") from error

    def _step(self, inputs: StepInput) -> StepOutput:
        if self._threads is None:
            return self._model.step(inputs)
        num_tokens = len(inputs.input_ids)
        threads = self._threads.before(num_tokens)
        if threads != self._model.pool.threads:
            self._model.pool.set_threads(threads)
        begin = time.perf_counter()
        output = self._model.step(inputs)
        self._threads.after(num_tokens, threads=threads, seconds=time.perf_counter() - begin)
        return output


def _step_input(batch: ForwardBatch, *, wanted: np.ndarray) -> StepInput:
    qo_indptr = np.zeros(batch.num_reqs + 1, np.int32)
    np.cumsum(batch.query_lens_host(), out=qo_indptr[1:])
    return StepInput(
        input_ids=batch.input_ids.numpy(),
        positions=batch.positions.numpy(),
        qo_indptr=qo_indptr,
        seq_lens=batch.seq_lens_host,
        pages=tuple(_step_pages(group) for group in batch.page_groups),
        out_tokens=batch.logits_rows.numpy().astype(np.int32),
        wants_logits=wanted,
        wants_hidden=True,
        wants_all_hidden=batch.wants_all_hidden,
    )


def _step_pages(group: PageGroup) -> StepPages:
    return StepPages(
        kv_indptr=group.kv_indptr_host,
        kv_indices=group.kv_indices_host,
        out_cache_loc=group.out_cache_loc.numpy(),
        start_positions=group.start_positions_host,
    )
