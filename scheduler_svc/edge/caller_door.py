"""From a call to the identity of its caller, the same for both doors: a token, else a certificate, else nobody asks.

Guards: where callers are known, no method of either door is reached without one of them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from protos.service.access import Role, check_method, uri_names
from protos.service.handlers import Context
from protos.wire.errors import PermissionDenied, Unauthenticated
from scheduler_svc.edge.caller_book import CallerBook
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity
from scheduler_svc.edge.caller_quotas import CallerQuotas
from scheduler_svc.edge.metrics import EdgeMetrics, counting_rejections

_SCHEME = "bearer "
_NO_TOKEN = "this server needs a token: Authorization: Bearer TOKEN"


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCallers:
    """Who may call. Neither: everybody, who is then one and the same caller."""

    book: CallerBook | None = None
    certificate_domain: str | None = None
    """Without a book, certificates `spiffe://DOMAIN/caller/NAME` name the caller."""


class CallerDoor:
    """Made by the edge's composition root."""

    def __init__(self, metrics: EdgeMetrics, quotas: CallerQuotas, known: KnownCallers) -> None:
        """Ask who calls. `metrics` count who is turned away, `quotas` are those of the callers."""
        self._metrics = metrics
        self._quotas = quotas
        self._book = known.book
        domain = known.certificate_domain
        self._prefix = None if domain is None else f"spiffe://{domain}/caller/"

    def admit(self, method: str, context: Context) -> None:
        """Let a gRPC call in, and count it.

        Raises:
            Unauthenticated, PermissionDenied, QuotaExceeded: why not.
        """
        with counting_rejections(self._metrics):
            caller = self.caller(context)
            check_method(method, caller.roles)
            self._quotas.take_requests(caller)

    def caller(self, context: Context) -> CallerIdentity:
        """Whose gRPC call it is.

        Raises:
            Unauthenticated: nobody's who is known.
        """
        if self._book is None and self._prefix is None:
            return ANONYMOUS
        given: Any = [value for name, value in context.invocation_metadata() or () if name == "authorization"]
        return self._identified(given, uri_names(context))

    def admit_http(self, request: web.Request) -> CallerIdentity:
        """Let an HTTP call in, and count it; whose it is.

        Raises:
            Unauthenticated, PermissionDenied, QuotaExceeded: why not.
        """
        if self._book is None and self._prefix is None:
            return ANONYMOUS
        with counting_rejections(self._metrics):
            given = request.headers.getall("Authorization", [])
            caller = self._identified(given, _http_uri_names(request))
            if Role.CALLER not in caller.roles:
                raise PermissionDenied("this caller may not call this route")
            self._quotas.take_requests(caller)
            return caller

    def _identified(self, given: Sequence[str | bytes], names: Sequence[str]) -> CallerIdentity:
        if self._book is None:
            return self._of_certificate(names)
        if not given and names:
            return self._book.of_certificate(names)
        if len(given) != 1:
            raise Unauthenticated(_NO_TOKEN)
        text = given[0] if isinstance(given[0], str) else given[0].decode("latin-1")
        if not text.lower().startswith(_SCHEME):
            raise Unauthenticated(_NO_TOKEN)
        return self._book.of_token(text[len(_SCHEME) :].strip().encode("utf-8", "surrogateescape"))

    def _of_certificate(self, names: Sequence[str]) -> CallerIdentity:
        assert self._prefix is not None, "else everybody is anonymous"
        name = names[0].removeprefix(self._prefix) if len(names) == 1 and names[0].startswith(self._prefix) else ""
        if not name or "/" in name:
            raise Unauthenticated("the certificate names no caller of this trust domain")
        return CallerIdentity(name, roles=frozenset({Role.CALLER}))


def _http_uri_names(request: web.Request) -> tuple[str, ...]:
    transport = request.transport
    certificate = None if transport is None else transport.get_extra_info("peercert")
    names = (certificate or {}).get("subjectAltName", ())
    return tuple(value for kind, value in names if kind == "URI")
