"""A worker that was attached: whether the core can plan for it, and its state at the beginning."""

from protos.wire.enums import ForwardMode
from protos.wire.errors import UnsupportedFeature
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS, MAX_WINDOW
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.budget import budget_rule
from scheduler_svc.core.events import WorkerAttached
from scheduler_svc.core.plan_size import plan_size
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.page_holding import MemoryKey
from scheduler_svc.memory.worker_memory import WorkerMemory, check_geometry

_MODES = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED)


def check_worker(info: WorkerInfo) -> None:
    """That the core can plan for this worker. Asked before `WorkerAttached` is handed to the core.

    Raises:
        UnsupportedFeature: a sub-pool, mode or limit the core has no plans for.
    """
    check_geometry(info.sub_pools)
    page_size = info.sub_pools[0].page_size
    if info.limits.max_tokens <= page_size:
        message = f"max_tokens {info.limits.max_tokens} must be above the page size {page_size}"
        raise UnsupportedFeature(message, field="limits.max_tokens")
    size = plan_size(info)
    if size.least(page_size) > size.limit:
        message = f"max_plan_bytes {size.limit} must be at least {size.least(page_size)}"
        raise UnsupportedFeature(message, field="limits.max_plan_bytes")
    missing = [mode.name for mode in _MODES if mode not in info.modes]
    if missing:
        raise UnsupportedFeature(f"the worker lacks forward mode {missing[0]}", field="modes")


def attach(event: WorkerAttached, settings: CoreSettings) -> WorkerState:
    """A worker with empty memory and nothing in flight."""
    info = event.info
    check_worker(info)
    page_size = info.sub_pools[0].page_size
    token_limit = min(info.limits.max_tokens, MAX_PLAN_TOKENS)
    window = max(1, min(info.limits.window, MAX_WINDOW))
    rule = budget_rule(settings, info, token_limit=token_limit, window=window)
    key = MemoryKey(event.worker, 0)
    return WorkerState(
        name=event.worker,
        info=info,
        epoch=event.epoch,
        term=event.term,
        memory=WorkerMemory(key, info.sub_pools, slack_tokens=window * rule.most),
        window=window,
        budget_rule=rule,
        budget_tokens=rule.first,
        token_limit=token_limit,
        row_limit=max(1, min(info.limits.max_rows, MAX_PLAN_ROWS, token_limit - page_size + 1)),
        plan_size=plan_size(info),
    )
