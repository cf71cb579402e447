"""Whether a caller can tell by time what another one asked: first tokens of prompts that another identity has asked
before, and of prompts that nobody has. Kolmogorov-Smirnov, goal p > 0.01; beside it the caller's own cached prompts.

    python -m pytest -m bench -s tests/bench/test_bench_cache_timing.py
"""

import math
import random
import time

import numpy as np
import pytest

from protos.forwardplane.v1 import generate_pb2 as pb
from tests.e2e.test_caller_access import edge_of
from tests.support.callers import bearer, caller_entry
from tests.support.core_harness import small_info
from tests.support.real_core import RealCore

pytestmark = [pytest.mark.bench, pytest.mark.timeout(600)]
SAMPLES = 400
GOAL = 0.01


def separation(one: list[float], other: list[float]) -> tuple[float, float]:
    """The statistic of two samples, and the chance of one as large if they are of one distribution."""
    one, other = np.sort(one), np.sort(other)
    places = np.concatenate([one, other])
    gaps = np.searchsorted(one, places, "right") / len(one) - np.searchsorted(other, places, "right") / len(other)
    statistic = float(np.abs(gaps).max())
    scaled = statistic * math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    chance = 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101))
    return statistic, min(1.0, max(0.0, chance)) if scaled > 0.2 else 1.0


async def test_time_says_nothing_of_what_others_asked(tmp_path):
    entries = (caller_entry("a", "secret-a"), caller_entry("b", "secret-b"))
    core = RealCore(tmp_path / "core.sock", small_info(logits_width=280), step_s=0.001)
    draw = random.Random(7)
    found: dict[str, list[float]] = {"another's": [], "nobody's": [], "its own": []}

    async with edge_of(tmp_path, *entries, real_core=core) as (edge, _):

        async def first_token_s(text: str, token: str) -> float:
            request = pb.GenerateRequest(text=text, stop={"max_tokens": 1})
            begun = time.perf_counter()
            async for _ in edge.stub.Generate(request, metadata=bearer(token)):
                pass
            return time.perf_counter() - begun

        for _ in range(SAMPLES):
            known, unknown = ("".join(draw.choices("abcdefgh ", k=80)) for _ in range(2))
            await first_token_s(known, "secret-a")
            asked = {"another's": known, "nobody's": unknown}
            for name in draw.sample(sorted(asked), 2):
                found[name].append(await first_token_s(asked[name], "secret-b"))
            found["its own"].append(await first_token_s(unknown, "secret-b"))
    for name in ("another's", "its own"):
        statistic, chance = separation(found[name], found["nobody's"])
        medians = [np.median(found[kind]) * 1e3 for kind in (name, "nobody's")]
        print(f"{name} beside nobody's: {medians[0]:.2f} / {medians[1]:.2f} ms, ", end="")
        print(f"D {statistic:.3f}, p {chance:.3g} (goal > {GOAL})")
