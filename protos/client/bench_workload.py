"""The requests of a benchmark by their number: prompt, length, seed, arrival. Same number, same request.

Every client process can make any request, so nothing but numbers is shared between them.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from protos.client.bench_options import LoadPlan, PromptOptions
from protos.client.exit_codes import WrongUsage
from protos.client.messages import Chat, ModelDescription, Prompt, TokenIds
from protos.wire.errors import InvalidRequest
from protos.wire.limits import MAX_PROMPT_TOKENS

_MAX_FILE_BYTES = 256 << 20
_LEAST_PROMPT = 1
_ARRIVALS, _PREFIX = 1, 2
"""Streams of random numbers beside the requests' own."""


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of token counts."""

    low: float
    high: float
    median: float = 0.0
    sigma: float = 0.0

    def draw(self, random: np.random.Generator) -> int:
        """A length, at least 1."""
        if self.sigma:
            return max(1, round(self.median * math.exp(self.sigma * random.standard_normal())))
        return int(random.integers(int(self.low), int(self.high) + 1))


def parse_lengths(text: str, *, flag: str) -> Lengths:
    """`256`, `64-1024` or `lognormal:256:0.7`.

    Raises:
        WrongUsage: none of them.
    """
    if match := re.fullmatch(r"(\d+)(?:-(\d+))?", text):
        low, high = int(match[1]), int(match[2] or match[1])
        if 1 <= low <= high <= MAX_PROMPT_TOKENS:
            return Lengths(low, high)
    if match := re.fullmatch(r"lognormal:(\d+(?:\.\d+)?):(\d+(?:\.\d+)?)", text):
        median, sigma = float(match[1]), float(match[2])
        if 1 <= median <= MAX_PROMPT_TOKENS and 0 < sigma <= 5:
            return Lengths(1, 1, median, sigma)
    forms = "256, 64-1024 or lognormal:256:0.7 (sigma at most 5)"
    raise WrongUsage(f"{flag} takes {forms}, of 1 to {MAX_PROMPT_TOKENS} tokens, not {text[:40]}")


@dataclass(frozen=True, slots=True)
class AskedRequest:
    """One request of the benchmark."""

    prompt: Prompt
    max_tokens: int | None
    seed: int


@dataclass(frozen=True, slots=True)
class PromptSource:
    """What the options say of prompts and answers, read and checked; nothing of a model."""

    options: PromptOptions
    lengths: Lengths
    output_lengths: Lengths
    lines: tuple[AskedRequest, ...] = ()
    """Of a file; used in turn."""


def prompt_source(options: PromptOptions) -> PromptSource:
    """What the options say.

    Raises:
        WrongUsage: a length cannot be read.
        InvalidRequest: the file of prompts cannot be used; names the line.
    """
    return PromptSource(
        options=options,
        lengths=parse_lengths(options.prompt_tokens, flag="--prompt-tokens"),
        output_lengths=parse_lengths(options.output_tokens, flag="--output-tokens"),
        lines=() if options.prompts is None else tuple(read_prompts(options.prompts)),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """All requests of a run. Made by the command, sent to the client processes."""

    source: PromptSource
    context_tokens: int
    num_ids: int
    """Made-up prompts hold ids below this."""

    def request(self, number: int) -> AskedRequest:
        """The request of that number."""
        source, options = self.source, self.source.options
        random = np.random.default_rng((options.seed, 0, number))
        seed = int(random.integers(1 << 63))
        if source.lines:
            line = source.lines[number % len(source.lines)]
            return AskedRequest(line.prompt, line.max_tokens or source.output_lengths.draw(random), seed)
        output = min(source.output_lengths.draw(random), self.context_tokens - _LEAST_PROMPT)
        length = max(min(source.lengths.draw(random), self.context_tokens - output), _LEAST_PROMPT)
        ids = random.integers(self.num_ids, size=length)
        shared = min(options.shared_prefix_tokens, length)
        if shared:
            ids[:shared] = np.random.default_rng((options.seed, _PREFIX)).integers(self.num_ids, size=shared)
        return AskedRequest(TokenIds(tuple(ids.tolist())), output, seed)


def workload(source: PromptSource, model: ModelDescription) -> Workload:
    """The requests that the options mean for that model."""
    return Workload(source, context_tokens=model.context_tokens, num_ids=model.vocab_size)


def arrival_times(plan: LoadPlan, seed: int) -> Iterator[float]:
    """Seconds after the start at which each request of an open loop arrives, in order, until the run's end."""
    assert plan.rate is not None
    random = np.random.default_rng((seed, _ARRIVALS))
    at_s, number = 0.0, 0
    while plan.max_requests is None or number < plan.max_requests:
        at_s += float(random.exponential(1 / plan.rate))
        if plan.duration_s is not None and at_s >= plan.duration_s:
            return
        yield at_s
        number += 1


def read_prompts(path: Path) -> Iterator[AskedRequest]:
    """The requests of a JSONL file; empty lines are passed over.

    Raises:
        InvalidRequest: the file or a line cannot be used.
    """
    try:
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise InvalidRequest(f"{path.name} is larger than {_MAX_FILE_BYTES} bytes", field="prompts")
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path.name} cannot be read as text", field="prompts") from error
    found = False
    for number, line in enumerate(lines, start=1):
        if line.strip():
            found = True
            yield _parse_line(line, where=f"{path.name} line {number}")
    if not found:
        raise InvalidRequest(f"{path.name} holds no prompt", field="prompts")


def _parse_line(line: str, *, where: str) -> AskedRequest:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise InvalidRequest(f"{where} is no JSON", field="prompts") from error
    if not isinstance(entry, dict):
        raise InvalidRequest(f"{where} holds no object", field="prompts")
    max_tokens = entry.get("max_tokens")
    if max_tokens is not None and (not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1):
        raise InvalidRequest(f"{where}: max_tokens must be a whole number above 0", field="prompts")
    return AskedRequest(_parse_prompt(entry, where=where), max_tokens, 0)


def _parse_prompt(entry: dict[str, Any], *, where: str) -> Prompt:
    match entry:
        case {"text": str(text)}:
            return text
        case {"ids": [int(), *_] as ids} if all(type(token_id) is int for token_id in ids):
            return TokenIds(tuple(ids))
        case {"messages": [_, *_] as messages}:
            return Chat(tuple(_parse_message(message, where=where) for message in messages))
    raise InvalidRequest(f"{where} has none of text, ids and messages", field="prompts")


def _parse_message(message: object, *, where: str) -> tuple[str, str]:
    match message:
        case {"role": str(role), "content": str(content)}:
            return role, content
    raise InvalidRequest(f"{where}: a message needs a role and a content", field="prompts")
