"""Collects what one core step has for the edges: at most one message per edge, one update per stream.

Made and flushed by the loop. Knows nothing of sockets.
"""

from typing import TypeAlias

from protos.forwardplane.v1.bridge_pb2 import CoreToEdge, StreamUpdate
from scheduler_svc.bridge.convert import (
    add_finish,
    add_tokens,
    error_to_message,
    flushed_to_message,
    load_to_message,
    model_to_message,
)
from scheduler_svc.bridge.convert_prompts import prompt_to_message
from scheduler_svc.bridge.next_tokens import NextToken, next_tokens_to_message
from scheduler_svc.bridge.views import LoadView, ModelView
from scheduler_svc.core.events import (
    CacheFlushed,
    PromptAnswered,
    RequestFinished,
    RequestRefused,
    StreamKey,
    TokensReleased,
)

# One message for each connection.
Messages: TypeAlias = dict[int, CoreToEdge]


class Outbox:
    """Messages under construction, by connection."""

    def __init__(self) -> None:
        self._messages: Messages = {}
        self._updates: dict[StreamKey, StreamUpdate] = {}
        self._next_tokens: dict[int, list[NextToken]] = {}
        """By connection."""

    def add(
        self, instruction: PromptAnswered | TokensReleased | RequestFinished | RequestRefused | CacheFlushed
    ) -> None:
        """Add what the core says of one stream, or answers."""
        if isinstance(instruction, TokensReleased):
            self._add_tokens(instruction)
            return
        if isinstance(instruction, CacheFlushed):
            self._message(instruction.edge).flushed.CopyFrom(flushed_to_message(instruction))
            return
        update = self._update(instruction.stream)
        match instruction:
            case PromptAnswered():
                update.prompt.CopyFrom(prompt_to_message(instruction))
            case RequestFinished():
                add_finish(update, instruction)
            case RequestRefused():
                update.error.CopyFrom(error_to_message(instruction.error))

    def add_load(self, edge: int, view: LoadView) -> None:
        """Add the answer to a load question."""
        self._message(edge).load.CopyFrom(load_to_message(view))

    def add_model(self, edge: int, view: ModelView) -> None:
        """Add what the attached workers can do."""
        self._message(edge).model.CopyFrom(model_to_message(view))

    def take(self) -> Messages:
        """The messages, by connection; the outbox is empty afterwards."""
        for edge, tokens in self._next_tokens.items():
            self._message(edge).next_tokens.CopyFrom(next_tokens_to_message(tokens))
        messages = self._messages
        self._messages = {}
        self._updates = {}
        self._next_tokens = {}
        return messages

    def _add_tokens(self, released: TokensReleased) -> None:
        """One token of many streams is what nearly every step has, and goes as columns, unless more was said before."""
        stream, ids = released.stream, released.token_ids
        is_plain = len(ids) == 1 and not released.logprobs and (released.first_pos or not released.cached_tokens)
        if is_plain and stream not in self._updates:
            tokens = self._next_tokens.get(stream.edge)
            if tokens is None:
                tokens = self._next_tokens[stream.edge] = []
            tokens.append((stream.stream_id, released.first_pos, ids[0]))
        else:
            add_tokens(self._update(stream), released)

    def _message(self, edge: int) -> CoreToEdge:
        message = self._messages.get(edge)
        if message is None:
            message = self._messages[edge] = CoreToEdge()
        return message

    def _update(self, stream: StreamKey) -> StreamUpdate:
        update = self._updates.get(stream)
        if update is None:
            update = self._message(stream.edge).updates.add(stream_id=stream.stream_id)
            self._updates[stream] = update
        return update
