"""A whole edge in the test's own event loop: real gRPC on loopback, a real Unix socket, a made-up core."""

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import grpc
from prometheus_client import CollectorRegistry

from protos.forwardplane.v1.bridge_pb2 import CoreModel
from protos.forwardplane.v1.generate_pb2_grpc import GenerationServiceStub
from protos.service.channel import caller_channel
from protos.service.model_files import GenerationDefaults, ModelCard
from protos.service.revoked_peers import NOBODY_REVOKED, RevokedPeers
from protos.service.tracing import Tracing
from protos.wire.enums import HiddenMode
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.edge.admission import Admission
from scheduler_svc.edge.call_traces import CallTraces
from scheduler_svc.edge.caller_door import CallerDoor, KnownCallers
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.edge_parts import EdgeParts
from scheduler_svc.edge.edge_server import EdgeAddress, EdgeServer
from scheduler_svc.edge.http_front.http_server import HttpAddress, HttpLimits, HttpServer
from scheduler_svc.edge.metrics import create_edge_metrics
from scheduler_svc.edge.model_facts import model_facts
from scheduler_svc.edge.prompt_encoder import PromptEncoder
from scheduler_svc.edge.resume_tickets import TicketDesk
from scheduler_svc.edge.resuming import ResumeDesk
from scheduler_svc.edge.slow_readers import DEFAULT_LIMITS, ReaderLimits
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.tokenizer import TextTokenizer
from tests.support.fake_core import FakeCore
from tests.support.real_core import RealCore
from tests.support.tiny_tokenizer import EOS, text_tokenizer

EVERYBODY = KnownCallers()
CHATML = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def tiny_card(eos_id: int, **changes: object) -> ModelCard:
    return ModelCard(
        **{
            "name": "tiny",
            "architecture": "llama",
            "context_tokens": 128,
            "vocab_size": 280,
            "eos_token_ids": (eos_id,),
            "generation": GenerationDefaults(temperature=0.7, top_p=0.9),
            "weights_fingerprint": "",
            "tokenizer_fingerprint": "",
            **changes,
        }
    )


@dataclass
class Edge:
    core: FakeCore | RealCore
    link: CoreLink
    server: EdgeServer
    http: HttpServer
    registry: CollectorRegistry
    channel: grpc.aio.Channel
    stub: GenerationServiceStub
    eos_id: int

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value("forwardplane_scheduler_" + name, labels) or 0.0


@contextlib.asynccontextmanager
async def running_edge(
    folder: Path,
    *,
    template: str | None = None,
    max_streams: int = 1024,
    grammars: GrammarChecker | None = None,
    http_limits: dict[str, float] | None = None,
    max_hidden_mode: HiddenMode = HiddenMode.NULL,
    reader_limits: ReaderLimits = DEFAULT_LIMITS,
    real_core: RealCore | None = None,
    tickets: TicketDesk | None = None,
    known: KnownCallers = EVERYBODY,
    credentials: grpc.ServerCredentials | None = None,
    http_tls: ssl.SSLContext | None = None,
    revoked: RevokedPeers = NOBODY_REVOKED,
    first_token_id: int | None = None,
    tracing: Tracing | None = None,
    **core_options: object,
) -> AsyncIterator[Edge]:
    """Everything up and serving; all of it gone afterwards. The HTTP front listens when it is given limits."""
    core = real_core or FakeCore(folder / "core.sock", **core_options)
    await core.start()
    tokenizer = text_tokenizer(folder)
    eos_id = tokenizer.encode(EOS)[0]
    chat = None if template is None else ChatTemplate(template, special_tokens={}, render_timeout_s=0.5)
    encoder = PromptEncoder(tokenizer, template=chat, first_token_id=first_token_id, grammars=grammars)
    bridge = BridgeClient(core.path, edge_index=0)
    await bridge.connect(timeout_s=30)
    begin = {} if first_token_id is None else {"add_bos": True, "bos_token_id": first_token_id}
    card = tiny_card(eos_id, context_tokens=core.model.context_tokens, **begin)
    facts = model_facts(card, CoreModel(), has_chat_template=chat is not None)
    link = CoreLink(bridge, facts, max_streams=max_streams, reader_limits=reader_limits)
    registry = CollectorRegistry()
    resuming = ResumeDesk(tickets)
    admission = Admission(link, tokenizer, encoder, resuming=resuming, max_hidden_mode=max_hidden_mode)
    traces = CallTraces(tracing, model=card.name)
    parts = _parts(link, admission, tokenizer, encoder, registry, known=known, traces=traces)
    address = EdgeAddress(host="127.0.0.1", port=0, health_port=0, credentials=credentials, revoked=revoked)
    server = EdgeServer(parts, address, max_streams=max_streams)
    front = HttpAddress(host="127.0.0.1", port=0, tls=http_tls, kept_out=revoked.kept_out)
    http = HttpServer(parts, front, HttpLimits(**(http_limits or {})))
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(core.stop)
        stack.push_async_callback(bridge.close)
        stack.callback(encoder.close)
        if chat is not None:
            await chat.start()
            stack.push_async_callback(chat.close)
        link.start(on_gone=lambda: None)
        stack.push_async_callback(link.stop)
        if http_limits is not None:
            await http.start()
            stack.push_async_callback(http.stop)
        await server.start()
        stack.push_async_callback(server.stop)
        channel = caller_channel(f"127.0.0.1:{server.port}")
        stack.push_async_callback(channel.close)
        while link.facts.is_serving != core.model.serving:
            await asyncio.sleep(0.001)
        yield Edge(core, link, server, http, registry, channel, GenerationServiceStub(channel), eos_id)


def _parts(
    link: CoreLink,
    admission: Admission,
    tokenizer: TextTokenizer,
    encoder: PromptEncoder,
    registry: CollectorRegistry,
    *,
    known: KnownCallers,
    traces: CallTraces,
) -> EdgeParts:
    metrics = create_edge_metrics(registry)
    return EdgeParts(
        link=link,
        admission=admission,
        tokenizer=tokenizer,
        encoder=encoder,
        metrics=metrics,
        door=CallerDoor(metrics, link.quotas, known),
        traces=traces,
        version="1",
    )
