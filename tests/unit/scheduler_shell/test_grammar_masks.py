"""The core's questions for masks through a real grammar process, and the times that are measured of them."""

import asyncio
import time
from array import array

import pytest
from prometheus_client import CollectorRegistry

from protos.wire.errors import InvalidRequest
from scheduler_svc.core.events import Grammar, NeedMask, StreamKey
from scheduler_svc.grammar_masks import GrammarMasks
from scheduler_svc.metrics import PREFIX, create_metrics
from scheduler_svc.text.grammar_messages import Greeting
from tests.support.tiny_tokenizer import EOS, byte_level_tokenizer, write_tokenizer

LIMIT_S = 30.0


class Core:
    def __init__(self, folder):
        tokenizer = byte_level_tokenizer()
        greeting = Greeting(
            tokenizer=str(write_tokenizer(folder, tokenizer)),
            vocab_size=tokenizer.get_vocab_size(),
            eos_token_ids=(tokenizer.token_to_id(EOS),),
            memory_bytes=256 << 20,
            cpu_s=2,
            cache_bytes=1 << 20,
        )
        self.registry = CollectorRegistry()
        metrics = create_metrics(self.registry).grammar
        self.masks = GrammarMasks(greeting, num_processes=1, post=self.post, metrics=metrics, clock=time.monotonic)
        self.events = []
        self.came = asyncio.Event()

    def post(self, events):
        self.events += events
        self.came.set()

    async def answer(self, wanted):
        self.masks.ask(wanted)
        self.came.clear()
        await asyncio.wait_for(self.came.wait(), LIMIT_S)
        return self.events[-1]

    def metric(self, name):
        return self.registry.get_sample_value(PREFIX + name)


@pytest.fixture
async def core(tmp_path):
    made = Core(tmp_path)
    running = asyncio.create_task(made.masks.run())
    yield made
    running.cancel()
    await asyncio.wait({running})


def wanted(stream_id, pattern, *ids):
    return NeedMask(StreamKey(0, stream_id), Grammar("regex", pattern), array("i", ids))


async def test_masks_are_timed_by_question_and_grammars_by_compilation(core):
    began = time.monotonic()
    first = await core.answer(wanted(1, "[ab]{3}"))
    second = await core.answer(wanted(1, "[ab]{3}", 97))
    same = await core.answer(wanted(2, "[ab]{3}"))
    bad = await core.answer(wanted(3, "("))
    took = time.monotonic() - began

    assert (first.stream, first.position, second.position) == (StreamKey(0, 1), 0, 1)
    assert first.answer.tolist() == same.answer.tolist()
    assert isinstance(bad.answer, InvalidRequest)
    assert core.metric("grammar_mask_seconds_count") == 4
    assert 0 < core.metric("grammar_mask_seconds_sum") <= took
    assert core.metric("grammar_compile_seconds_count") == 2
    assert 0 < core.metric("grammar_compile_seconds_sum") < core.metric("grammar_mask_seconds_sum")


async def test_a_mask_tells_whether_the_output_matches_as_it_is(core):
    said = [await core.answer(wanted(1, "a{1,2}", *[97] * count)) for count in range(3)]
    assert [event.is_complete for event in said] == [False, True, True]


async def test_a_question_of_a_stream_that_ended_is_not_timed(core):
    core.masks.ask(wanted(1, "a"))
    core.masks.forget(StreamKey(0, 1))
    await core.answer(wanted(2, "b"))

    assert core.metric("grammar_mask_seconds_count") == 1
