"""Settings of the scheduling core. Values come from the composition root; the core reads no configuration."""

from dataclasses import dataclass
from enum import StrEnum

from protos.wire.step_budget import step_budget


class PolicyKind(StrEnum):
    """In which order waiting requests of one isolation domain are placed."""

    FCFS = "fcfs"
    LPM = "lpm"
    PRIORITY = "priority"


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """Every choice the core does not make itself."""

    budget_tokens: int | None = None
    """Fixed prefill tokens a plan, beside its decode rows; raised to one page. None: by the cost model."""
    first_budget_tokens: int = 256
    """Until the cost model has measured enough."""
    target_step_ms: float | None = None
    """Device time that a plan may take, by the cost model. None: by the device."""
    schedule_policy: PolicyKind = PolicyKind.FCFS
    priority_aging_s: float = 10.0
    """Seconds of waiting that weigh as much as one level of priority, under the policy `priority`."""
    max_waiting_requests: int = 1024
    """Most requests that wait for admission."""
    max_waiting_tokens: int = 1 << 20
    """Most tokens, of all waiting requests, that still need prefill. One request alone is always taken."""
    retry_after_ms: int = 1000
    """Least hint that goes with a refusal for lack of room."""
    most_retry_after_ms: int = 30_000
    new_token_ratio_start: float = 0.7
    """Share of its remaining output for which a running request's pages are kept free at admission."""
    new_token_ratio_floor: float = 0.1
    new_token_ratio_decay_steps: int = 600
    """Decode steps from start to floor."""
    reserve_clip_tokens: int = 4096
    """Most remaining output that counts for the reserve."""
    plan_budget_ms: int = 30_000
    """Time the device may take for a plan of which the cost model knows too little."""
    data_fault_retries: int = 1
    """Retries of a row with non-finite numbers, until its next token."""
    row_retries: int = 3
    """Retries of a row that failed otherwise, until its next token."""

    def target_step_s(self, device: str) -> float:
        """Device time that a plan on that device may take, in seconds."""
        return self.target_step_ms / 1e3 if self.target_step_ms else step_budget(device).target_step_s
