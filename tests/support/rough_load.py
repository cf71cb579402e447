"""Many small requests of every kind on few pages, with cancels, stops and retractions at random points."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from protos.wire.enums import FinishReason
from scheduler_svc.core.events import Grammar, RequestSpec, Sampling, StreamKey
from scheduler_svc.core.transitions import requeue
from tests.support.core_harness import CoreHarness, make_spec

WIDTH = 97
BOOKS = 6
"""Beginnings that prompts share."""
MOST_PROMPT, MOST_OUTPUT = 60, 20


def rough_specs(draw: random.Random, count: int, *, first: int = 0) -> list[RequestSpec]:
    """Prompts that share beginnings, and every sampling feature, alone and mixed."""
    return [_spec(draw, stream_id) for stream_id in range(first, first + count)]


def _spec(draw: random.Random, stream_id: int) -> RequestSpec:
    book = draw.randrange(BOOKS)
    length = draw.choice([draw.randint(1, 8), draw.randint(1, MOST_PROMPT)])
    prompt = [(11 * book + position * position * (book + 1)) % WIDTH for position in range(length)]
    if draw.random() < 0.6:
        tail = draw.randint(1, min(6, length))
        prompt[-tail:] = [draw.randrange(WIDTH) for _ in range(tail)]
    changes: dict[str, object] = {}
    if draw.random() < 0.08:
        changes["grammar"] = Grammar("regex", "a" * draw.randint(1, 3))
    if draw.random() < 0.3:
        changes["stop_token_ids"] = frozenset(draw.sample(range(WIDTH), 6))
        changes["min_tokens"] = draw.choice([0, 0, 3])
    if draw.random() < 0.2:
        changes |= {"output_logprobs": True, "top_logprobs": draw.choice([0, 3])}
    return make_spec(
        stream_id,
        prompt=prompt,
        max_tokens=draw.choice([1, 2, draw.randint(1, MOST_OUTPUT), draw.randint(1, MOST_OUTPUT)]),
        sampling=_sampling(draw),
        isolation_domain=draw.choice([b"", b"", b"other"]),
        **changes,
    )


def _sampling(draw: random.Random) -> Sampling:
    values: dict[str, object] = {}
    if draw.random() < 0.5:
        values |= {"temperature": draw.choice([0.5, 0.9, 1.5]), "seed": draw.getrandbits(64)}
        values |= {"top_k": draw.choice([0, 8]), "top_p": draw.choice([1.0, 0.9]), "min_p": draw.choice([0.0, 0.02])}
        values["sample_index"] = draw.choice([0, 0, 1, 2])
    if draw.random() < 0.2:
        values |= {"repetition_penalty": 1.3, "frequency_penalty": 0.4, "presence_penalty": draw.choice([0.0, 0.6])}
    if draw.random() < 0.1:
        values["bias"] = ((draw.randrange(WIDTH), 3.0),)
    if draw.random() < 0.1:
        values["banned_ids"] = tuple(draw.sample(range(WIDTH), 20))
    return Sampling(**values)


@dataclass
class Trouble:
    """Chances of each kind of trouble, per turn."""

    cancel: float = 0.1
    stop: float = 0.05
    retract: float = 0.1
    most_open: int = 40
    counts: Counter[str] = field(default_factory=Counter)
    ended: set[StreamKey] = field(default_factory=set)
    """Streams that a caller or a stop string ended early."""


def drive(
    core: CoreHarness,
    specs: Sequence[RequestSpec],
    *,
    draw: random.Random,
    trouble: Trouble,
    shake: Callable[[], None] = lambda: None,
) -> None:
    """Submit all, with trouble on the way, until every one has ended."""
    waiting = list(reversed(specs))
    while waiting or core.state.streams:
        for _ in range(draw.randint(0, 4)):
            if waiting and len(core.state.streams) < trouble.most_open:
                core.submit(waiting.pop())
        _make_trouble(core, draw, trouble)
        shake()
        if core.masks and draw.random() < 0.7:
            core.answer_mask()
        if core.pending["w0"]:
            core.deliver()


def _make_trouble(core: CoreHarness, draw: random.Random, trouble: Trouble) -> None:
    for chance, reason in ((trouble.cancel, FinishReason.ABORT), (trouble.stop, FinishReason.STOP)):
        if draw.random() < chance and core.state.streams:
            stream: StreamKey = draw.choice(list(core.state.streams))
            core.cancel(stream.stream_id, reason)
            trouble.ended.add(stream)
            trouble.counts[reason.name] += 1
    running = core.state.workers["w0"].running
    if draw.random() < trouble.retract and running:
        requeue(core.state, draw.choice(list(running.values())))
        trouble.counts["retracted"] += 1
