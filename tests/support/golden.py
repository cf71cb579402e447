"""Known answers of the real models: tests/golden/*.json, and the rule for comparing free runs."""

import json
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parent.parent / "golden"
GAP = 0.02
"""A free run may leave the known ids at the first step whose best two log-probabilities are closer than this."""


def cases(name: str) -> list[dict[str, Any]]:
    return json.loads((GOLDEN / name).read_text())


def gaps(case: dict[str, Any]) -> list[float]:
    """Distance of the best two log-probabilities at each step."""
    return [step[0][1] - step[1][1] for step in case["top5_logprobs"]]


def assert_free_run(case: dict[str, Any], token_ids: list[int]) -> None:
    """The ids equal the known ones up to the first step of a near tie."""
    known = case["greedy_ids"]
    tie = next((step for step, gap in enumerate(gaps(case)) if gap < GAP), len(known))
    assert token_ids[:tie] == known[:tie]
    if tie == len(known):
        assert token_ids == known
