"""Which connections waste what they ask: calls that are given up at once, messages that are none, unknown callers.

Knows neither gRPC nor sockets. Guards: a connection with as many good calls as wasted ones is never judged, so that
one bad client behind a gateway does not cost the others theirs; who never wastes a call has no account.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

HALF_LIFE_S = 10.0
"""What was done counts half after that."""
MAX_WASTED = 100.0
"""Calls of one connection that may be wasted, while there are fewer good ones."""
WATCHED_S = 60.0
"""So long, new connections from the address of one that was judged may waste `WATCHED_SHARE` of that."""
WATCHED_SHARE = 0.1
JUDGED_S = 5.0
"""So long, calls that such a connection had made are not served. Its peer's port may be anybody's then."""
_MAX_ACCOUNTS = 4096


class Standing(Enum):
    """What a connection's calls are worth."""

    FINE = auto()
    JUDGED = auto()
    """It went too far, and could not be closed."""
    CLOSED = auto()
    """Its last calls are still coming; nobody hears an answer."""


@dataclass(slots=True)
class _Account:
    """One connection's calls, the older ones weighing less."""

    at: float
    good: float = 0.0
    wasted: float = 0.0
    judged_at: float | None = None
    standing: Standing = Standing.FINE

    def fade(self, now: float) -> None:
        left = 0.5 ** ((now - self.at) / HALF_LIFE_S)
        self.good *= left
        self.wasted *= left
        self.at = now


class ConnectionConduct:
    """Made by the edge's server, used on its event loop. Peers are named as gRPC does it: KIND:ADDRESS:PORT."""

    def __init__(self, clock: Callable[[], float], close: Callable[[str], bool]) -> None:
        """Count by `clock`, in seconds; `close` ends the connection of a peer, or says that it cannot."""
        self._clock = clock
        self._close = close
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._judged_at: OrderedDict[str, float] = OrderedDict()

    def standing(self, peer: str) -> Standing:
        """Whether that connection has gone too far."""
        account = self._accounts.get(peer)
        if account is None or account.judged_at is None:
            return Standing.FINE
        if self._clock() - account.judged_at >= JUDGED_S:
            del self._accounts[peer]
            return Standing.FINE
        return account.standing

    def good(self, peer: str) -> None:
        """A call of that connection was taken, or refused for what it asks."""
        account = self._accounts.get(peer)
        if account is not None:
            account.fade(self._clock())
            account.good += 1.0

    def wasted(self, peer: str, *, weight: float = 1.0) -> bool:
        """A call of that connection was work for nothing; whether this was the one too many, and it was judged."""
        now = self._clock()
        account = self._accounts.get(peer)
        if account is None:
            account = self._accounts[peer] = _Account(now)
            _keep_newest(self._accounts)
        account.fade(now)
        account.wasted += weight
        if account.judged_at is not None or account.wasted <= max(account.good, self._limit(peer, now)):
            return False
        account.judged_at = now
        account.standing = Standing.CLOSED if self._close(peer) else Standing.JUDGED
        self._judged_at[_address(peer)] = now
        _keep_newest(self._judged_at)
        return True

    def _limit(self, peer: str, now: float) -> float:
        judged_at = self._judged_at.get(_address(peer))
        is_watched = judged_at is not None and now - judged_at < WATCHED_S
        return MAX_WASTED * WATCHED_SHARE if is_watched else MAX_WASTED


def _keep_newest(entries: OrderedDict[str, _Account] | OrderedDict[str, float]) -> None:
    if len(entries) > _MAX_ACCOUNTS:
        entries.popitem(last=False)


def _address(peer: str) -> str:
    return peer.rpartition(":")[0]
