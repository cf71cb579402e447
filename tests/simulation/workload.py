"""What a run is made of: the workers, and what callers ask for."""

import random
from dataclasses import replace

from protos.wire.enums import Feature
from protos.wire.worker_info import WorkerInfo
from scheduler_svc.core.events import Grammar, RequestSpec, Sampling
from tests.simulation.faults import Profile
from tests.support.core_harness import NEVER, make_spec, small_info
from tests.support.plans import CORE_FEATURES

CAPACITY_TOKENS = 36
"""Of the tightest pool, which each request must fit."""


def draw_info(source: random.Random, profile: Profile) -> WorkerInfo:
    tight = profile is Profile.MEMORY
    page_size = source.choice([2, 4])
    tokens = source.choice([CAPACITY_TOKENS, 48]) if tight else 200
    features = CORE_FEATURES | ({Feature.DELTAS} if source.random() < 0.5 else set())
    info = small_info(
        num_pages=1 + tokens // page_size,
        page_size=page_size,
        window=source.choice([1, 2, 2, 3]),
        max_rows=source.choice([2, 64]),
        features=features,
    )
    return replace(info, device="simulated")  # plans of a device that nobody shares have short budgets


def draw_request(source: random.Random, number: int, *, now: float) -> RequestSpec:
    total = source.randint(3, CAPACITY_TOKENS - 2)
    prompt = source.randint(1, total - 1)
    book = source.choice([7, 11])
    ids = [(book * position) % 97 for position in range(prompt)]
    if source.random() < 0.5:
        ids[-1] = source.randrange(97)
    return make_spec(
        number,
        prompt=ids,
        max_tokens=min(total - prompt, 20),
        sampling=_draw_sampling(source),
        grammar=Grammar("regex", "a" * source.randint(1, 3)) if source.random() < 0.15 else None,
        stop_token_ids=frozenset(source.sample(range(97), source.choice([0, 4]))),
        isolation_domain=source.choice([b"", b"", b"other"]),
        deadline_s=now + source.uniform(0.5, 6.0) if source.random() < 0.1 else NEVER,
    )


def _draw_sampling(source: random.Random) -> Sampling:
    if source.random() < 0.5:
        return Sampling()
    penalties = {"repetition_penalty": 1.5, "frequency_penalty": 0.5} if source.random() < 0.3 else {}
    return Sampling(temperature=0.5, seed=source.getrandbits(64), sample_index=source.choice([0, 0, 3]), **penalties)
