"""How many prefill tokens a plan may carry beside its decode rows: fixed, or what fits the target step time."""

from dataclasses import dataclass

from protos.wire.enums import SubPoolKind
from protos.wire.step_budget import step_budget, whole_pages
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.cost_model import CostModel
from scheduler_svc.core.settings import CoreSettings

_WINDOW_SHARE = 4
"""One request's plans in flight take at most this part of a window sub-pool."""


@dataclass(frozen=True, slots=True)
class BudgetRule:
    """Of one worker; made at attach."""

    first: int
    """Until enough was measured."""
    least: int
    most: int
    target_s: float
    page_size: int

    @property
    def is_fixed(self) -> bool:
        """Whether nothing depends on measurements."""
        return self.least == self.most

    def tokens(self, cost: CostModel) -> int:
        """The budget now. Grows to at most twice what was ever measured."""
        if self.is_fixed or not cost.is_ready:
            return self.first
        fits = cost.tokens_within(self.target_s, context=cost.last.context)
        most = min(self.most, max(self.first, 2 * cost.most_tokens))
        return whole_pages(fits, least=self.least, most=most, page_size=self.page_size)


def budget_rule(settings: CoreSettings, info: WorkerInfo, *, token_limit: int, window: int) -> BudgetRule:
    """The rule for a worker: the settings' number if there is one, else by its device."""
    page_size = info.sub_pools[0].page_size
    if settings.budget_tokens is not None:
        fixed = min(max(settings.budget_tokens, page_size), token_limit)
        return BudgetRule(fixed, fixed, fixed, settings.target_step_s(info.device), page_size)
    own = step_budget(info.device)
    first = max(page_size, min(settings.first_budget_tokens, token_limit))
    most = max(page_size, min(own.most_tokens, token_limit, *_window_limits(info, first=first, window=window)))
    return BudgetRule(
        first, max(page_size, min(own.least_tokens, most)), most, settings.target_step_s(info.device), page_size
    )


def _window_limits(info: WorkerInfo, *, first: int, window: int) -> list[int]:
    pools = [pool for pool in info.sub_pools if pool.kind == SubPoolKind.WINDOW]
    room = [(pool.num_pages - 1) * pool.page_size // _WINDOW_SHARE - pool.window_tokens for pool in pools]
    return [max(first, tokens // window) for tokens in room]
