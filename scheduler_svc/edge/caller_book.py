"""The callers that an operator named in a file: hashes of their tokens, names in their certificates, their quotas.

Knows nothing of calls. Guards: a token is compared in constant time with every known one; a file that cannot be used
is logged once and changes nothing.
"""

import hashlib
import logging
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from protos.service.access import Role
from protos.service.watched_file import bounded_bytes, file_stamp
from protos.wire.errors import InvalidRequest, Unauthenticated
from scheduler_svc.edge.caller_identity import CallerIdentity, CallerLimits

_logger = logging.getLogger(__name__)

MAX_TOKEN_BYTES = 512
MAX_TENANT_CLASSES = 16
OTHER_CLASSES = "other"
_MAX_FILE_BYTES = 4 << 20
_LOOK_EVERY_S = 1.0
_UNKNOWN = "no caller has this token or certificate"

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Count = Annotated[int, Field(ge=1, le=10**12)]


class CallerEntry(BaseModel):
    """One caller of the file."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, max_length=128)
    token_sha256: tuple[Digest, ...] = ()
    """Several, so that a new token can be given out before the old one ends."""
    certificate: str | None = Field(default=None, pattern=r"^spiffe://")
    """The one URI name in the caller's certificate, exactly."""
    domain: str = Field(default="", max_length=128)
    share: float = Field(default=1.0, ge=0.001, le=1000.0)
    tenant_class: str = Field(default="default", pattern=r"^[a-z][a-z0-9_-]{0,31}$")
    """Under which its tokens are counted; a file has few of them, since each is a label."""
    operator: bool = False
    """May read the load, with names of workers, and flush all caches."""
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    max_streams: Count | None = None

    def identity(self) -> CallerIdentity:
        """As the edge knows it."""
        return CallerIdentity(
            self.name,
            domain=self.domain,
            share=self.share,
            tenant_class=self.tenant_class,
            roles=frozenset({Role.CALLER, Role.OPERATOR} if self.operator else {Role.CALLER}),
            limits=CallerLimits(
                requests_per_minute=self.requests_per_minute,
                tokens_per_minute=self.tokens_per_minute,
                max_streams=self.max_streams,
            ),
        )


class _CallerFile(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    caller: tuple[CallerEntry, ...] = Field(max_length=10_000)


class CallerBook:
    """Made by the edge's composition root, in its event loop."""

    def __init__(self, path: Path, *, clock: Callable[[], float]) -> None:
        """Read the file.

        Raises:
            InvalidRequest: it cannot be used.
        """
        self._path = path
        self._clock = clock
        self._stamp = file_stamp(self._path)
        self._looked_at = clock()
        self._classes: set[str] = set()
        """Of the process's life: each is a label of a metric."""
        self._take(_read(path))

    def of_token(self, token: bytes) -> CallerIdentity:
        """Whose token it is.

        Raises:
            Unauthenticated: nobody's.
        """
        self._refresh()
        if len(token) > MAX_TOKEN_BYTES:
            raise Unauthenticated(_UNKNOWN)
        # What a look-up's time tells of a digest is of no use to who cannot choose digests.
        found = self._tokens.get(hashlib.sha256(token).digest())
        if found is None:
            raise Unauthenticated(_UNKNOWN)
        return found

    def of_certificate(self, names: Sequence[str]) -> CallerIdentity:
        """Whose certificate has those URI names.

        Raises:
            Unauthenticated: nobody's, or it has not exactly one.
        """
        self._refresh()
        found = self._certificates.get(names[0]) if len(names) == 1 else None
        if found is None:
            raise Unauthenticated(_UNKNOWN)
        return found

    def _refresh(self) -> None:
        now = self._clock()
        if now - self._looked_at < _LOOK_EVERY_S:
            return
        self._looked_at = now
        stamp = file_stamp(self._path)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._take(_read(self._path))
        except InvalidRequest as error:
            _logger.warning("new callers cannot be used, keeping the old ones", extra={"error": error.message})
            return
        _logger.info("callers were read again", extra={"callers": self.num_callers})

    def _take(self, entries: Sequence[CallerEntry]) -> None:
        callers = [(entry, self._bounded(entry.identity())) for entry in entries]
        self.num_callers = len(callers)
        self._tokens = {bytes.fromhex(one): caller for entry, caller in callers for one in entry.token_sha256}
        self._certificates = {entry.certificate: caller for entry, caller in callers if entry.certificate}

    def _bounded(self, caller: CallerIdentity) -> CallerIdentity:
        """The caller, counted with others if there have been too many classes since the start."""
        if len(self._classes | {caller.tenant_class}) > MAX_TENANT_CLASSES:
            return replace(caller, tenant_class=OTHER_CLASSES)
        self._classes.add(caller.tenant_class)
        return caller


def _read(path: Path) -> Sequence[CallerEntry]:
    try:
        content = bounded_bytes(path, most=_MAX_FILE_BYTES)
    except OSError as error:
        raise InvalidRequest(f"the file of callers cannot be read: {error.strerror}", field="callers") from None
    if content is None:
        raise InvalidRequest(f"the file of callers has more than {_MAX_FILE_BYTES} bytes", field="callers")
    try:
        entries = _CallerFile.model_validate(tomllib.loads(content.decode())).caller
    except (tomllib.TOMLDecodeError, UnicodeDecodeError):
        raise InvalidRequest("the file of callers is not TOML", field="callers") from None
    except ValidationError as error:
        # Where and what, never the value: it may be a token that was put in the place of its hash.
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"the file of callers: {place}: {first['msg'].partition(' (')[0]}"
        raise InvalidRequest(message, field="callers") from None
    if len({entry.tenant_class for entry in entries}) > MAX_TENANT_CLASSES:
        message = f"the file of callers has more than {MAX_TENANT_CLASSES} values of tenant_class"
        raise InvalidRequest(message, field="callers")
    _check_distinct([entry.name for entry in entries], "name")
    _check_distinct([one for entry in entries for one in entry.token_sha256], "token")
    _check_distinct([entry.certificate for entry in entries if entry.certificate], "certificate")
    return entries


def _check_distinct(values: Sequence[str], what: str) -> None:
    if len(set(values)) < len(values):
        raise InvalidRequest(f"the file of callers has one {what} twice", field="callers")
