"""Simulated executors and what they must answer, for every suite."""

from typing import Any

from protos.service.model_files import ModelCard
from protos.wire.simulated_tokens import SimulatedVocabulary
from tests.support.edge_harness import tiny_card
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor
from worker_svc.simulated.executor import SimulatedExecutor

EOS_ID = 2
STEP_MS = 1e-6
"""No test waits for the device."""


def card(**changes: Any) -> ModelCard:
    return tiny_card(EOS_ID, **{"vocab_size": 1000, "context_tokens": 4096, **changes})


def vocabulary(eos_ratio: float = 0.0) -> SimulatedVocabulary:
    return SimulatedVocabulary(1000, (EOS_ID,), eos_ratio)


def simulated_executor(*, vocab_size: int = 1000, **settings: Any) -> SimulatedExecutor:
    made_of = card(vocab_size=vocab_size)
    return build_simulated_executor(made_of, SimulatedSettings(**{"step_ms": STEP_MS, "num_pages": 400, **settings}))
