import asyncio
import math
from pathlib import Path

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import StreamUpdate
from protos.forwardplane.v1.sampling_pb2 import Finish, FinishReason, Usage
from protos.wire.errors import CapacityError, DeadlinePassed, InternalFault, QueueFull, RequestAborted
from scheduler_svc.edge.caller_identity import ANONYMOUS
from scheduler_svc.edge.caller_stream import CallerStream, StreamNames
from scheduler_svc.text.stream_text import StreamText
from tests.support.tiny_tokenizer import text_tokenizer

LENGTH = Finish(reason=FinishReason.FINISH_REASON_LENGTH)


def stream(folder: Path, *, stops=(), **options) -> CallerStream:
    names = StreamNames(
        request_id="r1", stream_id=1, caller=ANONYMOUS, client_tag="tag", prompt_tokens=4, seed=2**63 + 1
    )
    text = StreamText(text_tokenizer(folder).decoder(keep_special=False), stop_strings=stops)
    return CallerStream(names, text, **options)


def update(first_pos: int, ids: bytes, **fields: object) -> StreamUpdate:
    return StreamUpdate(first_pos=first_pos, token_ids=np.array(list(ids), "<i4").tobytes(), **fields)


async def soon(waiting: asyncio.Task) -> bool:
    for _ in range(3):
        await asyncio.sleep(0)
    return waiting.done()


async def test_a_chunk_carries_everything_since_the_last(tmp_path: Path) -> None:
    running = stream(tmp_path)
    running.update(update(0, b"a"))
    running.update(update(1, b"bc"))
    chunk = await running.next_chunk()
    assert (chunk.request_id, chunk.client_tag) == ("r1", "tag")
    assert (chunk.first_pos, list(chunk.token_ids), chunk.text, chunk.text_offset) == (0, [97, 98, 99], "abc", 0)
    running.update(update(3, b"d", finish=LENGTH, usage=Usage(cached_tokens=2)))
    chunk = await running.next_chunk()
    assert (chunk.request_id, chunk.client_tag) == ("", "")
    assert (chunk.first_pos, chunk.text, chunk.text_offset) == (3, "d", 3)
    assert chunk.finish == LENGTH
    assert (chunk.usage.prompt_tokens, chunk.usage.cached_tokens, chunk.usage.output_tokens) == (4, 2, 4)
    assert chunk.seed == 2**63 + 1
    assert await running.next_chunk() is None
    assert running.error is None


async def test_waits_for_something_to_give(tmp_path: Path) -> None:
    running = stream(tmp_path)
    waiting = asyncio.create_task(running.next_chunk())
    running.update(update(0, "é".encode()[:1]))
    assert not await soon(waiting)
    running.update(update(1, "é".encode()[1:]))
    assert (await waiting).text == "é"


async def test_pacing_holds_chunks_but_not_the_last(tmp_path: Path) -> None:
    running = stream(tmp_path)
    loop = asyncio.get_running_loop()
    running.update(update(0, b"a"))
    running.pace(loop.time() + 0.03)
    began = loop.time()
    waiting = asyncio.create_task(running.next_chunk())
    running.update(update(1, b"b"))
    assert not await soon(waiting)
    assert (await waiting).text == "ab"
    assert loop.time() - began > 0.02

    running.pace(math.inf)
    running.update(update(2, b"c"))
    waiting = asyncio.create_task(running.next_chunk())
    assert not await soon(waiting)
    running.update(update(3, b"d", finish=LENGTH))
    assert (await waiting).text == "cd"


async def test_a_stop_string_beats_a_finish_at_the_same_token_and_later(tmp_path: Path) -> None:
    running = stream(tmp_path, stops=["bc"])
    running.update(update(0, b"abcdef", finish=LENGTH))
    chunk = await running.next_chunk()
    assert (list(chunk.token_ids), chunk.text) == ([97, 98, 99], "a")
    assert (chunk.finish.reason, chunk.finish.stop_string) == (FinishReason.FINISH_REASON_STOP, "bc")
    assert chunk.usage.output_tokens == 3


async def test_held_text_leaves_with_the_finish(tmp_path: Path) -> None:
    running = stream(tmp_path, stops=["bcd"])
    running.update(update(0, b"abc"))
    assert (await running.next_chunk()).text == "a"
    running.update(update(3, b"", finish=LENGTH))
    assert (await running.next_chunk()).text == "bc"


async def test_ends_that_are_not_the_models_have_a_status_too(tmp_path: Path) -> None:
    for reason, error_class in [
        (FinishReason.FINISH_REASON_ABORT, RequestAborted),
        (FinishReason.FINISH_REASON_DEADLINE, DeadlinePassed),
        (FinishReason.FINISH_REASON_ERROR, InternalFault),
    ]:
        running = stream(tmp_path)
        running.update(update(0, b"a"))
        running.end(Finish(reason=reason))
        chunk = await running.next_chunk()
        assert (chunk.text, chunk.finish.reason) == ("a", reason)
        assert isinstance(running.error, error_class)


async def test_a_failure_comes_after_what_was_released(tmp_path: Path) -> None:
    running = stream(tmp_path)
    running.update(update(0, b"a"))
    failed = StreamUpdate()
    failed.error.reason = "QUEUE_FULL"
    failed.error.retry_after_ms = 9
    running.update(failed)
    chunk = await running.next_chunk()
    assert chunk.text == "a"
    assert not chunk.HasField("finish")
    assert await running.next_chunk() is None
    assert isinstance(running.error, QueueFull)
    assert running.error.retry_after_ms == 9


async def test_the_first_end_stands(tmp_path: Path) -> None:
    running = stream(tmp_path)
    running.end(LENGTH)
    running.end(Finish(reason=FinishReason.FINISH_REASON_ABORT))
    running.fail(InternalFault("late"))
    running.update(update(0, b"a"))
    chunk = await running.next_chunk()
    assert chunk.finish == LENGTH
    assert running.error is None
    assert running.usage.output_tokens == 0


async def test_a_gap_is_a_fault_and_not_wrong_text(tmp_path: Path) -> None:
    running = stream(tmp_path)
    running.update(update(0, b"a"))
    running.update(update(2, b"c"))
    assert (await running.next_chunk()).text == "a"
    assert await running.next_chunk() is None
    assert isinstance(running.error, InternalFault)
    assert "position 2; expected 1" in running.error.message


async def test_what_waits_for_a_slow_reader_is_bounded(tmp_path: Path) -> None:
    running = stream(tmp_path, max_held_ids=10)
    running.update(update(0, b"a" * 10))
    assert not running.is_over
    running.update(update(10, b"a"))
    assert isinstance(running.error, CapacityError)
    assert "11 tokens wait, the limit is 10" in running.error.message
