"""A worker that was attached: whether the core can plan for it, and its state at the beginning."""

from protos.wire.enums import ForwardMode
from protos.wire.errors import UnsupportedFeature
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS, MAX_WINDOW
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.budget import BudgetRule, budget_rule
from scheduler_svc.core.events import WorkerAttached
from scheduler_svc.core.plan_size import plan_size
from scheduler_svc.core.settings import CoreSettings
from scheduler_svc.core.worker_state import WorkerState
from scheduler_svc.memory.page_demand import PageDemand, SequenceCapacity
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
    token_limit = _token_limit(info)
    rule = _rule(settings, info)
    key = MemoryKey(event.worker, 0)
    return WorkerState(
        name=event.worker,
        info=info,
        epoch=event.epoch,
        term=event.term,
        memory=WorkerMemory(key, info.sub_pools, slack_tokens=_slack_tokens(settings, info)),
        window=_window(info),
        budget_rule=rule,
        budget_tokens=rule.first,
        token_limit=token_limit,
        row_limit=max(1, min(info.limits.max_rows, MAX_PLAN_ROWS, token_limit - page_size + 1)),
        plan_size=plan_size(info),
    )


def sequence_capacity(info: WorkerInfo, settings: CoreSettings) -> SequenceCapacity:
    """Longest request that fits such a worker's empty memory: what it is admitted by, and what edges are told."""
    demand = PageDemand.of(info.sub_pools, slack_tokens=_slack_tokens(settings, info))
    return demand.capacity([pool.num_pages - 1 for pool in info.sub_pools])


def _slack_tokens(settings: CoreSettings, info: WorkerInfo) -> int:
    """Most tokens that one request can have in plans in flight."""
    return _window(info) * _rule(settings, info).most


def _rule(settings: CoreSettings, info: WorkerInfo) -> BudgetRule:
    return budget_rule(settings, info, token_limit=_token_limit(info), window=_window(info))


def _token_limit(info: WorkerInfo) -> int:
    return min(info.limits.max_tokens, MAX_PLAN_TOKENS)


def _window(info: WorkerInfo) -> int:
    return max(1, min(info.limits.window, MAX_WINDOW))
