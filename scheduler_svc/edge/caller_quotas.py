"""What each caller may still have: requests and tokens by the minute, streams at once.

Counts for one edge process. Knows nothing of calls. Guards: one caller's count never touches another's. A request's
output is counted when it ends, so that a caller may go over by what its running streams still make; it then waits.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from protos.wire.errors import QuotaExceeded
from scheduler_svc.edge.caller_identity import UNLIMITED, CallerIdentity

_MINUTE_S = 60.0


@dataclass(slots=True)
class _Bucket:
    """Filled steadily, up to one minute's worth; may be in debt."""

    left: float
    filled_at: float

    def fill(self, per_minute: int, now: float) -> None:
        self.left = min(per_minute, self.left + (now - self.filled_at) * per_minute / _MINUTE_S)
        self.filled_at = now


@dataclass(slots=True)
class _Account:
    """One caller's."""

    requests: _Bucket
    tokens: _Bucket
    streams: int = 0


class CallerQuotas:
    """Made by the edge's composition root. Holds an account for each known caller that has limits."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Count by `clock`, in seconds."""
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def take_requests(self, caller: CallerIdentity, count: int = 1) -> None:
        """Count calls, or the further prompts of one.

        Raises:
            QuotaExceeded: there have been too many; nothing is counted.
        """
        per_minute = caller.limits.requests_per_minute
        if per_minute is None or count < 1:
            return
        bucket = self._account(caller).requests
        bucket.fill(per_minute, self._clock())
        if bucket.left < count:
            wait_s = (count - bucket.left) * _MINUTE_S / per_minute
            raise _exceeded(f"this caller has {per_minute} requests a minute", wait_s)
        bucket.left -= count

    def open_stream(self, caller: CallerIdentity, *, prompt_tokens: int) -> None:
        """Count a stream that begins. Each is closed once by `close_stream`.

        Raises:
            QuotaExceeded: it has too many, or has had too many tokens; nothing is counted.
        """
        if caller.limits is UNLIMITED:
            return
        account = self._account(caller)
        limits = caller.limits
        if limits.max_streams is not None and account.streams >= limits.max_streams:
            raise _exceeded(f"this caller has {limits.max_streams} streams at once", 1.0)
        if limits.tokens_per_minute is not None:
            account.tokens.fill(limits.tokens_per_minute, self._clock())
            if account.tokens.left <= 0:
                wait_s = (1 - account.tokens.left) * _MINUTE_S / limits.tokens_per_minute
                raise _exceeded(f"this caller has {limits.tokens_per_minute} tokens a minute", wait_s)
            account.tokens.left -= prompt_tokens
        account.streams += 1

    def close_stream(self, caller: CallerIdentity, *, output_tokens: int) -> None:
        """A stream that was opened has ended."""
        account = self._accounts.get(caller.name)
        if caller.limits is UNLIMITED or account is None:
            return
        account.streams = max(0, account.streams - 1)
        account.tokens.left -= output_tokens

    def _account(self, caller: CallerIdentity) -> _Account:
        account = self._accounts.get(caller.name)
        if account is None:
            now, limits = self._clock(), caller.limits
            account = _Account(
                requests=_Bucket(limits.requests_per_minute or 0, now),
                tokens=_Bucket(limits.tokens_per_minute or 0, now),
            )
            self._accounts[caller.name] = account
        return account


def _exceeded(message: str, wait_s: float) -> QuotaExceeded:
    return QuotaExceeded(message, retry_after_ms=max(1, math.ceil(wait_s * 1000)))
