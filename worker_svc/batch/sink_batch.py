"""A batch of one row that lies in the sink: what captures and warm-ups run, since it changes nothing that is read."""

import numpy as np
import torch

from protos.wire.enums import ForwardMode, GraphRefusal
from worker_svc.batch.forward_batch import ForwardBatch
from worker_svc.batch.forward_mode import traits_of
from worker_svc.batch.owned import frozen_copy
from worker_svc.batch.page_group import sink_group
from worker_svc.batch.row_groups import ExtendGroup
from worker_svc.device.host_staging import device_copy

_ONE = frozen_copy(np.ones(1, np.int32))
_ZERO = frozen_copy(np.zeros(1, np.int32))


def sink_batch(mode: ForwardMode, *, num_sub_pools: int, device: torch.device) -> ForwardBatch:
    """One token with id 0 at position 0, in the sink page of every sub-pool. It does not sample."""
    return ForwardBatch(
        forward_mode=mode,
        logical_mode=mode,
        graph=GraphRefusal.DISABLED,
        input_ids=device_copy(_ZERO, device),
        positions=torch.zeros(1, dtype=torch.int64, device=device),
        seq_lens=device_copy(_ONE, device),
        seq_lens_host=_ONE,
        page_groups=tuple(sink_group(sub_pool, device) for sub_pool in range(num_sub_pools)),
        logits_rows=torch.zeros(0, dtype=torch.int64, device=device),
        last_token_rows=torch.zeros(1, dtype=torch.int64, device=device),
        extend=_one_token(device) if traits_of(mode).has_extend_group else None,
    )


def _one_token(device: torch.device) -> ExtendGroup:
    return ExtendGroup(
        extend_lens=device_copy(_ONE, device),
        prefix_lens=device_copy(_ZERO, device),
        extend_start_loc=device_copy(_ZERO, device),
        extend_lens_host=_ONE,
        prefix_lens_host=_ZERO,
        extend_start_loc_host=_ZERO,
    )
