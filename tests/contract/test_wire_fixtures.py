"""The stored bytes of every message: today's code writes the same bytes and reads the same fields from them."""

import importlib
import inspect

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from protos.forwardplane.v1 import error_pb2, generate_pb2, plan_pb2, sampling_pb2, worker_pb2
from protos.wire.codec import (
    decode_plan,
    decode_result,
    encode_plan,
    encode_result,
    worker_info_from_proto,
    worker_info_to_proto,
)
from protos.wire.codec_plan import RESERVED_GROUPS
from tests.contract.make_fixtures import FIXTURES, fixtures, info_cases, plan_cases, result_cases
from tests.support.frozen import flatten

MODULES = (plan_pb2, worker_pb2, error_pb2, sampling_pb2, generate_pb2)
CLASSES = {
    name: value
    for module in MODULES
    for name, value in vars(module).items()
    if inspect.isclass(value) and issubclass(value, Message)
}
STORED = {path.name: path.read_bytes() for path in sorted(FIXTURES.glob("*.bin"))}


def parsed(name):
    return CLASSES[name.partition(".")[0]].FromString(STORED[name])


def test_every_fixture_is_made_by_the_script_and_stored():
    assert set(STORED) == set(fixtures())


@pytest.mark.parametrize("name", sorted(fixtures()))
def test_the_same_bytes_are_written(name):
    assert fixtures()[name] == STORED[name]
    assert parsed(name).SerializeToString(deterministic=True) == STORED[name]


@pytest.mark.parametrize("name", plan_cases())
def test_plans_read_back_field_by_field(name):
    body = STORED[f"ForwardPlan.{name}.bin"]
    assert flatten(decode_plan(body)) == flatten(plan_cases()[name])
    assert encode_plan(decode_plan(body)) == body


@pytest.mark.parametrize("name", result_cases())
def test_results_read_back_field_by_field(name):
    body = STORED[f"ForwardResult.{name}.bin"]
    assert flatten(decode_result(body)) == flatten(result_cases()[name])
    assert encode_result(decode_result(body)) == body


@pytest.mark.parametrize("name", info_cases())
def test_worker_infos_read_back_field_by_field(name):
    reply = parsed(f"AttachReply.{name}.bin")
    assert worker_info_from_proto(reply) == info_cases()[name]
    assert worker_info_to_proto(worker_info_from_proto(reply)) == reply


def test_a_plan_of_later_rounds_names_its_groups():
    assert decode_plan(STORED["ForwardPlan.plain.bin"]).reserved == RESERVED_GROUPS


def fields_set(message, found):
    """Adds every (message, field) that is set somewhere in `message`."""
    for field, value in message.ListFields():
        found.add((message.DESCRIPTOR.name, field.name))
        if field.type == FieldDescriptor.TYPE_MESSAGE and not field.message_type.GetOptions().map_entry:
            for child in value if field.is_repeated else [value]:
                fields_set(child, found)


def test_every_field_of_the_schema_is_in_some_fixture():
    found = set()
    for name in STORED:
        fields_set(parsed(name), found)
    every = {(name, field.name) for name, cls in CLASSES.items() for field in cls.DESCRIPTOR.fields}
    assert every - found == set()


def test_the_script_finds_nothing_to_change():
    said = []
    script = importlib.import_module("tests.contract.make_fixtures")
    assert script.main(["--check"], say=said.append) == 0
    assert said == []
