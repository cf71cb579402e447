"""Two hundred hostile grammars: each gives masks within its limits or fails alone with a clear InvalidRequest.

A well-behaved grammar in the same pool gets every one of its masks meanwhile, the same as when it is alone.
"""

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from protos.wire.errors import EngineError, InvalidRequest
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.grammar_messages import Greeting
from scheduler_svc.text.grammar_pool import GrammarPool
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource
from tests.support.grammar_asker import Asker, running
from tests.support.hostile_grammars import COUNT, hostile_grammars
from tests.support.model import model_folder

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

GOOD = GrammarSource(GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"enum": ["yes", "no"]}}')
STEPS = 12
MASK_LIMIT_S = 30.0
"""Wall clock, on a machine shared with others: five times the processor time, as the lane allows, and its retry."""


def greeting() -> Greeting:
    folder = model_folder()
    return Greeting(
        tokenizer=str(folder.tokenizer),
        vocab_size=folder.card.vocab_size,
        eos_token_ids=folder.card.eos_token_ids,
        memory_bytes=512 << 20,
        cpu_s=2,
        cache_bytes=64 << 20,
    )


def choose(bits: bytes, draw: np.random.Generator) -> int:
    return int(draw.choice(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little"))))


async def drive(asker: Asker, row: tuple[int, int], source: GrammarSource) -> EngineError | list[int]:
    """Random output under the grammar, a few tokens long."""
    draw, ids = np.random.default_rng(row), []
    for _ in range(STEPS):
        (answer,) = await asker.ask((row, source, ids))
        if isinstance(answer, EngineError):
            return answer
        ids.append(choose(answer, draw))
        if ids[-1] in greeting().eos_token_ids:
            break
    asker.target.forget(row)
    return ids


async def test_s6_every_hostile_grammar_is_borne_or_fails_alone():
    asker = Asker()
    slowest = 0.0
    refused = died = 0
    async with running(GrammarPool(greeting(), num_processes=2, answered=asker.answered), asker) as pool:
        alone = await drive(asker, (9, 9), GOOD)
        pids: set[int] = set()
        for place, source in enumerate(hostile_grammars()):
            began = time.monotonic()
            outcome, mate = await asyncio.gather(drive(asker, (0, place), source), drive(asker, (9, 9), GOOD))
            slowest = max(slowest, time.monotonic() - began)
            assert mate == alone, (place, source.kind, source.text[:60])
            if isinstance(outcome, EngineError):
                assert isinstance(outcome, InvalidRequest), outcome
                assert outcome.field == source.kind
                assert 20 < len(outcome.message) < 300
                refused += 1
                died += "more time or memory" in outcome.message
            pids |= set(pool.pids)
    assert refused >= COUNT // 4
    assert slowest < MASK_LIMIT_S
    assert died == 0 or len(pids) > 2
    for pid in pids:
        assert not Path(f"/proc/{pid}").exists()


async def test_s6_the_door_tries_them_out_within_limits():
    checker = GrammarChecker(greeting())
    await checker.start()
    tried = hostile_grammars()[::4]
    try:
        async with asyncio.timeout(MASK_LIMIT_S * 4):
            verdicts = await asyncio.gather(*(checker.check(source) for source in tried), return_exceptions=True)
        await checker.check(GOOD)
    finally:
        await checker.stop()
    refused = [(verdict, source) for verdict, source in zip(verdicts, tried, strict=True) if verdict is not None]
    assert len(refused) >= len(tried) // 4
    for verdict, source in refused:
        assert isinstance(verdict, InvalidRequest)
        assert verdict.field == source.kind
