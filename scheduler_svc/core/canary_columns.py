"""What a plan says of its rows' KV canaries: the seed of each chain, and its hash where the row goes on.

Pure. Guards: a worker without a canary is sent neither column.
"""

from collections.abc import Sequence

import numpy as np

from protos.wire.enums import Feature
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.batch import PlannedRow
from scheduler_svc.core.canary_chain import CanaryChain
from scheduler_svc.core.request import Request

Array = np.ndarray


def canary_columns(rows: Sequence[PlannedRow], info: WorkerInfo) -> tuple[Array | None, Array | None]:
    """(seeds, hashes), u64 each, for a worker that has a canary."""
    if Feature.CANARY not in info.features:
        return None, None
    chains = [_chain(row.request) for row in rows]
    hashes = [chain.at(row.request.tokens, row.first_position) for chain, row in zip(chains, rows, strict=True)]
    return np.array([chain.seed for chain in chains], np.uint64), np.array(hashes, np.uint64)


def _chain(request: Request) -> CanaryChain:
    use = request.cache_use
    if use.canary is None:
        use.canary = CanaryChain.of(request.spec.isolation_domain)
    return use.canary
