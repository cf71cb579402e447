"""The child process for real: a few of these, since each starts an interpreter."""

import asyncio

import psutil
import pytest

from protos.wire.errors import InvalidModelFile, InvalidRequest
from scheduler_svc.text.chat_template import ChatTemplate

# Runs away only for the user who says so, so that the same template can also answer.
RUNAWAY = (
    "{% if messages[0].content == 'spin' %}"
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    "{% elif messages[0].content == 'eat' %}{{ 'x' * 4000000000 }}"
    "{% elif messages[0].content == 'refuse' %}{{ raise_exception('not this') }}"
    "{% endif %}{{ bos_token }}"
)


def template(source: str, **options: float) -> ChatTemplate:
    return ChatTemplate(source, special_tokens={"bos_token": "<s>"}, **options)


async def test_s7_a_template_that_runs_away_is_killed_and_the_next_call_works() -> None:
    children_before = len(psutil.Process().children(recursive=True))
    chat = template(RUNAWAY, render_timeout_s=0.3)
    try:
        await chat.start()
        with pytest.raises(InvalidRequest, match=r"did not finish within 0\.3 s"):
            await asyncio.wait_for(chat.render([("user", "spin")]), 30)
        assert await chat.render([("user", "hi")]) == "<s>"
        with pytest.raises((InvalidModelFile, InvalidRequest)):
            await chat.render([("user", "eat")])
        with pytest.raises(InvalidRequest, match="not this"):
            await chat.render([("user", "refuse")])
        assert await chat.render([("user", "hi")]) == "<s>"
    finally:
        await chat.close()
    assert len(psutil.Process().children(recursive=True)) == children_before


async def test_a_caller_who_leaves_does_not_disturb_the_next() -> None:
    chat = template(RUNAWAY, render_timeout_s=5.0)
    try:
        await chat.start()
        leaving = asyncio.create_task(chat.render([("user", "spin")]))
        await asyncio.sleep(0.05)
        leaving.cancel()
        assert await chat.render([("user", "hi")]) == "<s>"
        assert leaving.cancelled()
    finally:
        await chat.close()


async def test_a_template_that_does_not_compile_is_an_invalid_model_file() -> None:
    chat = template("{% for %}")
    try:
        with pytest.raises(InvalidModelFile, match="does not compile"):
            await chat.start()
    finally:
        await chat.close()
