"""Who calls, and what is theirs: cached prefixes, a share of the work, the right to call what."""

import hashlib
from dataclasses import dataclass, field

from protos.service.access import EVERYBODY, Role
from protos.wire.limits import ISOLATION_DOMAIN_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class CallerLimits:
    """What one caller may have of one edge process. None: as much as anybody."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """Of prompts and outputs together."""
    max_streams: int | None = None
    """At once."""


UNLIMITED = CallerLimits()


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Whose requests are whose: an identity may abort only its own. Two of one name are the same caller."""

    name: str
    domain: str = field(default="", compare=False)
    """Callers of one domain share cached prefixes; empty: nobody but this one."""
    share: float = field(default=1.0, compare=False)
    """Weight beside other callers while requests wait."""
    roles: frozenset[Role] = field(default=EVERYBODY, compare=False)
    limits: CallerLimits = field(default=UNLIMITED, compare=False)
    tenant_class: str = field(default="default", compare=False)
    """Under which its tokens are counted."""

    def isolation_domain(self, cache_salt: str) -> bytes:
        """Whose cached prefixes a request may use: the caller's, and of these the ones with the same salt.

        16 bytes from which neither name nor salt can be told.
        """
        # A domain that is named as another caller is not that caller's.
        owner = ("domain", self.domain) if self.domain else ("caller", self.name)
        return _hashed(*owner, cache_salt)

    @property
    def share_domain(self) -> bytes:
        """Whose share of the work a request is taken from; empty: its isolation domain's.

        Not the isolation domain of a caller that is known: with many salts it would have many shares.
        """
        return b"" if self is ANONYMOUS else _hashed(self.name)


def _hashed(*texts: str) -> bytes:
    parts = (text.encode() for text in texts)
    sized = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    return hashlib.blake2b(sized, digest_size=ISOLATION_DOMAIN_BYTES).digest()


ANONYMOUS = CallerIdentity("anonymous")
"""Everybody, where no callers are known."""
