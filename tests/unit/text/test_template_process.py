import io
import json
import struct

import pytest

from scheduler_svc.text.template_process import Renderer, answer, serve

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def reply(source: str, *contents: str) -> dict[str, str]:
    messages = [{"role": "user", "content": content} for content in contents]
    return answer(Renderer(source, special_tokens=TOKENS), messages)


def frame(message: object) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack("<I", len(body)) + body


def test_renders_as_the_model_expects() -> None:
    assert reply(CHATML, "hi") == {"text": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


def test_block_whitespace_is_trimmed_as_the_templates_assume() -> None:
    source = "{% for m in messages %}\n  {% if true %}\n{{ bos_token }}{{ m.content }}\n  {% endif %}\n{% endfor %}"
    assert reply(source, "a", "b") == {"text": "<s>a\n<s>b\n"}


def test_the_templates_own_refusal_is_told_apart() -> None:
    assert reply("{{ raise_exception('roles must alternate') }}", "hi") == {"refused": "roles must alternate"}


def test_what_models_templates_use_is_there() -> None:
    source = "{{ {'a': '<é>'} | tojson }}{{ strftime_now('%Y') | length }}{% for i in [1] %}{% break %}{% endfor %}"
    assert reply(source, "hi") == {"text": '{"a": "<é>"}4'}


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ 1 / 0 }}",
        "{% include '/etc/passwd' %}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        "{{ messages[9].content.nothing.at.all }}",
    ],
)
def test_a_template_that_breaks_says_so(source: str) -> None:
    assert set(reply(source, "hi")) == {"failed"}


def test_serves_until_the_pipe_closes() -> None:
    greeting = {"template": "{{ messages[0].content }}!", "special_tokens": {}}
    call = {"messages": [{"role": "user", "content": "hi"}]}
    sink = io.BytesIO()
    serve(io.BytesIO(frame(greeting) + frame(call) + frame(call)), sink)
    assert sink.getvalue() == frame({"text": ""}) + 2 * frame({"text": "hi!"})


def test_a_template_that_does_not_compile_is_told_in_the_greetings_answer() -> None:
    sink = io.BytesIO()
    serve(io.BytesIO(frame({"template": "{% for %}", "special_tokens": {}})), sink)
    assert b"failed" in sink.getvalue()
