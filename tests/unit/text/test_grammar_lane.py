"""Real grammar processes, some of them dying: rows go on, and only what kills its own process is refused."""

import asyncio
import contextlib
import itertools
import os
import signal
from dataclasses import replace

import numpy as np
import psutil
import pytest

from protos.wire.errors import EngineError, InvalidRequest, QueueFull, UnavailableError, UnsupportedFeature
from scheduler_svc.text import grammar_checker, grammar_lane
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.grammar_lane import GrammarLane, MaskQuestion
from scheduler_svc.text.grammar_messages import Greeting, decode_replies
from scheduler_svc.text.grammar_pool import GrammarPool
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource, choice_source
from tests.support.grammar_asker import LIMIT_S, Asker, running
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, write_tokenizer

REGEX = GrammarSource(GrammarKind.REGEX, "[ab]{6}")
LETHAL = GrammarSource(
    GrammarKind.EBNF,
    "\n".join([*[f"start{i}: start{i + 1}" for i in range(9000)], "start: start0", "start9000: start0"]),
)
"""Takes more than the second of processor time that it is given."""
A, B = 97, 98


def greeting_of(folder, **changes):
    tokenizer = byte_level_tokenizer()
    values = {
        "tokenizer": str(write_tokenizer(folder, tokenizer)),
        "vocab_size": tokenizer.get_vocab_size(),
        "eos_token_ids": (tokenizer.token_to_id(EOS),),
        "memory_bytes": 256 << 20,
        "cpu_s": 1,
        "cache_bytes": 1 << 20,
    }
    return Greeting(**(values | changes))


@contextlib.asynccontextmanager
async def running_lane(folder, **changes):
    asker = Asker()
    async with running(GrammarLane(greeting_of(folder, **changes), answered=asker.answered), asker) as lane:
        yield lane, asker


async def gone(lane):
    async with asyncio.timeout(LIMIT_S):
        while lane.pid is not None:
            await asyncio.sleep(0.001)


def allowed(bits):
    return set(np.flatnonzero(np.unpackbits(np.frombuffer(bits, np.uint8), bitorder="little")).tolist())


async def test_rows_of_one_process_are_answered_together_and_in_their_own_words(tmp_path):
    async with running_lane(tmp_path) as (lane, asker):
        assert lane.pid is None
        good, bad = await asker.ask(((0, 1), REGEX, []), ((0, 2), GrammarSource(GrammarKind.REGEX, "("), []))
        assert {A, B} <= allowed(good)
        assert isinstance(bad, InvalidRequest)
        assert (bad.field, bad.message) == ("regex", "regex cannot be used: line 1, column 8: error: unclosed group")
        pid = lane.pid
        (after,) = await asker.ask(((0, 1), REGEX, [A] * 6))
        assert not {A, B} & allowed(after)
        assert lane.pid == pid


async def test_after_a_process_died_rows_go_on_from_their_own_tokens(tmp_path):
    async with running_lane(tmp_path) as (lane, asker):
        await asker.ask(((0, 1), REGEX, []), ((0, 2), REGEX, []))
        (before,) = await asker.ask(((0, 1), REGEX, [A, B, A]))
        first_pid = lane.pid
        os.kill(first_pid, signal.SIGKILL)
        one, two = await asker.ask(((0, 1), REGEX, [A, B, A]), ((0, 2), REGEX, [B] * 6))
        assert one == before
        assert not {A, B} & allowed(two)
        assert lane.pid != first_pid


async def test_the_grammar_that_kills_its_process_is_refused_and_its_mates_are_not(tmp_path):
    async with running_lane(tmp_path) as (_, asker):
        answers = await asker.ask(
            ((0, 1), REGEX, []),
            ((0, 2), LETHAL, []),
            ((0, 3), REGEX, [A]),
            ((0, 4), LETHAL, []),
            ((0, 5), REGEX, [A] * 6),
        )
        refused = [answer for answer in answers if isinstance(answer, EngineError)]
        assert refused == [answers[1], answers[3]]
        assert [(type(error), error.field) for error in refused] == [(InvalidRequest, "ebnf")] * 2
        assert "more time or memory" in refused[0].message
        (later,) = await asker.ask(((0, 1), REGEX, [A, A]))
        assert {A, B} <= allowed(later)


async def test_a_grammar_that_eats_memory_is_refused(tmp_path):
    huge = choice_source([f"{i * 7919:0200}" for i in range(1000)])
    async with running_lane(tmp_path, memory_bytes=2 << 20, cpu_s=20) as (_, asker):
        good, bad = await asker.ask(((0, 1), REGEX, []), ((0, 2), huge, []))
        assert {A, B} <= allowed(good)
        assert isinstance(bad, InvalidRequest)
        assert bad.field == "choice"
    async with running_lane(tmp_path, memory_bytes=256 << 20, cpu_s=20) as (_, asker):
        assert isinstance((await asker.ask(((0, 2), huge, [])))[0], bytes)


async def test_a_process_that_is_full_is_replaced_and_nobody_notices(tmp_path, monkeypatch):
    monkeypatch.setattr(grammar_lane, "decode_replies", lambda body: replace(decode_replies(body), is_full=True))
    async with running_lane(tmp_path) as (lane, asker):
        for count in range(3):
            (answer,) = await asker.ask(((0, 1), REGEX, [A] * count))
            assert {A, B} <= allowed(answer)
            await gone(lane)


async def test_ended_rows_are_forgotten_even_while_they_are_asked_for(tmp_path):
    async with running_lane(tmp_path) as (lane, asker):
        await asker.ask(((0, 1), REGEX, []))
        lane.forget((0, 1))
        lane.ask(MaskQuestion((0, 2), REGEX, ()))
        await asyncio.sleep(0)
        lane.forget((0, 2))
        await asker.ask(((0, 3), REGEX, []))
        assert set(lane._known) == {(0, 3)}


async def test_a_tokenizer_that_cannot_be_used_refuses_every_grammar(tmp_path):
    folder = tmp_path / "bad"
    folder.mkdir()
    greeting = greeting_of(folder)
    (folder / "tokenizer.json").write_text("{}")
    asker = Asker()
    async with running(GrammarLane(greeting, answered=asker.answered), asker):
        (answer,) = await asker.ask(((0, 1), REGEX, []))
    assert isinstance(answer, UnsupportedFeature)


async def test_a_process_that_does_not_start_is_nobodys_fault(tmp_path, monkeypatch):
    monkeypatch.setattr(grammar_lane, "_MODULE", "scheduler_svc.text.no_such_module")
    async with running_lane(tmp_path) as (_, asker):
        (answer,) = await asker.ask(((0, 1), REGEX, []))
    assert isinstance(answer, UnavailableError)
    assert answer.retry_after_ms


async def test_a_pool_spreads_rows_and_one_process_does_not_hold_up_the_other(tmp_path):
    asker = Asker()
    async with running(GrammarPool(greeting_of(tmp_path), num_processes=2, answered=asker.answered), asker) as pool:
        await asker.ask(((0, 1), REGEX, []), ((0, 2), REGEX, []))
        assert len(set(pool.pids)) == 2
        pool.ask(MaskQuestion((0, 3), LETHAL, ()))
        for count in range(1, 6):
            await asker.ask(((0, 2), REGEX, [A] * count))
        assert ((0, 3), 0) not in asker.answers
        pool.forget((0, 2))
        pool.forget((0, 2))
        pool.forget((7, 7))
        await asker.ask(((0, 4), REGEX, []))
        (answer,) = await asker.ask(((0, 3), LETHAL, []))
        assert isinstance(answer, InvalidRequest)


async def test_a_checker_remembers_its_verdicts(tmp_path):
    checker = GrammarChecker(greeting_of(tmp_path))
    await checker.start()
    try:
        await checker.check(REGEX)
        for _ in range(2):
            with pytest.raises(InvalidRequest, match="unclosed group") as caught:
                await checker.check(GrammarSource(GrammarKind.REGEX, "("))
            assert caught.value.field == "regex"
        assert psutil.Process(checker._lane.pid).nice() == psutil.Process().nice() + 5
        checker._lane = None  # nothing is asked any more
        await checker.check(REGEX)
        with pytest.raises(InvalidRequest):
            await checker.check(GrammarSource(GrammarKind.REGEX, "("))
    finally:
        await checker.stop()
        await checker.stop()


async def test_a_checker_bounds_who_waits_and_what_it_remembers(tmp_path, monkeypatch):
    monkeypatch.setattr(grammar_checker, "_MAX_WAITING", 2)
    monkeypatch.setattr(grammar_checker, "_MAX_VERDICTS", 3)
    checker = GrammarChecker(greeting_of(tmp_path))
    sources = (GrammarSource(GrammarKind.REGEX, "a" * count) for count in itertools.count(1))
    held = [asyncio.create_task(checker.check(next(sources))) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull) as caught:
        await checker.check(next(sources))
    assert caught.value.retry_after_ms
    held[0].cancel()
    await asyncio.wait(held, timeout=0.01)
    await checker.start()
    try:
        await asyncio.wait_for(held[1], LIMIT_S)
        for _ in range(4):
            await checker.check(next(sources))
        assert len(checker._verdicts) == 3
        assert not checker._waiters
    finally:
        await checker.stop()
