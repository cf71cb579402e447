"""How a stream outlives its scheduler: what has come of it, how the rest is asked for, and how long.

Shared by both clients; knows no channel, and neither waits nor sends. Guards: what has come is asked for no more, and
nothing is asked for without end.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from protos.forwardplane.v1 import generate_pb2
from protos.wire.errors import (
    CallerError,
    DeadlinePassed,
    Draining,
    EngineError,
    InternalFault,
    Loading,
    NoServer,
    QueueFull,
    UnavailableError,
)

DEFAULT_RESUME_S = 30.0
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 0.4
_REFUSED_AT_THE_DOOR = (NoServer, Loading, Draining)
"""Of a server that was never heard: the caller should know at once."""


class Patience:
    """How long one call is asked for again while no scheduler goes on with it. Made per call."""

    def __init__(self, limit_s: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Give up `limit_s` after something was last heard; 0: at once."""
        self._limit_s = limit_s
        self._clock = clock
        self._was_heard = False
        self._tries = 0
        self._began = 0.0
        self._first: EngineError | None = None

    def heard(self) -> None:
        """A server goes on with it."""
        self._was_heard = True
        self._first = None
        self._tries = 0

    def pause_s(self, error: EngineError) -> float | None:
        """How long to wait before asking again after `error`; None: give up."""
        now = self._clock()
        if self._first is None:
            if not isinstance(error, UnavailableError):
                return None
            if not self._was_heard and isinstance(error, _REFUSED_AT_THE_DOOR):
                return None
            self._first, self._began = error, now
        elif not isinstance(error, UnavailableError | QueueFull):
            return None
        left_s = self._began + self._limit_s - now
        if left_s <= 0:
            return None
        pause_s = min(_FIRST_PAUSE_S * 2**self._tries, _LONGEST_PAUSE_S) * random.uniform(0.8, 1.2)
        self._tries += 1
        return float(min(max(pause_s, error.retry_after_ms / 1000), left_s))

    def final(self, error: EngineError) -> EngineError:
        """What the caller is told at the end: a server that refuses to resume is not what went wrong."""
        return self._first if self._first is not None and isinstance(error, CallerError) else error


@dataclass(slots=True)
class _Held:
    """What has come of one sample."""

    token_ids: list[int] = field(default_factory=list)
    text_bytes: int = 0
    has_begun: bool = False
    has_ended: bool = False
    prompt_logprobs: int = 0
    hidden_states: bool = False


class ResumableStream:
    """One `Generate` from its first call to its last. Made per request, used by one caller."""

    def __init__(
        self, request: generate_pb2.GenerateRequest, *, timeout_s: float | None, resume_s: float = DEFAULT_RESUME_S
    ) -> None:
        """Begin with nothing.

        Args:
            request: what the caller asks.
            timeout_s: for all calls together; None: the server's own.
            resume_s: how long to look for a scheduler that goes on; 0: not at all.
        """
        self._request = request
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self._patience = Patience(resume_s)
        num_samples: int = request.sampling.n if request.sampling.HasField("n") else 1
        self._samples = [_Held() for _ in range(num_samples)]
        self._tickets: dict[int, bytes] = {}
        self._asked = list(range(num_samples))
        self._is_resumed = False

    def rest(self) -> generate_pb2.GenerateRequest | None:
        """What is to be asked for now; None: everything has come."""
        if not self._has_begun:
            return self._request
        self._is_resumed = True
        self._asked = [index for index, held in enumerate(self._samples) if not held.has_ended]
        if not self._asked:
            return None
        request = generate_pb2.GenerateRequest()
        request.CopyFrom(self._request)
        request.resume.extend(self._resumed(index) for index in self._asked)
        return request

    def timeout_s(self) -> float | None:
        """For the next call; None: the server's own.

        Raises:
            DeadlinePassed: there is no time left.
        """
        if self._deadline is None:
            return None
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise DeadlinePassed("the request's time is over")
        return left_s

    def take(self, chunk: generate_pb2.GenerateChunk) -> None:
        """A chunk has come.

        Raises:
            InternalFault: it does not follow what came before.
        """
        self._patience.heard()
        self._tickets.update(zip(self._asked, chunk.resume_tickets, strict=False))
        if chunk.sample_index >= len(self._samples):
            raise InternalFault(f"the server sent sample {chunk.sample_index} of {len(self._samples)}")
        held = self._samples[chunk.sample_index]
        if self._is_resumed and chunk.token_ids and chunk.first_pos != len(held.token_ids):
            raise InternalFault(f"the server went on at {chunk.first_pos} in place of {len(held.token_ids)}")
        held.has_begun = True
        held.token_ids.extend(chunk.token_ids)
        held.text_bytes += len(chunk.text.encode())
        held.prompt_logprobs += len(chunk.prompt_logprobs)
        held.hidden_states |= chunk.HasField("hidden_states")
        held.has_ended |= chunk.HasField("finish")

    def pause_s(self, error: EngineError) -> float | None:
        """How long to wait before asking for the rest; None: the stream ends with `error`."""
        can_resume = len(self._tickets) == len(self._samples)
        return self._patience.pause_s(error) if can_resume or not self._has_begun else None

    def final(self, error: EngineError) -> EngineError:
        """What the caller is told at the end."""
        return self._patience.final(error)

    @property
    def _has_begun(self) -> bool:
        return any(held.has_begun for held in self._samples)

    def _resumed(self, index: int) -> generate_pb2.ResumedSample:
        held = self._samples[index]
        return generate_pb2.ResumedSample(
            ticket=self._tickets[index],
            token_ids=held.token_ids,
            text_bytes=held.text_bytes,
            has_begun=held.has_begun,
            prompt_logprobs=held.prompt_logprobs,
            hidden_states=held.hidden_states,
        )
