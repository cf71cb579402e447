import asyncio
from contextlib import asynccontextmanager

import pytest

from protos.forwardplane.v1.bridge_pb2 import AbortAnswer, AbortOrder, CancelStream, EdgeToCore, SubmitStream
from protos.wire.enums import FinishReason
from protos.wire.errors import QueueFull, UnavailableError
from scheduler_svc.bridge.client import BridgeClient
from scheduler_svc.bridge.frames import frame
from scheduler_svc.bridge.next_tokens import next_tokens_from_message
from scheduler_svc.bridge.outbox import Outbox
from scheduler_svc.bridge.server import BridgeServer
from scheduler_svc.bridge.views import LoadView, ModelView
from scheduler_svc.core.events import RequestFinished, RequestSubmitted, StreamKey, TokensReleased, Usage

LIMIT_S = 30.0


class Listener:
    def __init__(self):
        self.log: list[object] = []
        self.changed = asyncio.Event()
        self.owners: dict[str, int] = {}

    def edge_connected(self, edge):
        self._add(("connected", edge))

    def edge_events(self, events):
        self._add(("events", list(events)))

    def load_wanted(self, edge):
        self._add(("load", edge))

    def edge_of(self, request_id):
        return self.owners.get(request_id)

    def edge_lost(self, edge):
        self._add(("lost", edge))

    def _add(self, entry):
        self.log.append(entry)
        self.changed.set()

    async def until(self, count):
        async with asyncio.timeout(LIMIT_S):
            while len(self.log) < count:
                self.changed.clear()
                await self.changed.wait()
        return self.log


@asynccontextmanager
async def bridge(path):
    listener = Listener()
    server = BridgeServer(path, listener=listener, clock=lambda: 10.0, hello_timeout_s=0.2)
    await server.start()
    try:
        yield server, listener
    finally:
        await server.close()


@asynccontextmanager
async def edge(path, index=0):
    client = BridgeClient(path, edge_index=index)
    await client.connect(timeout_s=LIMIT_S)
    try:
        yield client
    finally:
        await client.close()


def submit(stream_id, prompt_bytes=8):
    return SubmitStream(stream_id=stream_id, request_id="r", prompt_ids=bytes(prompt_bytes), max_tokens=1)


def submit_many(client, count):
    for index in range(count):
        client.submit(submit(index, prompt_bytes=1 << 18))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "core.sock"


async def test_one_turn_of_the_edge_is_one_message(path):
    async with bridge(path) as (_, listener), edge(path) as client:
        client.submit(submit(1))
        client.submit(submit(2))
        client.cancel(CancelStream(stream_id=1))
        client.ask_load()
        connected, (kind, events), load = await listener.until(3)
    assert (connected, kind, load) == (("connected", 1), "events", ("load", 1))
    assert [type(event).__name__ for event in events] == ["RequestSubmitted", "RequestSubmitted", "RequestCancelled"]
    assert [event.spec.stream for event in events if isinstance(event, RequestSubmitted)] == [
        StreamKey(1, 1),
        StreamKey(1, 2),
    ]


async def test_one_step_of_the_core_is_one_message_per_edge(path):
    outbox = Outbox()
    async with bridge(path) as (server, listener), edge(path) as first, edge(path, 1) as second:
        await listener.until(2)
        usage = Usage(prompt_tokens=2, cached_tokens=0, output_tokens=1)
        outbox.add(TokensReleased(stream=StreamKey(1, 7), first_pos=0, token_ids=(5,)))
        outbox.add(TokensReleased(stream=StreamKey(2, 7), first_pos=3, token_ids=(6,)))
        outbox.add(RequestFinished(stream=StreamKey(1, 7), reason=FinishReason.LENGTH, usage=usage))
        outbox.add_model(2, ModelView(serving=True))
        outbox.add_load(2, LoadView(requests_running=4, requests_waiting=0, kv_usage=0.0, workers=()))
        server.send(outbox.take())
        assert outbox.take() == {}
        to_first, to_second = await first.receive(), await second.receive()
    (update,) = to_first.updates
    assert list(next_tokens_from_message(to_first.next_tokens)) == [(7, 0, 5)]
    assert not update.token_ids
    assert update.HasField("finish")
    assert not to_first.HasField("model")
    assert list(next_tokens_from_message(to_second.next_tokens)) == [(7, 3, 6)]
    assert (to_second.model.serving, to_second.load.requests_running) == (True, 4)


async def test_an_abort_goes_to_the_edge_that_has_the_request_and_its_answer_back(path):
    async with bridge(path) as (_, listener), edge(path) as first, edge(path, 1) as second:
        await listener.until(2)
        listener.owners = {"r": 2, "own": 1}
        first.ask_abort(AbortOrder(question=9, request_id="r", caller="c"))
        (order,) = (await second.receive()).aborts
        assert order == AbortOrder(question=9, request_id="r", caller="c", asker=1)
        second.answer_abort(AbortAnswer(question=9, asker=order.asker, found=True))
        assert list((await first.receive()).abort_answers) == [AbortAnswer(question=9, asker=1, found=True)]
        for question, request_id in enumerate(("nobody's", "own")):
            first.ask_abort(AbortOrder(question=question, request_id=request_id, caller="c"))
            answer = AbortAnswer(question=question, asker=1, found=False)
            assert list((await first.receive()).abort_answers) == [answer]


async def test_a_closed_edge_is_lost_and_its_successor_is_another(path):
    async with bridge(path) as (server, listener):
        async with edge(path):
            await listener.until(1)
        assert await listener.until(2) == [("connected", 1), ("lost", 1)]
        async with edge(path):
            assert (await listener.until(3))[2] == ("connected", 2)
            assert server.connections() == [2]


async def test_what_an_edge_submits_before_it_closes_arrives(path):
    async with bridge(path) as (_, listener):
        async with edge(path) as client:
            client.submit(submit(1))
        kinds = [entry[0] for entry in await listener.until(3)]
    assert kinds == ["connected", "events", "lost"]


async def test_the_edge_sees_the_core_end(path):
    async with bridge(path) as (server, listener), edge(path) as client:
        await listener.until(1)
        await server.close()
        assert await client.receive() is None
        with pytest.raises(UnavailableError):
            client.submit(submit(1))
    assert not path.exists()


async def test_an_edge_waits_for_the_core_only_so_long(path):
    client = BridgeClient(path, edge_index=0)
    with pytest.raises(UnavailableError, match="socket"):
        await client.connect(timeout_s=0.02)


async def test_an_edge_that_starts_first_waits_for_the_core(path):
    client = BridgeClient(path, edge_index=0)
    connecting = asyncio.create_task(client.connect(timeout_s=LIMIT_S))
    await asyncio.sleep(0)
    async with bridge(path) as (_, listener):
        await connecting
        await listener.until(1)
        await client.close()


@pytest.mark.parametrize("first", [frame(b"\xff\xff"), frame(EdgeToCore().SerializeToString()), b"", b"\x01"])
async def test_a_connection_without_a_hello_is_closed_and_others_do_not_notice(path, first):
    async with bridge(path) as (_, listener), edge(path) as client:
        await listener.until(1)
        reader, writer = await asyncio.open_unix_connection(str(path))
        writer.write(first)
        async with asyncio.timeout(LIMIT_S):
            assert await reader.read() == b""
        writer.close()
        client.ask_load()
        assert await listener.until(2) == [("connected", 1), ("load", 1)]


async def test_an_edge_that_does_not_read_is_disconnected(path, monkeypatch):
    monkeypatch.setattr("scheduler_svc.bridge.server.MAX_BRIDGE_MESSAGE_BYTES", 1 << 20)
    async with bridge(path) as (server, listener), edge(path):
        await listener.until(1)
        for _ in range(8):
            outbox = Outbox()
            outbox.add(TokensReleased(stream=StreamKey(1, 1), first_pos=0, token_ids=(1,) * 100_000))
            server.send(outbox.take())
        assert (await listener.until(2))[1] == ("lost", 1)


async def test_a_core_that_does_not_read_refuses_new_requests(path, monkeypatch):
    monkeypatch.setattr("scheduler_svc.bridge.client.MAX_BRIDGE_MESSAGE_BYTES", 1 << 20)
    monkeypatch.setattr("scheduler_svc.bridge.client._BATCH_BYTES", 1 << 18)
    release = asyncio.Event()

    async def never_reads(reader, writer):
        await release.wait()
        writer.close()

    server = await asyncio.start_unix_server(never_reads, str(path))
    async with server, edge(path) as client:
        with pytest.raises(QueueFull, match="not reading"):
            submit_many(client, 20)
        client.cancel(CancelStream(stream_id=1))
        release.set()


async def test_cancelling_waits_until_every_edge_is_gone(path):
    async with bridge(path) as (server, listener):
        async with edge(path):
            await listener.until(1)
            waiting = asyncio.create_task(server.edges_gone(timeout_s=LIMIT_S))
            await asyncio.sleep(0.01)
            assert not waiting.done()
        await waiting
