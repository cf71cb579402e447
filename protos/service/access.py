"""Who may call what: roles, the table of all methods, and the interceptor in front of every handler of a port.

Default deny: a method that is not in the table is refused, and a handler that cannot be wrapped, a
synchronous one, is not offered. Knows no servicer; how a peer's roles are found out is given by the port's owner.
"""

from collections.abc import Awaitable, Callable, Mapping
from enum import StrEnum
from functools import partial
from types import MappingProxyType
from typing import Any, cast

import grpc

from protos.service.handlers import Context, Handler, async_behaviour, surrounded
from protos.service.revoked_peers import NOBODY_REVOKED, RevokedPeers, certificate_of
from protos.wire.errors import NotOffered, PermissionDenied


class Role(StrEnum):
    """What a peer is to us. The last part of a process's URI name."""

    SCHEDULER = "scheduler"
    WORKER = "worker"
    CALLER = "caller"
    OPERATOR = "operator"


EVERYBODY = frozenset(Role)
"""Roles of every peer of a port that does not ask who connects."""

_PLANNERS = frozenset({Role.SCHEDULER})
_CALLERS = frozenset({Role.CALLER, Role.OPERATOR})
_OPERATORS = frozenset({Role.OPERATOR})
_ANY_PEER = frozenset({Role.SCHEDULER, Role.CALLER, Role.OPERATOR})

METHOD_ROLES: Mapping[str, frozenset[Role]] = MappingProxyType(
    {
        "/forwardplane.v1.WorkerService/Attach": _PLANNERS,
        "/forwardplane.v1.WorkerService/Execute": _PLANNERS,
        "/forwardplane.v1.WorkerService/Report": _PLANNERS,
        "/forwardplane.v1.WorkerService/Drain": _PLANNERS,
        "/forwardplane.v1.GenerationService/Generate": _CALLERS,
        "/forwardplane.v1.GenerationService/GenerateOnce": _CALLERS,
        "/forwardplane.v1.GenerationService/Abort": _CALLERS,
        "/forwardplane.v1.GenerationService/Tokenize": _CALLERS,
        "/forwardplane.v1.GenerationService/Detokenize": _CALLERS,
        "/forwardplane.v1.GenerationService/Embed": _CALLERS,
        "/forwardplane.v1.GenerationService/GetModel": _CALLERS,
        # Names of workers, and everybody's cached prefixes.
        "/forwardplane.v1.GenerationService/GetLoad": _OPERATORS,
        "/forwardplane.v1.GenerationService/FlushCache": _OPERATORS,
        "/grpc.health.v1.Health/Check": _ANY_PEER,
        "/grpc.health.v1.Health/List": _ANY_PEER,
        "/grpc.health.v1.Health/Watch": _ANY_PEER,
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _ANY_PEER,
    }
)
"""Roles that may call a method, by its full name with slashes. Health has a plaintext port of its own for probes."""


def check_method(method: str, roles: frozenset[Role]) -> None:
    """Whether one of `roles` may call `method`.

    Raises:
        PermissionDenied: none may.
    """
    if not roles & METHOD_ROLES.get(method, frozenset()):
        raise PermissionDenied("this peer may not call this method")


def uri_names(context: Context) -> tuple[str, ...]:
    """The URI names in the peer's certificate; none without one."""
    found = cast("Mapping[str, list[bytes]]", context.auth_context()).get("peer_uri", ())
    return tuple(name.decode("utf-8", "replace") for name in found)


class PeerRoles:
    """Roles by certificate: exactly one URI name, exactly `spiffe://DOMAIN/ROLE`."""

    def __init__(self, trust_domain: str) -> None:
        self._roles = {f"spiffe://{trust_domain}/{role}": frozenset({role}) for role in Role}

    def __call__(self, method: str, context: Context) -> None:
        """Whether the peer may call `method`.

        Raises:
            PermissionDenied: its certificate names no role of this domain, or the role may not.
        """
        names = uri_names(context)
        roles = self._roles.get(names[0]) if len(names) == 1 else None
        if roles is None:
            raise PermissionDenied("the peer's certificate names no role of this trust domain")
        check_method(method, roles)


def admit_everybody(method: str, _context: Context) -> None:
    """On a port that does not ask who connects: only methods of the table exist.

    Raises:
        PermissionDenied: it is not in the table.
    """
    check_method(method, EVERYBODY)


class AccessInterceptor(grpc.aio.ServerInterceptor):
    """In front of every handler, inside the status border: errors of `admit` become statuses there."""

    def __init__(self, admit: Callable[[str, Context], None], revoked: RevokedPeers = NOBODY_REVOKED) -> None:
        """Let calls pass for which `admit`, given method and context, raises nothing; `revoked` may end them later."""
        self._admit = admit
        self._revoked = revoked

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler:
        """The handler of this call behind the check."""
        handler = cast(Any, await continuation(handler_call_details))
        if handler is None:
            return None
        behaviour = async_behaviour(handler) or _not_offered
        around = partial(self._admitted, handler_call_details.method)
        return surrounded(handler, behaviour, around, deserializer=handler.request_deserializer)

    async def _admitted(self, method: str, context: Context, answer: Callable[[], Awaitable[Any]]) -> Any:
        with self._revoked.kept_out(partial(certificate_of, context)):
            self._admit(method, context)
            return await answer()


async def _not_offered(_request: Any, _context: Context) -> None:
    raise NotOffered("this server does not offer this method")
