"""What `forwardplane bench` may be told, as groups of flags. Plain data and the checks between them."""

import math
import os
from dataclasses import dataclass, field
from typing import Annotated

from cyclopts import Parameter, validators

from protos.client.exit_codes import WrongUsage
from protos.client.flag_types import MAX_SEED, NewFile, OldFile, check_temperature
from protos.client.server_access import ServerAccess
from protos.wire.limits import MAX_DEADLINE_S, MAX_PROMPT_TOKENS

MAX_REQUESTS = 10_000_000
MAX_RATE = 100_000.0
MAX_CONCURRENCY = 100_000
Rate = Annotated[float, Parameter(validator=validators.Number(gt=0, lte=MAX_RATE))]
Count = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=MAX_REQUESTS))]
AtOnce = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=MAX_CONCURRENCY))]

DEFAULT_CONCURRENCY = 8
DEFAULT_DURATION_S = 30.0
_STREAMS_A_PROCESS = 100
"""What one Python client reads without delaying what it measures, at the usual few chunks a second and stream."""
_WARM_UP_SHARE = 0.2


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """How much load, and for how long."""

    rate: Rate | None = None
    """Open loop: requests per second that arrive whatever the server does, at random (Poisson) times."""
    concurrency: AtOnce | None = None
    """Closed loop: so many requests at once, each followed by the next. Default: 8, when --rate is not given."""
    requests: Count | None = None
    """Stop after so many requests."""
    duration_s: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=MAX_DEADLINE_S))] = None
    """Send no request after so many seconds. Default: 30, when --requests is not given."""
    warm_up: Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=MAX_REQUESTS))] = None
    """First requests that are sent and not measured. Default: one round, or one second of arrivals; at most a fifth."""
    processes: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=64))] = None
    """Client processes. Default: one for each 100 requests at once, at most one a core."""
    timeout_s: Annotated[float, Parameter(validator=validators.Number(gt=0, lte=MAX_DEADLINE_S))] = 120.0
    """Deadline of one request, seconds."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """What is asked."""

    prompt_tokens: str = "256"
    """Length of made-up prompts: `256`, `64-1024` (even) or `lognormal:256:0.7` (median, sigma)."""
    output_tokens: str = "128"
    """Length of answers, in the same forms; answers go on past the end of the sequence."""
    shared_prefix_tokens: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=MAX_PROMPT_TOKENS))] = 0
    """First tokens that all made-up prompts share, for the prefix cache."""
    prompts: OldFile | None = None
    """JSONL file in place of made-up prompts, a line each: `{"text": …}`, `{"ids": […]}` or
    `{"messages": [{"role": …, "content": …}]}`, and `"max_tokens"` if wanted. Answers end where the model ends them."""
    temperature: Annotated[float, Parameter(validator=check_temperature)] = 0.0
    """0: the likeliest token each time."""
    seed: Annotated[int, Parameter(validator=validators.Number(gte=0, lte=MAX_SEED))] = 0
    """Of prompts, lengths, arrivals and sampling: the same seed asks the same."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """What becomes of the figures."""

    json: NewFile | None = None
    """Write the figures as JSON, too."""
    plot: NewFile | None = None
    """Draw them into a PNG file; needs matplotlib (`pip install 'forwardplane[plot]'`)."""
    verify: Annotated[bool, Parameter(negative=())] = False
    """Check every token against the simulated model's (simulated workers that never end an answer)."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """Where to measure, with what load, and what to do with the figures."""

    server: ServerAccess = field(default_factory=ServerAccess)
    """Where to measure, and as whom."""
    load: LoadOptions = field(default_factory=LoadOptions)
    """How much load, and for how long."""
    prompt: PromptOptions = field(default_factory=PromptOptions)
    """What is asked."""
    result: ResultOptions = field(default_factory=ResultOptions)
    """What becomes of the figures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """The load with every default decided. Travels to the client processes."""

    rate: float | None
    """None: closed loop."""
    concurrency: int
    """0: open loop."""
    max_requests: int | None
    duration_s: float | None
    warm_up: int
    processes: int
    timeout_s: float


def load_plan(options: LoadOptions, *, cores: int | None = None) -> LoadPlan:
    """The load that the options mean.

    Raises:
        WrongUsage: open and closed loop at once, or nothing left to measure.
    """
    if options.rate is not None and options.concurrency is not None:
        raise WrongUsage("--rate (open loop) and --concurrency (closed loop) exclude each other")
    if options.requests is not None and (options.warm_up or 0) >= options.requests:
        raise WrongUsage(f"--warm-up {options.warm_up} leaves nothing of --requests {options.requests} to measure")
    concurrency = 0 if options.rate is not None else options.concurrency or DEFAULT_CONCURRENCY
    duration_s = options.duration_s
    if duration_s is None and options.requests is None:
        duration_s = DEFAULT_DURATION_S
    at_once = concurrency or options.rate or 0
    most = cores or len(os.sched_getaffinity(0))
    processes = options.processes or max(1, min(math.ceil(at_once / _STREAMS_A_PROCESS), most))
    if concurrency:
        processes = min(processes, concurrency)
    return LoadPlan(
        rate=options.rate,
        concurrency=concurrency,
        max_requests=options.requests,
        duration_s=duration_s,
        warm_up=_warm_up(options, concurrency=concurrency, duration_s=duration_s),
        processes=processes,
        timeout_s=options.timeout_s,
    )


def _warm_up(options: LoadOptions, *, concurrency: int, duration_s: float | None) -> int:
    if options.warm_up is not None:
        return options.warm_up
    wanted = concurrency or math.ceil(options.rate or 0)
    total = options.requests
    if total is None and options.rate is not None and duration_s is not None:
        total = math.ceil(options.rate * duration_s)
    return wanted if total is None else min(wanted, int(total * _WARM_UP_SHARE))
