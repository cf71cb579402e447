"""A core that speaks the bridge over a real Unix socket and makes tokens up, one a stream and step.

It keeps what it was asked and told, so that tests can look. Its tokens are a function of the prompt and the position.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import (
    AbortAnswer,
    CancelStream,
    CoreModel,
    CoreToEdge,
    EdgeToCore,
    PromptAnswer,
    StateUse,
    StreamError,
    SubmitStream,
)
from protos.forwardplane.v1.generate_pb2 import FlushCacheReply, GetLoadReply, HiddenStates
from protos.forwardplane.v1.sampling_pb2 import FinishReason, TokenLogprob, TopLogprob
from scheduler_svc.bridge.frames import frame, read_body

Script = Callable[[SubmitStream], Sequence[int]]


def letters(submit: SubmitStream) -> Sequence[int]:
    """Small letters, from the one that the prompt's sum chooses, for ever (the ids of the tiny tokenizers)."""
    first = int(np.frombuffer(submit.prompt_ids, "<i4").sum())
    return [97 + (first + index) % 26 for index in range(submit.max_tokens)]


@dataclass
class FakeStream:
    submit: SubmitStream
    ids: Sequence[int]
    deadline: float
    sent: int = 0


@dataclass
class FakeCore:
    """Started on a socket path, stopped at the end of the test."""

    path: Path
    script: Script = letters
    step_s: float = 0.001
    ids_per_step: int = 1
    refuse: StreamError | None = None
    is_silent: bool = False
    """Takes requests and says nothing."""
    model: CoreModel = field(
        default_factory=lambda: CoreModel(
            context_tokens=128,
            logits_width=300,
            dtype="float32",
            numerics="reproducible",
            max_logprobs=20,
            serving=True,
        )
    )
    submits: list[SubmitStream] = field(default_factory=list)
    cancels: list[CancelStream] = field(default_factory=list)
    streams: dict[int, FakeStream] = field(default_factory=dict)

    async def start(self) -> None:
        self._writer: asyncio.StreamWriter | None = None
        self._serving: asyncio.Task | None = None
        self._stepping: asyncio.Task | None = None
        self._server = await asyncio.start_unix_server(self._serve, str(self.path))

    async def stop(self) -> None:
        self._server.close()
        self.hang_up()
        if self._serving is not None and self._stepping is not None:
            await self._serving
            self._stepping.cancel()
            await asyncio.wait({self._stepping})

    def hang_up(self) -> None:
        """As a core that dies."""
        if self._writer is not None:
            self._writer.close()

    def set_serving(self, *, is_serving: bool) -> None:
        self.model.serving = is_serving
        self.send(CoreToEdge(model=self.model))

    def send(self, message: CoreToEdge) -> None:
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(frame(message.SerializeToString()))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._serving = asyncio.current_task()
        self._stepping = asyncio.create_task(self._step_for_ever())
        self.send(CoreToEdge(model=self.model))
        with contextlib.suppress(ConnectionError):
            while (body := await read_body(reader)) is not None:
                self._take(EdgeToCore.FromString(body))
        writer.close()

    def _take(self, message: EdgeToCore) -> None:
        for submit in message.submits:
            self.submits.append(submit)
            if self.refuse is not None:
                reply = CoreToEdge()
                reply.updates.add(stream_id=submit.stream_id, error=self.refuse)
                self.send(reply)
                continue
            deadline = time.monotonic() + submit.deadline_ms / 1000
            self.streams[submit.stream_id] = FakeStream(submit, self.script(submit), deadline)
        for cancel in message.cancels:
            self.cancels.append(cancel)
            self.streams.pop(cancel.stream_id, None)
        for order in message.aborts:
            self.send(CoreToEdge(abort_answers=[AbortAnswer(question=order.question, found=False)]))
        if message.want_flush and not self.is_silent:
            self.send(CoreToEdge(flushed=FlushCacheReply(freed_pages=7)))
        if message.want_load and not self.is_silent:
            self.send(CoreToEdge(load=GetLoadReply(requests_running=len(self.streams), kv_usage=0.25)))

    async def _step_for_ever(self) -> None:
        due = time.monotonic()
        while True:
            due = max(due + self.step_s, time.monotonic() - self.step_s)
            await asyncio.sleep(due - time.monotonic())
            if self.streams and not self.is_silent:
                self.send(self.step())

    def step(self) -> CoreToEdge:
        """One token more for every stream, and the end of those that have enough."""
        message = CoreToEdge()
        for stream_id, stream in list(self.streams.items()):
            submit = stream.submit
            update = message.updates.add(stream_id=stream_id, first_pos=stream.sent)
            if submit.HasField("prompt_wants") and not stream.sent:
                update.prompt.CopyFrom(prompt_answer(submit))
            if not submit.max_tokens:
                update.finish.reason = FinishReason.FINISH_REASON_LENGTH
                update.usage.prompt_tokens = len(submit.prompt_ids) // 4
                del self.streams[stream_id]
                continue
            new = list(stream.ids[stream.sent : stream.sent + self.ids_per_step])
            stops = set(np.frombuffer(submit.stop_token_ids, "<u4").tolist())
            stop_at = next((index for index, token_id in enumerate(new) if token_id in stops), None)
            if stop_at is not None:
                new = new[: stop_at + 1]
                update.finish.reason = FinishReason.FINISH_REASON_STOP
                update.finish.stop_token_id = new[-1]
            stream.sent += len(new)
            update.token_ids = np.asarray(new, "<i4").tobytes()
            if submit.output_logprobs:
                top = [TopLogprob(token_id=index, logprob=-1.0 - index) for index in range(submit.top_logprobs)]
                update.logprobs.extend(TokenLogprob(token_id=token_id, logprob=-0.5, top=top) for token_id in new)
            if stop_at is None and time.monotonic() >= stream.deadline:
                update.finish.reason = FinishReason.FINISH_REASON_DEADLINE
            elif stop_at is None and stream.sent >= min(submit.max_tokens, len(stream.ids)):
                update.finish.reason = FinishReason.FINISH_REASON_LENGTH
            if update.HasField("finish"):
                update.usage.prompt_tokens = len(submit.prompt_ids) // 4
                update.usage.cached_tokens = 1
                update.usage.output_tokens = stream.sent
                del self.streams[stream_id]
        return message


def prompt_answer(submit: SubmitStream) -> PromptAnswer:
    """Log-probability of position p is -p; a state is (3 + first id, 4)."""
    wants, ids = submit.prompt_wants, np.frombuffer(submit.prompt_ids, "<i4")
    answer = PromptAnswer()
    if wants.HasField("logprobs_from"):
        positions = np.arange(wants.logprobs_from, len(ids))
        best = np.tile(np.arange(wants.top_logprobs, dtype="<i4"), (len(positions), 1))
        answer.logprobs.first_pos = wants.logprobs_from
        answer.logprobs.token_ids = ids[positions].tobytes()
        answer.logprobs.values = (-positions).astype("<f4").tobytes()
        answer.logprobs.top = wants.top_logprobs
        answer.logprobs.top_ids = best.tobytes()
        answer.logprobs.top_values = (-1.0 - best).astype("<f4").tobytes()
    if wants.states:
        count = len(ids) if wants.states == StateUse.STATE_USE_FULL else 1
        states = np.tile(np.array([3 + ids[0], 4], "<f4"), (count, 1))
        answer.states.MergeFrom(HiddenStates(dtype="float32", hidden_size=2, states=states.tobytes()))
    return answer
