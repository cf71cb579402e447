"""What is fuzzed: for each border, inputs to begin with, a change that knows the format, and one run.

A run returns what became of the input, in few words: a refusal's class and field, or that it was taken. Whatever it
raises is a finding. Inputs of targets with a checksum begin with a byte: even, and the stored one counts; odd, and
it is right.
"""

import hmac
import json
import random
import re
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.message import Message

from protos.forwardplane.v1 import generate_pb2 as pb
from protos.forwardplane.v1 import worker_pb2
from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.forwardplane.v1.plan_pb2 import ForwardPlan as PlanProto
from protos.forwardplane.v1.plan_pb2 import ForwardResult as ResultProto
from protos.service.gguf_header import parse_gguf_header
from protos.service.readable import Unreadable, tolerant
from protos.service.safetensors_header import parse_safetensors_header
from protos.wire.codec import (
    checksum,
    decode_result,
    encode_plan,
    encode_result,
    open_message,
    worker_info_from_proto,
    worker_info_to_proto,
)
from protos.wire.errors import CallerError, DataFault, EngineError, InvalidModelFile, InvalidPlan, ProtocolMismatch
from protos.wire.limits import MAX_CHAT_MESSAGES, MAX_LOGIT_BIAS_IDS, MAX_SAMPLES, MAX_STOP_STRINGS, MAX_TEMPERATURE
from protos.wire.plan import ForwardPlan
from scheduler_svc.edge.http_front.asked import asked_of_chat, asked_of_completion
from scheduler_svc.edge.model_facts import ModelFacts, model_facts
from scheduler_svc.edge.resume_tickets import Ticket, TicketDesk
from scheduler_svc.edge.validate_request import check_num_requests, validate_generate
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.fuzz.mutation import changed_bytes, changed_json, changed_message
from tests.support import gguf_bytes as g
from tests.support import plans
from tests.support.edge_harness import tiny_card
from tests.support.plan_oracle import first_problem
from tests.support.results import make_rejected_result, make_result
from tests.support.tiny_tokenizer import byte_level_tokenizer
from worker_svc.protocol.worker_protocol import WorkerProtocol
from worker_svc.rpc.plan_intake import PlanIntake
from worker_svc.rpc.worker_servicer import attach_call

Change = Callable[[bytes, random.Random], bytes]
WIDTH, CONTEXT = 300, 100
INFO = plans.make_full_info(logits_width=1000)
KEY = bytes(range(32))


_VALUES = re.compile(r"""'.*?'|".*?"|-?[0-9][0-9a-fx.e+-]*|nan|-?inf""")
"""In messages and names of fields: what differs between inputs that fail alike."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """One border."""

    seeds: Sequence[bytes]
    change: Change
    run: Callable[[bytes], str]


def refused(error: EngineError) -> str:
    """Short and the same for inputs that fail alike. The message has to be fit to be sent."""
    assert error.message
    assert len(error.message) < 600, error.message
    return f"{type(error).__name__} {_VALUES.sub('', error.field + ' ' + error.message)[:100]}"


def sealed(data: bytes) -> tuple[bytes, int]:
    """The body of an input, and the checksum that its sender says."""
    body = data[5:]
    return body, checksum(body) if data[:1] and data[0] & 1 else int.from_bytes(data[1:5], "little")


def with_seal(change: Change) -> Change:
    """Changes the body; every tenth time the seal."""

    def changed(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.1 or len(data) < 5:
            return changed_bytes(data[:5], rng)[:5].ljust(5, b"\0") + data[5:]
        return data[:5] + change(data[5:], rng)

    return changed


def messages(message_class: type[Message]) -> Change:
    """Mostly by field, sometimes by byte."""

    def changed(data: bytes, rng: random.Random) -> bytes:
        return changed_bytes(data, rng) if rng.random() < 0.15 else changed_message(data, message_class, rng)

    return changed


def facts() -> ModelFacts:
    said = CoreModel(context_tokens=CONTEXT, logits_width=WIDTH, max_logprobs=20, serving=True)
    return model_facts(tiny_card(2), said, has_chat_template=True)


FACTS = facts()
_read_caller = tolerant(pb.GenerateOnceRequest.FromString)
assert _read_caller is not None


def run_caller(data: bytes) -> str:
    """A caller's bytes as far as the tokenizer."""
    request = _read_caller(data)
    if isinstance(request, Unreadable):
        return request.name
    try:
        check_num_requests(len(request.requests))
        for one in request.requests:
            validate_generate(one, FACTS)
            assert_bounded(one)
    except CallerError as error:
        return refused(error)
    return "taken"


def assert_bounded(request: pb.GenerateRequest) -> None:
    """What was taken keeps the caps that matter most, said here a second time."""
    sampling = request.sampling
    assert 0 <= sampling.temperature <= MAX_TEMPERATURE
    assert not sampling.HasField("n") or 1 <= sampling.n <= MAX_SAMPLES
    assert len(sampling.logit_bias) <= MAX_LOGIT_BIAS_IDS
    assert all(key < WIDTH for key in sampling.logit_bias)
    assert len(request.stop.stop_strings) <= MAX_STOP_STRINGS
    assert all(0 <= token < WIDTH for token in (*request.tokens.ids, *request.stop.stop_token_ids))
    assert len(request.chat.messages) <= MAX_CHAT_MESSAGES


def run_http(data: bytes) -> str:
    """A body of the HTTP front; the first byte says of which route."""
    try:
        asked = (asked_of_chat if data[:1] == b"c" else asked_of_completion)(data[1:])
        with asked.in_callers_words():
            for generation in asked.generations:
                validate_generate(generation, FACTS)
                assert_bounded(generation)
    except CallerError as error:
        return refused(error)
    return "taken"


def changed_http(data: bytes, rng: random.Random) -> bytes:
    return data[:1] + (changed_bytes(data[1:], rng) if rng.random() < 0.1 else changed_json(data[1:], rng))


def run_plan(data: bytes) -> str:
    """A plan's message through a worker's intake; validation and its slow oracle agree."""
    staged: list[ForwardPlan] = []

    def stage(plan: ForwardPlan, _digest: bytes | None) -> Callable[[], object]:
        staged.append(plan)
        return lambda: None

    intake = PlanIntake(INFO, lambda: 0, stage)  # type: ignore[arg-type]
    body, crc32 = sealed(data)
    try:
        arrived = intake.read(worker_pb2.PlanMessage(body=body, crc32=crc32))
    except DataFault as error:
        return refused(error)
    if not staged:
        return f"{type(arrived.content).__name__} {getattr(arrived.content, 'field', '')[:60]}"
    problem = first_problem(staged[0], INFO)
    assert problem is None, problem
    return "taken"


def run_result(data: bytes) -> str:
    """A result's message as a scheduler reads it."""
    try:
        result = decode_result(open_message(*sealed(data)))
    except DataFault as error:
        return refused(error)
    assert (result.rows is None) != (result.rejection is None)
    return "taken"


def run_attach(data: bytes) -> str:
    """Both sides of an attach: what a scheduler asks of a protocol, or what a worker answers. First byte: which."""
    if data[:1] == b"a":
        reply = tolerant(worker_pb2.AttachReply.FromString)(data[1:])  # type: ignore[misc]
        if isinstance(reply, Unreadable):
            return reply.name
        try:
            worker_info_from_proto(reply)
        except (ProtocolMismatch, InvalidPlan, DataFault) as error:
            return refused(error)
        return "taken"
    request = tolerant(worker_pb2.AttachRequest.FromString)(data[1:])  # type: ignore[misc]
    if isinstance(request, Unreadable):
        return request.name
    protocol = WorkerProtocol(INFO)
    actions = protocol.attach_requested(1, attach_call(request))
    return " ".join(type(action).__name__ for action in actions)


def changed_attach(data: bytes, rng: random.Random) -> bytes:
    kind = worker_pb2.AttachReply if data[:1] == b"a" else worker_pb2.AttachRequest
    return data[:1] + messages(kind)(data[1:], rng)


def run_gguf(data: bytes) -> str:
    """The head of a GGUF file; tensors that are taken lie within it."""
    try:
        header = parse_gguf_header(data, file_bytes=len(data), label="x.gguf")
    except InvalidModelFile as error:
        return refused(error)
    assert all(0 <= one.offset <= one.offset + one.num_bytes <= len(data) for one in header.tensors.values())
    return f"taken {len(header.tensors) > 1}"


def changed_gguf(data: bytes, rng: random.Random) -> bytes:
    """A file whose counts and lengths fit, with one number at a border; or any change."""
    if rng.random() < 0.7:
        return changed_bytes(data, rng)
    numbers = (0, 1, 2, 4, 31, 32, 2**31, 2**32, 2**63, 2**64 - 1)
    shape = tuple(rng.choice(numbers) for _ in range(rng.randint(0, 5)))
    tensor = g.Tensor(
        name=rng.choice(("a", "", "x" * 70)), shape=shape, type_number=rng.randrange(40), offset=rng.choice(numbers)
    )
    key = rng.choice(("general.alignment", "a", ""))
    metadata = [g.entry(key, g.U32, rng.choice(numbers[:8]) % 2**32), g.array_entry("b", g.U64, numbers)]
    return g.gguf(metadata=metadata, tensors=[tensor, g.Tensor(name="b")][: rng.randint(0, 2)])


def run_safetensors(data: bytes) -> str:
    """The JSON of a safetensors file."""
    try:
        found = parse_safetensors_header(data, data_bytes=1 << 12, label="x")
    except InvalidModelFile as error:
        return refused(error)
    end = 8 + len(data) + (1 << 12)
    assert all(8 + len(data) <= one.offset <= one.offset + one.num_bytes <= end for one in found.values())
    return f"taken {len(found) > 1}"


def changed_text(data: bytes, rng: random.Random) -> bytes:
    return changed_bytes(data, rng) if rng.random() < 0.2 else changed_json(data, rng)


def run_tokenizer(data: bytes) -> str:
    """The text of a tokenizer.json, and one text through what was made of it."""
    with tempfile.NamedTemporaryFile(dir="/dev/shm") as file:
        file.write(data)
        file.flush()
        return _tokenizer_outcome(Path(file.name))


def _tokenizer_outcome(path: Path) -> str:
    try:
        tokenizer = TextTokenizer.from_file(path)
        tokenizer.decode(tokenizer.encode("hello")[:8], keep_special=True)
    except InvalidModelFile as error:
        return refused(error)
    return "taken"


def run_ticket(data: bytes) -> str:
    """A ticket; odd first byte: its MAC is made right."""
    body = data[1:]
    if data[:1] and data[0] & 1:
        body = body[:-32] + hmac.digest(KEY, body[:-32], "sha256")
    try:
        ticket = _DESK.open(body, bytes(32))
    except CallerError as error:
        return refused(error)
    assert ticket.expires_at > 1000
    return "taken"


_DESK = TicketDesk([KEY], unix_clock=lambda: 1000.0)
_TICKET = Ticket(request_id="00" * 16, seed=1, sample_index=0, expires_at=2000)
_RIGHT = b"\1\0\0\0\0"


def _caller_seeds() -> list[bytes]:
    every = pb.GenerateRequest(text="a", model="tiny", client_tag="t", logprobs=2, priority=1)
    every.sampling.temperature, every.sampling.top_k, every.sampling.n, every.sampling.seed = 0.5, 4, 2, 7
    every.sampling.logit_bias[3] = 1.0
    every.stop.max_tokens = 4
    every.stop.stop_strings.append("b")
    chat = pb.GenerateRequest(chat=pb.ChatPrompt(messages=[pb.ChatMessage(role="user", content="x")]), json_schema="{}")
    ids = pb.GenerateRequest(tokens=pb.TokenPrompt(ids=[1, 2]), resume=[pb.ResumedSample(ticket=b"t", token_ids=[3])])
    kinds = ([every], [chat], [ids], [every, chat, ids])
    return [pb.GenerateOnceRequest(requests=kind).SerializeToString() for kind in kinds]


def _http_seeds() -> list[bytes]:
    chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}]}], "stream": True, "n": 2}
    chat |= {"temperature": 0.5, "stop": ["a"], "logit_bias": {"5": 1}, "logprobs": True, "top_logprobs": 2}
    plain = {"prompt": ["a", "b"], "max_tokens": 4, "echo": True, "structured_outputs": {"regex": "a+"}}
    return [b"c" + json.dumps(chat).encode(), b"p" + json.dumps(plain).encode()]


def _plan_seeds() -> list[bytes]:
    rich = plans.make_rich_plan(INFO)
    made = [plans.make_idle_plan(info=INFO), plans.make_decode_plan(3, info=INFO), plans.make_mixed_plan(info=INFO)]
    return [_RIGHT + encode_plan(plan) for plan in (*made, rich)]


def _attach_seeds() -> list[bytes]:
    asked = worker_pb2.AttachRequest(epoch=1, term=1, protocol_min=1, protocol_max=1, features=[1, 2])
    return [b"a" + worker_info_to_proto(INFO).SerializeToString(), b"q" + asked.SerializeToString()]


def _header_seeds() -> tuple[list[bytes], list[bytes]]:
    metadata = [g.entry("a", g.STRING, "b"), g.entry("general.alignment", g.U32, 32), g.array_entry("c", 5, [1, -1])]
    gguf = g.gguf(metadata=metadata, tensors=(g.Tensor(name="a"), g.Tensor(name="b", shape=(2, 2))))
    tensors = {
        name: {"dtype": "F32", "shape": [2, 3], "data_offsets": [at, at + 24]} for name, at in (("a", 0), ("b", 24))
    }
    return [gguf], [json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()]


_GGUF, _SAFETENSORS = _header_seeds()
TARGETS = {
    "caller": Target(seeds=_caller_seeds(), change=messages(pb.GenerateOnceRequest), run=run_caller),
    "http": Target(seeds=_http_seeds(), change=changed_http, run=run_http),
    "plan": Target(seeds=_plan_seeds(), change=with_seal(messages(PlanProto)), run=run_plan),
    "result": Target(
        seeds=[_RIGHT + encode_result(made) for made in (make_result(), make_rejected_result())],
        change=with_seal(messages(ResultProto)),
        run=run_result,
    ),
    "attach": Target(seeds=_attach_seeds(), change=changed_attach, run=run_attach),
    "gguf": Target(seeds=_GGUF, change=changed_gguf, run=run_gguf),
    "safetensors": Target(seeds=_SAFETENSORS, change=changed_text, run=run_safetensors),
    "tokenizer": Target(seeds=[byte_level_tokenizer().to_str().encode()], change=changed_text, run=run_tokenizer),
    "ticket": Target(seeds=[b"\1" + _DESK.seal(_TICKET, bytes(32))], change=changed_bytes, run=run_ticket),
}
