"""Whatever the bytes are: decoding and validating gives the taxonomy's errors, or a plan that keeps every rule."""

import struct
from dataclasses import replace

from google.protobuf.descriptor import FieldDescriptor
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protos.forwardplane.v1 import plan_pb2
from protos.wire import columns
from protos.wire.codec import decode_identity, decode_plan, decode_result, encode_plan, encode_result
from protos.wire.columns import F32, I32, U8, U32, U64
from protos.wire.enums import ForwardMode, GraphPhase
from protos.wire.errors import DataFault, InvalidPlan, UnsupportedFeature
from protos.wire.plan import GraphChoice
from protos.wire.validate import validate_plan
from tests.support import plans
from tests.support.plan_oracle import first_problem
from tests.support.plans import with_value
from tests.support.results import make_rejected_result, make_result

WIDTH = 1000
SMALL = plans.make_info(logits_width=WIDTH, limits=plans.make_limits(context_tokens=200, max_rows=8, max_tokens=64))
FULL = plans.make_full_info(logits_width=WIDTH, limits=replace(SMALL.limits, max_hidden_states=20))
MIXED = plans.make_mixed_plan(info=SMALL)
RICH = plans.make_rich_plan(FULL)
GRAPH = with_value(
    plans.make_decode_plan(3, info=FULL), "forwards.0.graph", GraphChoice(phase=GraphPhase.DECODE, bucket=4)
)
TWO_FORWARDS = (
    replace(MIXED.forwards[0], mode=ForwardMode.DECODE, logical_mode=ForwardMode.DECODE, row_end=2),
    replace(MIXED.forwards[0], mode=ForwardMode.EXTEND, logical_mode=ForwardMode.EXTEND, row_begin=2),
)
CASES = [
    (plans.make_idle_plan(info=SMALL), SMALL),
    (plans.make_decode_plan(3, info=SMALL), SMALL),
    (MIXED, SMALL),
    (with_value(MIXED, "forwards", TWO_FORWARDS), SMALL),
    (plans.make_plan([plans.decode(32, pages=[1, 2, 3]), plans.decode(32, pages=[1, 2, 4])], info=SMALL), SMALL),
    (GRAPH, FULL),
    (RICH, FULL),
    (with_value(RICH, "delta", replace(plans.make_delta(RICH, digest=bytes(16)), base_seq=8)), FULL),
    (RICH, replace(FULL, sub_pools=FULL.sub_pools[::-1])),
]
BODIES = [encode_plan(plan) for plan, _ in CASES]
RESULT_BODIES = [encode_result(make_result()), encode_result(make_rejected_result())]

EDGES = (0, 1, -1, 2, 3, 15, 16, 17, 31, 127, 128, 200, 201, 255, 999, 1000, 1023, 1024, 2**15, 2**24, 2**31 - 1)
INTEGERS = st.one_of(st.sampled_from(EDGES), st.integers(-(2**31), 2**64 - 1))
FLOATS = st.one_of(st.sampled_from((0.0, 1.0, -1.0, 2.0, -2.0, 100.0, 101.0, 1e-45)), st.floats(width=32))


def refusal(call, *arguments):
    """The error that `call` raises, which says where and what; `None` without one."""
    caught = None
    try:
        call(*arguments)
    except (InvalidPlan, UnsupportedFeature, DataFault) as error:
        caught = error
    assert caught is None or (caught.message and caught.field)
    return caught


def check(body, info):
    """Whatever is in `body` is refused by the codec, or fast validation and slow oracle agree on it."""
    if refusal(decode_plan, body) is not None:
        return
    plan = decode_plan(body)
    refused = refusal(validate_plan, plan, info)
    problem = first_problem(plan, info)
    assert (refused is None) == (problem is None), f"validation: {refused}; oracle: {problem}"


def test_the_cases_themselves():
    for body, (plan, info) in zip(BODIES, CASES, strict=True):
        check(body, info)
        assert (refusal(validate_plan, plan, info) is None) == (info.sub_pools != FULL.sub_pools[::-1])


@settings(max_examples=400)
@given(st.integers(0, len(CASES) - 1), st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_flipped_bits(case, flips):
    body = bytearray(BODIES[case])
    for flip in flips:
        index = flip % (8 * len(body))
        body[index // 8] ^= 1 << index % 8
    check(bytes(body), CASES[case][1])


@settings(max_examples=200)
@given(st.integers(0, len(CASES) - 1), st.integers(0, 2**20), st.binary(max_size=40))
def test_truncation_and_splices(case, cut, junk):
    body = BODIES[case]
    cut %= len(body)
    check(body[:cut] + junk, CASES[case][1])
    check(body[:cut] + junk + body[cut:], CASES[case][1])


@settings(max_examples=200)
@given(st.binary(max_size=200))
@example(b"")
def test_arbitrary_bytes(body):
    check(body, FULL)
    assert isinstance(refusal(decode_identity, body), (DataFault, type(None)))
    assert isinstance(refusal(decode_result, body), (DataFault, type(None)))


@settings(max_examples=300)
@given(st.integers(0, 1), st.lists(st.integers(0, 2**20), min_size=1, max_size=4))
def test_flipped_bits_of_results(case, flips):
    body = bytearray(RESULT_BODIES[case])
    for flip in flips:
        index = flip % (8 * len(body))
        body[index // 8] ^= 1 << index % 8
    if refusal(decode_result, bytes(body)) is not None:
        return
    result = decode_result(bytes(body))
    assert (result.rows is None) != (result.rejection is None)
    if result.rows is not None:
        assert len(result.rows.statuses) == len(result.rows.token_ids) == len(result.rows.handles)


def fields_of(message):
    """(message, field) of every present bytes field, and (message, field) of every present number."""
    arrays, numbers = [], []
    for field, value in message.ListFields():
        if field.type == FieldDescriptor.TYPE_MESSAGE:
            for child in value if field.is_repeated else [value]:
                child_arrays, child_numbers = fields_of(child)
                arrays += child_arrays
                numbers += child_numbers
        elif field.type == FieldDescriptor.TYPE_BYTES:
            arrays.append((message, field))
        elif field.type != FieldDescriptor.TYPE_STRING and not field.is_repeated:
            numbers.append((message, field))
    return arrays, numbers


@st.composite
def mutated_plans(draw):
    case = draw(st.integers(0, len(CASES) - 1))
    message = plan_pb2.ForwardPlan.FromString(BODIES[case])
    for _ in range(draw(st.integers(1, 3))):
        arrays, numbers = fields_of(message)
        if not arrays or not numbers:
            break
        change = draw(st.sampled_from((change_element, change_element, change_length, change_number, drop_group)))
        change(draw, message, arrays, numbers)
    return message.SerializeToString(), CASES[case][1]


STRUCT_FORMATS = {U8: "B", U32: "I", U64: "Q", I32: "i", F32: "f"}
FORMATS = {
    (message, column.name): STRUCT_FORMATS[column.dtype]
    for message, group in columns.PLAN_MESSAGES.items()
    for column in group
}


def item_format(draw, owner, field):
    """The struct format of a column's elements, guessed wrong now and then."""
    known = FORMATS.get((owner.DESCRIPTOR.name, field.name))
    return known if known and draw(st.integers(0, 19)) else draw(st.sampled_from("BIQif"))


def change_element(draw, _, arrays, __):
    owner, field = draw(st.sampled_from(arrays))
    form = item_format(draw, owner, field)
    content = bytearray(getattr(owner, field.name))
    size = struct.calcsize(form)
    if len(content) < size:
        return
    offset = draw(st.integers(0, len(content) // size - 1)) * size
    if form == "f":
        content[offset : offset + 4] = struct.pack("<f", draw(FLOATS))
    else:
        old = int.from_bytes(content[offset : offset + size], "little")
        value = old + draw(st.sampled_from((1, -1, 16, -16))) if draw(st.booleans()) else draw(INTEGERS)
        content[offset : offset + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    setattr(owner, field.name, bytes(content))


def change_length(draw, _, arrays, __):
    owner, field = draw(st.sampled_from(arrays))
    size = struct.calcsize(item_format(draw, owner, field))
    content = getattr(owner, field.name)
    at = draw(st.integers(0, len(content) // size)) * size
    changed = (
        content[:at] + content[at + size :] if draw(st.booleans()) else content[:at] + content[-size:] + content[at:]
    )
    setattr(owner, field.name, changed)


def change_number(draw, _, __, numbers):
    owner, field = draw(st.sampled_from(numbers))
    value = draw(st.one_of(st.integers(0, 20), st.sampled_from((0, 1, 2, 999, 2**31 - 1, 2**32 - 1))))
    signed = field.type == FieldDescriptor.TYPE_ENUM
    setattr(owner, field.name, min(value, 2**31 - 1) if signed else value)


def drop_group(draw, message, arrays, _):
    names = [field.name for field, _ in message.ListFields()]
    if draw(st.booleans()):
        owner, field = draw(st.sampled_from(arrays))
        owner.ClearField(field.name)
        return
    name = draw(st.sampled_from(names))
    group = getattr(message, name)
    if message.DESCRIPTOR.fields_by_name[name].is_repeated and draw(st.booleans()):
        group.append(group[draw(st.integers(0, len(group) - 1))])
    elif message.DESCRIPTOR.fields_by_name[name].is_repeated and len(group) > 1:
        group.pop(0)
    else:
        message.ClearField(name)


@settings(max_examples=1000)
@given(mutated_plans())
def test_changed_columns_numbers_and_groups(mutated):
    check(*mutated)
