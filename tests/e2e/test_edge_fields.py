"""Every field of every request of the callers' service, sent to an edge at its borders: answered or refused by name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1.bridge_pb2 import CoreModel, StreamError
from protos.service.status import from_rpc_error
from tests.support.edge_harness import CHATML, Edge, running_edge
from tests.support.request_fields import (
    BORDERS,
    CAPS,
    CONTEXT,
    IDS,
    INTERVALS,
    WIDTH,
    Field,
    fields_of,
    fill,
    is_map,
    with_place,
)

METHODS: list[MethodDescriptor] = list(pb.DESCRIPTOR.services_by_name["GenerationService"].methods)
MODEL = CoreModel(context_tokens=CONTEXT, logits_width=WIDTH, max_logprobs=20, serving=True)
BY_NAME = {method.name: method for method in METHODS}
CODES = ("INVALID_ARGUMENT", "NOT_FOUND", "UNIMPLEMENTED", "FAILED_PRECONDITION")
"""Of refusals: a value, a name of a model or a request, something that is not offered, a ticket."""
PLACES = ("resume", "resume.token_ids", "chat", "text", "prompt", "")
"""What is told by the name of another field: tickets, a missing template, a text without ids."""


def good(method: MethodDescriptor) -> Message:
    kind = getattr(pb, method.input_type.name)
    request: Any = kind()
    names = {field.name for field in kind.DESCRIPTOR.fields}
    if "requests" in names:
        request.requests.add(text="a")
    elif "text" in names:
        request.text = "a"
    if method.name == "Abort":
        request.request_id = "r"
    return request


def tried(method: MethodDescriptor, field: Field) -> Iterator[tuple[Message, bool]]:
    """Requests with the field at its borders, and whether the value alone is bad."""
    path = field.of_call()
    if not field.is_list:
        for value in BORDERS[field.description.type]:
            request = good(method)
            holder, name = with_place(request, field)
            try:
                setattr(holder, name, value)
            except ValueError:
                continue  # does not fit the wire type: cannot arrive
            low, high = INTERVALS.get(path, (None, None))
            yield request, low is not None and not low <= getattr(holder, name) <= high
        return
    request = good(method)
    holder, name = with_place(request, field)
    holder.ClearField(name)
    fill(holder, name, field, CAPS[path] + 1)
    yield request, True
    if path in IDS or is_map(field.description):
        request = good(method)
        holder, name = with_place(request, field)
        if is_map(field.description):
            getattr(holder, name)[WIDTH] = 0.0
        else:
            getattr(holder, name).append(WIDTH)
        yield request, True


async def refusal(edge: Edge, method: MethodDescriptor, request: Message) -> Any:
    call = getattr(edge.stub, method.name)(request)
    try:
        if method.server_streaming:
            async for _ in call:
                pass
        else:
            await call
    except grpc.RpcError as error:
        return from_rpc_error(error)
    return None


@pytest.mark.parametrize("method", METHODS, ids=[method.name for method in METHODS])
async def test_every_field_at_its_borders_is_answered_or_refused_by_its_name(
    tmp_path: Path, method: MethodDescriptor
) -> None:
    all_tried = [(field, *one) for field in fields_of(method.input_type) for one in tried(method, field)]
    async with running_edge(tmp_path, template=CHATML, first_token_id=1, model=MODEL, ids_per_step=128) as edge:
        assert getattr(await refusal(edge, method, good(method)), "status", "NOT_FOUND") == "NOT_FOUND"
        for field, request, is_bad in all_tried:
            error = await refusal(edge, method, request)
            assert error is not None or not is_bad, (field, request)
            if error is not None:
                said = f"{field.place}: {error!r}"
                assert error.status in CODES, said
                assert not (is_placed(error.field) and error.message.startswith(without_place(error.field))), said
                assert error.field.startswith(field.place) or is_told_elsewhere(error.field, field, is_bad=is_bad), said


def is_placed(field: str) -> bool:
    return field.startswith("requests[0].")


def without_place(field: str) -> str:
    return field.removeprefix("requests[0].")


def is_told_elsewhere(told: str, field: Field, *, is_bad: bool) -> bool:
    """The call has no such group of fields at all; or the value is good by itself, and contradicts another field."""
    if is_placed(told) and field.place.startswith(told):
        return True
    return not is_bad and without_place(told) in (*PLACES, field.path.split(".")[0])


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("max_tokens", "stop.max_tokens"),
        ("prompt_ids", "prompt"),
        ("sampling.banned_token_ids", "sampling.banned_token_ids"),
    ],
)
async def test_what_the_core_refuses_is_told_by_the_callers_field(tmp_path: Path, said: str, told: str) -> None:
    refusal_of_core = StreamError(reason="INVALID_REQUEST", message=f"{said} is bad", field=said)
    request = pb.GenerateRequest(text="a")
    async with running_edge(tmp_path, refuse=refusal_of_core) as edge:
        alone = await refusal(edge, BY_NAME["Generate"], request)
        listed = await refusal(edge, BY_NAME["GenerateOnce"], pb.GenerateOnceRequest(requests=[request]))
    assert (alone.field, alone.message) == (told, f"{told} is bad")
    assert (listed.field, listed.message) == (f"requests[0].{told}", f"requests[0].{told} is bad")


async def test_a_full_queue_is_no_field_of_the_request(tmp_path: Path) -> None:
    full = StreamError(reason="QUEUE_FULL", message="no", field="deadline", retry_after_ms=250)
    async with running_edge(tmp_path, refuse=full) as edge:
        several = pb.GenerateOnceRequest(requests=[pb.GenerateRequest(text="a")])
        error = await refusal(edge, BY_NAME["GenerateOnce"], several)
    assert (error.field, error.retry_after_ms) == ("deadline", 250)
