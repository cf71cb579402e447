"""A plan on its way to the device: what needs no earlier result is made ahead, sampled tokens are put in last.

`stage` may run on any thread while an earlier plan executes and touches nothing that plan uses; everything else belongs
to the device thread. Guards: a staged plan shares no storage with its plan, with another one or with the ring.
"""

from dataclasses import dataclass

import numpy as np
import torch

from protos.wire.enums import HiddenMode
from protos.wire.plan import ForwardPlan
from protos.wire.result import ResultColumns
from protos.wire.validate_features import check_column_features, check_forward_features, check_hidden_modes
from protos.wire.worker_info import WorkerInfo
from worker_svc.batch.builder import BatchBuilder
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.references import References, plan_references, resolve, with_references
from worker_svc.device.host_staging import Landing, ToHost, Transfers, direct_transfers
from worker_svc.device.token_ring import TokenRing
from worker_svc.kv.write_plan import SlotTranslator


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagedPlan:
    """A plan and everything of it that needs no earlier result."""

    plan: ForwardPlan
    batches: tuple[ForwardBatch, ...]
    """As if every token were literal."""
    references: References | None
    landing: Landing
    """To be called before the batches' tensors are used."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadyPlan:
    """Batches with all their tokens."""

    batches: tuple[ForwardBatch, ...]
    lost_rows: np.ndarray
    """[R] bool: rows with a token that no earlier plan gave; they write no KV."""


class PlanStaging:
    """One per worker."""

    def __init__(
        self,
        *,
        info: WorkerInfo,
        translator: SlotTranslator,
        device: torch.device,
        hidden_mode: HiddenMode = HiddenMode.NULL,
        transfers: Transfers | None = None,
    ) -> None:
        """Stage for one worker.

        Args:
            info: the worker's.
            translator: of its pools.
            device: where tensors go.
            hidden_mode: which hidden states every forward keeps at least.
            transfers: the way there and back; None: tensors are copied one by one.
        """
        self._info = info
        self._transfers = transfers or direct_transfers(device)
        page_sizes = [pool.page_size for pool in info.sub_pools]
        self._builder = BatchBuilder(
            translator=translator, page_sizes=page_sizes, device=device, hidden_mode=hidden_mode
        )
        limits = info.limits
        self._ring = TokenRing(num_plans=limits.ring_plans, max_rows=limits.max_rows, device=device)

    def stage(self, plan: ForwardPlan) -> StagedPlan:
        """Prepare a validated plan.

        Raises:
            UnsupportedFeature: the plan needs what this worker lacks.
        """
        check_column_features(plan, self._info)
        check_forward_features(plan, self._info)
        check_hidden_modes(plan, self._info)
        with torch.inference_mode():
            slot = self._transfers.staging.slot()
            batches = self._builder.build(plan, slot)
            landing = slot.landing()
        return StagedPlan(plan=plan, batches=batches, references=plan_references(plan), landing=landing)

    @property
    def to_host(self) -> ToHost:
        """How what was computed comes to the host."""
        return self._transfers.to_host

    def ready(self, staged: StagedPlan) -> ReadyPlan:
        """Put in the tokens of the plans before it, which have run."""
        plan, references = staged.plan, staged.references
        staged.landing()
        if references is None:
            return ReadyPlan(batches=staged.batches, lost_rows=np.zeros(plan.rows.num_rows, bool))
        resolved = resolve(references, self._ring)
        pairs = zip(staged.batches, plan.forwards, strict=True)
        batches = tuple(with_references(batch, forward, resolved) for batch, forward in pairs)
        return ReadyPlan(batches=batches, lost_rows=resolved.failed_rows)

    def ran(self, staged: StagedPlan, rows: ResultColumns) -> None:
        """Keep what the plan sampled for those behind it."""
        self._ring.keep(staged.plan.identity.seq, rows)

    def forget(self) -> None:
        """Drop every sampled token."""
        self._ring.clear()
