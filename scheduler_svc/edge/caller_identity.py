"""Who calls. Every caller is the same anonymous one as long as this release knows no authentication."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallerIdentity:
    """Whose requests are whose: an identity may abort only its own."""

    name: str


ANONYMOUS = CallerIdentity("anonymous")
