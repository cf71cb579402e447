"""Which faults a seed has: a profile, and a few of the others, so that some seeds lack some faults."""

import random
from dataclasses import dataclass
from enum import StrEnum


class Profile(StrEnum):
    """What a run is mostly about. Names of the reference's suites D1-D7."""

    CRASH = "D1"
    PAUSE = "D2"
    FAILOVER = "D3"
    MEMORY = "D4"
    PARTITION = "D5"
    MESSAGES = "D6"
    NUMBERS = "D7"


class Fault(StrEnum):
    """One kind of fault."""

    CRASH = "crash"
    PAUSE = "pause"
    HANG = "hang"
    DRAIN = "drain"
    FAILOVER = "failover"
    ZOMBIE = "zombie"
    CUT = "cut"
    CUT_ONE_WAY = "cut one way"
    BREAK = "break"
    SICK = "sick"
    SLOW_REPORTS = "slow reports"
    CORRUPT = "corrupt"


_MAIN = {
    Profile.CRASH: (Fault.CRASH, Fault.CRASH, Fault.DRAIN, Fault.BREAK),
    Profile.PAUSE: (Fault.PAUSE, Fault.PAUSE, Fault.HANG, Fault.SLOW_REPORTS),
    Profile.FAILOVER: (Fault.FAILOVER, Fault.ZOMBIE, Fault.ZOMBIE, Fault.BREAK),
    Profile.MEMORY: (Fault.CRASH, Fault.BREAK),
    Profile.PARTITION: (Fault.CUT, Fault.CUT_ONE_WAY, Fault.BREAK),
    Profile.MESSAGES: (Fault.BREAK, Fault.BREAK, Fault.CORRUPT),
    Profile.NUMBERS: (Fault.SICK, Fault.SICK, Fault.BREAK),
}


@dataclass(frozen=True, kw_only=True)
class FaultMix:
    """Drawn once for each seed."""

    profile: Profile
    kinds: tuple[Fault, ...]
    pause_s: tuple[float, float]
    """Between two faults."""
    asks_s: tuple[float, float]
    """Between two arrivals: where they are rare, workers are idle when something happens."""
    message_rates: dict[str, float]
    slow_share: float
    has_poison: bool


def draw(source: random.Random) -> FaultMix:
    profile = source.choice(list(Profile))
    kinds = list(_MAIN[profile])
    kinds += [kind for kind in Fault if source.random() < 0.12]
    rough = profile is Profile.MESSAGES
    rates = {name: source.choice([0, 0.02] if rough else [0, 0, 0.003]) for name in ("lost", "twice", "torn")}
    return FaultMix(
        profile=profile,
        kinds=tuple(kinds),
        pause_s=source.choice([(0.2, 1.0), (0.5, 3.0)]),
        asks_s=source.choice([(0.1, 0.8), (0.1, 0.8), (0.8, 3.0)]),
        message_rates=rates,
        slow_share=source.choice([0, 0.01, 0.1]),
        has_poison=source.random() < 0.15,
    )
