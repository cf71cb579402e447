"""Structured output and samples of SmolLM2 over gRPC; the grammar processes may die under them."""

import asyncio
import contextlib
import json
import re

import psutil
import pytest

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions
from protos.wire.errors import InvalidRequest
from scheduler_svc.text.grammar_source import GrammarKind
from tests.support.hostile_grammars import hostile_grammars
from tests.support.hostile_requests import ask_for, check_refusal
from tests.support.served import served

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]

PERSON = Chat.user("Describe a person as JSON.")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
AS_JSON = GenerateOptions(max_tokens=64, temperature=0.8, seed=3, json_schema=json.dumps(SCHEMA))


@pytest.fixture(scope="module")
def server():
    with served(numerics="fast") as running:
        yield running


def grammar_processes(server):
    lines = server.command_lines()
    return [process for process, line in lines.items() if "scheduler_svc.text.grammar_process" in line]


def kill_new(processes, killed):
    """Kill those not killed before, of two lives at most; their process ids."""
    found = [process for process in processes if process.pid not in killed and len(killed) < 2]
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):  # of itself, meanwhile
            process.kill()
    return {process.pid for process in found}


async def one(client, options, prompt=PERSON):
    (generation,) = await client.generate([prompt], options)
    return generation


async def test_each_kind_of_grammar_holds(server):
    async with AsyncGenerationClient(server.target) as client:
        as_json, as_regex, as_choice, as_ebnf = await asyncio.gather(
            one(client, AS_JSON),
            one(client, GenerateOptions(max_tokens=30, regex="[0-9]{3}-[A-Z]{2,4}", seed=1)),
            one(client, GenerateOptions(max_tokens=30, choice=("yes", 'no, "never"', "été"), seed=4)),
            one(client, GenerateOptions(max_tokens=30, ebnf='start: "(" start ")" | "x"', temperature=0)),
        )
    person = json.loads(as_json.text)
    assert set(person) == {"name", "age"}
    assert 1 <= person["age"] <= 99
    assert re.fullmatch("[0-9]{3}-[A-Z]{2,4}", as_regex.text)
    assert as_choice.text in ("yes", 'no, "never"', "été")
    assert re.fullmatch(r"(\(*)x(\)*)", as_ebnf.text)
    assert as_ebnf.text.count("(") == as_ebnf.text.count(")")
    assert {g.finish.reason.name for g in (as_json, as_regex, as_choice, as_ebnf)} == {"STOP"}


async def test_a_grammar_row_is_the_same_whatever_happens_to_its_process(server):
    async with AsyncGenerationClient(server.target) as client:
        alone = await one(client, AS_JSON)
        stream = client.stream(PERSON, AS_JSON)
        ids, killed = [], set()
        async for chunk in stream:
            ids += chunk.token_ids
            killed |= kill_new(grammar_processes(server), killed)
        among = await asyncio.gather(
            one(client, AS_JSON),
            *(one(client, GenerateOptions(max_tokens=9 + mate, seed=mate, n=1)) for mate in range(4)),
        )
    assert killed
    assert tuple(ids) == alone.token_ids
    assert among[0].token_ids == alone.token_ids
    psutil.wait_procs([psutil.Process(pid) for pid in killed if psutil.pid_exists(pid)], timeout=30)


async def test_what_cannot_be_used_is_refused_and_named(server):
    async with AsyncGenerationClient(server.target) as client:
        for options, field in (
            ({"regex": "("}, "regex"),
            ({"json_schema": "[]"}, "json_schema"),
            ({"ebnf": "nope"}, "ebnf"),
            ({"regex": "a", "ignore_eos": True}, "stop.ignore_eos"),
        ):
            with pytest.raises(InvalidRequest) as caught:
                await one(client, GenerateOptions(max_tokens=4, **options))
            assert caught.value.field == f"requests[0].{field}"


async def test_sample_i_does_not_depend_on_n_nor_on_its_mates(server):
    def options(n):
        return GenerateOptions(max_tokens=8, temperature=1.0, seed=11, n=n, repetition_penalty=1.2)

    async with AsyncGenerationClient(server.target) as client:
        (alone,) = await client.generate([PERSON], options(1))
        four = await client.generate([PERSON], options(4))
        (also, *_), *_ = await asyncio.gather(
            client.generate([PERSON], options(2)), one(client, AS_JSON), one(client, GenerateOptions(max_tokens=5))
        )
    assert [sample.sample_index for sample in four] == [0, 1, 2, 3]
    assert alone.token_ids == four[0].token_ids == also.token_ids
    assert len({sample.token_ids for sample in four}) == 4
    assert [sample.usage.prompt_tokens > 0 for sample in four] == [True, False, False, False]


async def test_hostile_grammars_fail_alone_while_others_decode(server):
    """A few of the two hundred here; all of them in `test_hostile_grammars.py` and in the bench."""
    plain = GenerateOptions(max_tokens=24, temperature=0.0, ignore_eos=True)
    hostile = [source for source in hostile_grammars() if source.kind is not GrammarKind.CHOICE][::24]
    async with AsyncGenerationClient(server.target) as client:
        alone = [(await one(client, options)).token_ids for options in (plain, AS_JSON)]
        disturbing = asyncio.gather(*(ask_for(client, source) for source in hostile))
        mates = []
        while not disturbing.done():
            mates += await asyncio.gather(one(client, plain), one(client, AS_JSON))
        ends = await disturbing
        after = [(await one(client, options)).token_ids for options in (plain, AS_JSON)]
    refused = [(source, error) for source, error in zip(hostile, ends, strict=True) if error is not None]
    assert len(refused) >= len(hostile) // 4
    for source, error in refused:
        check_refusal(source, error)
    assert mates
    assert [mate.token_ids for mate in mates] == alone * (len(mates) // 2)
    assert after == alone
    assert all(
        process.status() != psutil.STATUS_ZOMBIE for process in grammar_processes(server) if process.is_running()
    )
    assert len(grammar_processes(server)) == len({process.pid for process in grammar_processes(server)}) <= 3
