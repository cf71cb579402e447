"""Calls of peers whose certificate is revoked: refused, and ended while they run.

A connection outlives its handshake, so each call is looked at, and each running one again as long as it runs. Knows
nothing of certificates; `revocation` does. Used on one event loop.
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from protos.service.handlers import Context
from protos.wire.errors import Unauthenticated

if TYPE_CHECKING:  # whoever has a list has loaded the library of certificates; others need not
    from protos.service.revocation import RevocationList

_LOOK_EVERY_S = 1.0
_REVOKED = "the peer's certificate is revoked"


@dataclass(slots=True, eq=False)
class _Call:
    """One that runs."""

    task: "asyncio.Task[object]"
    certificate: bytes
    is_ended: bool = False


class RevokedPeers:
    """Made by a composition root."""

    def __init__(self, revoked: "RevocationList | None") -> None:
        """Without a list nobody is revoked."""
        self._revoked = revoked
        self._running: set[_Call] = set()
        self._next_look: asyncio.TimerHandle | None = None

    @contextmanager
    def kept_out(self, read_certificate: Callable[[], bytes | None]) -> Iterator[None]:
        """Around a call, in its own task. `read_certificate` gives its peer's, in PEM or DER, where it is looked at.

        Raises:
            Unauthenticated: it is revoked, or was while the call ran.
        """
        certificate = None if self._revoked is None else read_certificate()
        if self._revoked is None or certificate is None:
            yield
            return
        if self._revoked.holds(certificate):
            raise Unauthenticated(_REVOKED)
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task"
        call = _Call(task, certificate)
        self._running.add(call)
        self._look_later()
        try:
            yield
        except asyncio.CancelledError:
            if not call.is_ended:
                raise
            task.uncancel()
            raise Unauthenticated(_REVOKED) from None
        finally:
            self._running.discard(call)

    def _look_later(self) -> None:
        if self._next_look is None:
            self._next_look = asyncio.get_running_loop().call_later(_LOOK_EVERY_S, self._look)

    def _look(self) -> None:
        assert self._revoked is not None, "without a list there is nothing to look for"
        self._next_look = None
        for call in self._running:
            if not call.is_ended and self._revoked.holds(call.certificate):
                call.is_ended = True
                call.task.cancel()
        if self._running:
            self._look_later()


NOBODY_REVOKED = RevokedPeers(None)


def certificate_of(context: Context) -> bytes | None:
    """The peer's certificate in PEM; None without one."""
    found = cast("Mapping[str, list[bytes]]", context.auth_context()).get("x509_pem_cert", ())
    return found[0] if found else None
