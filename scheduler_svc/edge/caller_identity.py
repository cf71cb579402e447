"""Who calls. Every caller is the same anonymous one as long as this release knows no authentication."""

import hashlib
from dataclasses import dataclass

from protos.wire.limits import ISOLATION_DOMAIN_BYTES


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Whose requests are whose: an identity may abort only its own."""

    name: str

    def isolation_domain(self, cache_salt: str) -> bytes:
        """Whose cached prefixes a request may use: the caller's, and of these the ones with the same salt.

        16 bytes from which neither name nor salt can be told.
        """
        parts = (part.encode() for part in (self.name, cache_salt))
        sized = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
        return hashlib.blake2b(sized, digest_size=ISOLATION_DOMAIN_BYTES).digest()


ANONYMOUS = CallerIdentity("anonymous")
