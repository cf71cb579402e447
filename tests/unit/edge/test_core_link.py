import asyncio
from pathlib import Path

import numpy as np
import pytest

from protos.forwardplane.v1.bridge_pb2 import (
    AbortAnswer,
    AbortOrder,
    CancelStream,
    CoreModel,
    CoreToEdge,
    PauseStream,
    SubmitStream,
)
from protos.forwardplane.v1.generate_pb2 import FlushCacheReply
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason
from protos.wire.errors import CapacityError, DataFault, QueueFull, UnavailableError, UnknownRequest
from scheduler_svc.bridge.next_tokens import next_tokens_to_message
from scheduler_svc.edge.caller_identity import ANONYMOUS, CallerIdentity
from scheduler_svc.edge.caller_stream import CallerStream, StreamNames
from scheduler_svc.edge.core_link import CoreLink
from scheduler_svc.edge.model_facts import model_facts
from scheduler_svc.edge.slow_readers import DEFAULT_LIMITS, ReaderLimits
from scheduler_svc.text.stream_text import StreamText
from tests.support.edge_harness import tiny_card
from tests.support.tiny_tokenizer import text_tokenizer

ABORT, STOP = FinishReason.FINISH_REASON_ABORT, FinishReason.FINISH_REASON_STOP


class Connection:
    """The bridge's client without a socket: what is sent is kept, what arrives is put in."""

    def __init__(self) -> None:
        self.submits: list[SubmitStream] = []
        self.cancels: list[CancelStream] = []
        self.pauses: list[tuple[int, bool]] = []
        self.abort_orders: list[AbortOrder] = []
        self.abort_answers: list[AbortAnswer] = []
        self.load_questions = 0
        self.flush_questions = 0
        self.arriving: asyncio.Queue[CoreToEdge | DataFault | None] = asyncio.Queue()

    def submit(self, submit: SubmitStream) -> None:
        self.submits.append(submit)

    def cancel(self, cancel: CancelStream) -> None:
        self.cancels.append(cancel)

    def pause(self, pause: PauseStream) -> None:
        self.pauses.append((pause.stream_id, pause.paused))

    def ask_load(self) -> None:
        self.load_questions += 1

    def ask_flush(self) -> None:
        self.flush_questions += 1

    def ask_abort(self, order: AbortOrder) -> None:
        self.abort_orders.append(order)

    def answer_abort(self, answer: AbortAnswer) -> None:
        self.abort_answers.append(answer)

    async def receive(self) -> CoreToEdge | None:
        message = await self.arriving.get()
        if isinstance(message, DataFault):
            raise message
        return message


class Rig:
    def __init__(self, folder: Path, max_streams: int = 10, limits: ReaderLimits = DEFAULT_LIMITS) -> None:
        self.tokenizer = text_tokenizer(folder)
        self.connection = Connection()
        facts = model_facts(tiny_card(2), CoreModel(), has_chat_template=False)
        self.link = CoreLink(self.connection, facts, max_streams=max_streams, reader_limits=limits)
        self.gone = 0

    async def __aenter__(self) -> "Rig":
        self.link.start(on_gone=self._count)
        return self

    async def __aexit__(self, *_) -> None:
        await self.link.stop()

    def _count(self) -> None:
        self.gone += 1

    def open(self, *, stops=(), caller: CallerIdentity = ANONYMOUS, max_held_ids: int | None = 100) -> CallerStream:
        stream_id = self.link.new_stream_id()
        names = StreamNames(
            request_id=f"r{stream_id}", stream_id=stream_id, caller=caller, client_tag="", prompt_tokens=1, seed=1
        )
        stream = CallerStream(
            names, StreamText(self.tokenizer.decoder(keep_special=False), stop_strings=stops), max_held_ids=max_held_ids
        )
        self.link.open(stream, SubmitStream(stream_id=stream_id))
        return stream

    async def say(self, message: CoreToEdge | DataFault | None) -> None:
        self.connection.arriving.put_nowait(message)
        for _ in range(5):
            await asyncio.sleep(0)


def tokens(stream: CallerStream, ids: bytes, **fields: object) -> CoreToEdge:
    message = CoreToEdge()
    message.updates.add(stream_id=stream.names.stream_id, token_ids=np.array(list(ids), "<i4").tobytes(), **fields)
    return message


def next_tokens(*tokens: tuple[CallerStream, int, str]) -> CoreToEdge:
    columns = [(stream.names.stream_id, position, ord(letter)) for stream, position, letter in tokens]
    return CoreToEdge(next_tokens=next_tokens_to_message(columns))


async def test_next_tokens_reach_their_streams_in_order_before_what_else_is_said(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        first, second = rig.open(), rig.open()
        message = next_tokens((first, 0, "a"), (second, 0, "x"), (first, 1, "b"))
        message.updates.add(stream_id=first.names.stream_id, finish=Finish(reason=FinishReason.FINISH_REASON_LENGTH))
        await rig.say(message)
        last = await first.next_chunk()
        assert (last.text, last.HasField("finish")) == ("ab", True)
        assert (await second.next_chunk()).text == "x"
        assert rig.link.num_streams == 1
        await rig.say(next_tokens((first, 2, "c"), (second, 1, "y")))  # the first is over
        assert (await second.next_chunk()).text == "y"


async def test_a_stop_string_in_a_next_token_cancels_the_stream_in_the_core(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open(stops=["."])
        await rig.say(next_tokens((stream, 0, "a"), (stream, 1, "."), (stream, 2, "b")))
        assert (await stream.next_chunk()).text == "a"
        assert [cancel.stream_id for cancel in rig.connection.cancels] == [stream.names.stream_id]
        assert rig.link.num_streams == 0


async def test_a_next_token_of_another_position_ends_its_stream_alone(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        first, second = rig.open(), rig.open()
        await rig.say(next_tokens((first, 1, "a"), (second, 0, "x")))
        assert first.error is not None
        assert first.error.field == "first_pos"
        assert (await second.next_chunk()).text == "x"


async def test_updates_reach_their_stream_and_unknown_ones_nobody(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        first, second = rig.open(), rig.open()
        message = tokens(second, b"xy")
        message.updates.add(stream_id=99, token_ids=b"\x00\x00\x00\x00")
        await rig.say(message)
        assert (await second.next_chunk()).text == "xy"
        assert first.usage.output_tokens == 0


async def test_a_finished_stream_is_forgotten_and_not_cancelled(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open()
        await rig.say(tokens(stream, b"a", finish=Finish(reason=FinishReason.FINISH_REASON_LENGTH)))
        assert rig.link.num_streams == 0
        rig.link.end(stream, ABORT)
        assert rig.connection.cancels == []


async def test_a_stop_string_is_told_to_the_core_once(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open(stops=["b"])
        await rig.say(tokens(stream, b"ab"))
        await rig.say(tokens(stream, b"cd", first_pos=2))
        assert rig.connection.cancels == [CancelStream(stream_id=1, reason=STOP)]
        assert stream.usage.output_tokens == 2


async def test_a_stop_string_in_the_finishing_update_is_not(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open(stops=["b"])
        await rig.say(tokens(stream, b"ab", finish=Finish(reason=FinishReason.FINISH_REASON_LENGTH)))
        assert stream.finish.stop_string == "b"
        assert rig.connection.cancels == []


async def test_a_stream_that_fails_here_is_cancelled_there(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open()
        await rig.say(tokens(stream, b"a", first_pos=5))
        assert stream.error is not None
        assert rig.connection.cancels == [CancelStream(stream_id=1, reason=ABORT)]


async def test_abort_needs_the_callers_own_request(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open(caller=CallerIdentity("alice"))
        with pytest.raises(UnknownRequest):
            await rig.link.abort("r1", ANONYMOUS)
        assert not stream.is_over
        await rig.link.abort("r1", CallerIdentity("alice"))
        assert stream.finish.reason == ABORT
        assert rig.connection.cancels == [CancelStream(stream_id=1, reason=ABORT)]
        assert rig.connection.abort_orders == []


async def test_an_abort_of_what_is_not_here_is_asked_of_the_others(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        asked = [asyncio.create_task(rig.link.abort(name, CallerIdentity("alice"))) for name in ("r8", "r9")]
        await asyncio.sleep(0)
        orders = rig.connection.abort_orders
        assert orders == [
            AbortOrder(question=1, request_id="r8", caller="alice"),
            AbortOrder(question=2, request_id="r9", caller="alice"),
        ]
        answers = [AbortAnswer(question=2, found=False), AbortAnswer(question=1, found=True), AbortAnswer(question=7)]
        await rig.say(CoreToEdge(abort_answers=answers))
        assert await asked[0] is None
        with pytest.raises(UnknownRequest):
            await asked[1]
        late = asyncio.create_task(rig.link.abort("r7", ANONYMOUS))
        await asyncio.sleep(0)
        await rig.say(None)
        with pytest.raises(UnavailableError):
            await late


async def test_an_order_of_another_edge_ends_the_callers_own_request_only(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open(caller=CallerIdentity("alice"))
        orders = [
            AbortOrder(question=5, request_id="r1", caller="bob", asker=2),
            AbortOrder(question=6, request_id="r3", caller="alice", asker=2),
            AbortOrder(question=7, request_id="r1", caller="alice", asker=3),
        ]
        await rig.say(CoreToEdge(aborts=orders[:2]))
        assert not stream.is_over
        await rig.say(CoreToEdge(aborts=orders[2:]))
        assert stream.finish.reason == ABORT
        assert rig.connection.abort_answers == [
            AbortAnswer(question=5, asker=2, found=False),
            AbortAnswer(question=6, asker=2, found=False),
            AbortAnswer(question=7, asker=3, found=True),
        ]


async def test_streams_are_bounded(tmp_path: Path) -> None:
    async with Rig(tmp_path, max_streams=2) as rig:
        first, _ = rig.open(), rig.open()
        with pytest.raises(QueueFull, match="2 streams"):
            rig.open()
        assert len(rig.connection.submits) == 2
        rig.link.end(first, ABORT)
        rig.open()


@pytest.mark.parametrize("last_word", [None, DataFault("broken")])
async def test_when_the_core_is_gone_everything_ends(tmp_path: Path, last_word: DataFault | None) -> None:
    async with Rig(tmp_path) as rig:
        stream = rig.open()
        load = asyncio.create_task(rig.link.questions.load())
        await asyncio.sleep(0)
        await rig.say(last_word)
        assert isinstance(stream.error, UnavailableError)
        with pytest.raises(UnavailableError):
            await load
        with pytest.raises(UnavailableError):
            rig.open()
        assert (rig.gone, rig.link.num_streams) == (1, 0)


async def test_one_question_answers_all_who_ask_for_the_load(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        asking = [asyncio.create_task(rig.link.questions.load()) for _ in range(3)]
        left = asyncio.create_task(rig.link.questions.load())
        await asyncio.sleep(0)
        left.cancel()
        message = CoreToEdge()
        message.load.requests_running = 4
        await rig.say(message)
        assert [reply.requests_running for reply in await asyncio.gather(*asking)] == [4, 4, 4]
        assert rig.connection.load_questions == 1


async def test_facts_follow_the_core(tmp_path: Path) -> None:
    heard = []
    async with Rig(tmp_path) as rig:
        rig.link.on_facts(heard.append)
        await rig.say(CoreToEdge(model=CoreModel(context_tokens=64, logits_width=300, serving=True)))
        await rig.say(CoreToEdge(model=CoreModel(context_tokens=1 << 20, logits_width=300)))
        assert [(facts.context_tokens, facts.is_serving) for facts in heard] == [(64, True), (128, False)]
        assert rig.link.facts is heard[-1]


async def test_a_flush_is_answered_and_fails_without_a_core(tmp_path: Path) -> None:
    async with Rig(tmp_path) as rig:
        asking = asyncio.create_task(rig.link.questions.flush_cache())
        later = asyncio.create_task(rig.link.questions.flush_cache())
        await asyncio.sleep(0)
        message = CoreToEdge(flushed=FlushCacheReply(freed_pages=0))
        await rig.say(message)
        assert (await asking).freed_pages == 0
        assert not later.done(), "a flush is not answered by an earlier one"
        await rig.say(CoreToEdge(flushed=FlushCacheReply(freed_pages=3)))
        assert (await later).freed_pages == 3
        assert (rig.connection.flush_questions, rig.connection.load_questions) == (2, 0)
        await rig.say(None)
        with pytest.raises(UnavailableError):
            await rig.link.questions.flush_cache()


async def test_a_reader_who_falls_behind_is_paused_until_it_has_caught_up(tmp_path: Path) -> None:
    async with Rig(tmp_path, limits=ReaderLimits(pause_ids=4, resume_ids=1, paused_s=60)) as rig:
        stream = rig.open()
        await rig.say(tokens(stream, b"abc"))
        assert rig.connection.pauses == []
        await rig.say(tokens(stream, b"de", first_pos=3))
        await rig.say(tokens(stream, b"f", first_pos=5))
        assert rig.connection.pauses == [(1, True)]
        assert (await stream.next_chunk()).text == "abcdef"
        assert rig.connection.pauses == [(1, True), (1, False)]
        await rig.say(tokens(stream, b"ghij", first_pos=6))
        rig.link.end(stream, ABORT)
        assert rig.connection.pauses[2:] == [(1, True)]


async def test_a_reader_who_stays_behind_is_ended(tmp_path: Path) -> None:
    async with Rig(tmp_path, limits=ReaderLimits(pause_ids=4, resume_ids=1, paused_s=0.01)) as rig:
        stream = rig.open()
        await rig.say(tokens(stream, b"abcd"))
        await asyncio.sleep(0.05)
        assert isinstance(stream.error, CapacityError)
        assert "4 tokens have waited for 0.01 s" in stream.error.message
        assert [(cancel.stream_id, cancel.reason) for cancel in rig.connection.cancels] == [(1, ABORT)]
        assert rig.link.num_streams == 0


async def test_one_who_takes_everything_at_the_end_is_never_behind(tmp_path: Path) -> None:
    async with Rig(tmp_path, limits=ReaderLimits(pause_ids=2)) as rig:
        stream = rig.open(max_held_ids=None)
        await rig.say(tokens(stream, b"abcd"))
        assert rig.connection.pauses == []
