"""`forwardplane generate`: one prompt, streamed to the terminal or as one JSON line."""

import json
from dataclasses import asdict, dataclass
from typing import Annotated

from cyclopts import Parameter
from rich.console import Console

from protos.client.generation_client import GenerationClient
from protos.client.messages import Chat, Chunk, Finish, GenerateOptions, Prompt, TokenIds, TokenLogprob
from protos.wire.errors import InternalFault, InvalidRequest

DEFAULT_TARGET = "127.0.0.1:50051"


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments:
    """Where to ask, what to ask for, and how to show it."""

    target: str = DEFAULT_TARGET
    """HOST:PORT of a scheduler."""
    ids: str | None = None
    """Prompt as token ids, `1,2,3`, in place of text."""
    raw: Annotated[bool, Parameter(negative=())] = False
    """Take the prompt as it is, without the model's chat template."""
    system: str | None = None
    """System message of the chat."""
    max_tokens: int | None = None
    """Most new tokens. Default: what fits the context."""
    temperature: float | None = None
    """0 chooses the likeliest token each time."""
    top_p: float | None = None
    """Sample from the smallest set of tokens with this probability; 1 is off."""
    top_k: int | None = None
    """Sample from this many best tokens; 0 is off."""
    min_p: float | None = None
    """Leave out tokens below this share of the best one's probability."""
    seed: int | None = None
    """Same seed, same tokens. Default: drawn by the server."""
    stop: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """Text that ends the answer; may be given several times."""
    ignore_eos: Annotated[bool, Parameter(negative=())] = False
    """Go on after the end-of-sequence token."""
    logprobs: int | None = None
    """Log-probabilities of new tokens, with this many best alternatives."""
    timeout_s: float | None = None
    """Deadline of the request, seconds."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print one JSON line at the end in place of the text."""


def prompt_of(text: str | None, arguments: GenerateArguments) -> Prompt:
    """The prompt that the command line names.

    Raises:
        InvalidRequest: none, or two of them.
    """
    if (text is None) == (arguments.ids is None):
        raise InvalidRequest("give a prompt as an argument, or token ids with --ids", field="prompt")
    if arguments.ids is not None:
        return TokenIds(_parse_ids(arguments.ids))
    question = text or ""
    if arguments.raw:
        return question
    system = (("system", arguments.system),) if arguments.system is not None else ()
    return Chat((*system, ("user", question)))


def _parse_ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise InvalidRequest("--ids takes whole numbers with commas between them", field="ids") from error


def generate(text: str | None, arguments: GenerateArguments, console: Console) -> int:
    """Ask, and show the answer. Returns the exit code.

    Raises:
        EngineError: bad usage, a refusal or a failure.
    """
    prompt = prompt_of(text, arguments)
    options = GenerateOptions(
        max_tokens=arguments.max_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        seed=arguments.seed,
        stop_strings=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
    )
    chunks: list[Chunk] = []
    with GenerationClient(arguments.target, timeout_s=arguments.timeout_s) as client:
        for chunk in client.stream(prompt, options):
            chunks.append(chunk)
            if not arguments.json:
                console.out(chunk.text, end="", highlight=False)
    if arguments.json:
        console.out(json.dumps(answer(chunks), ensure_ascii=False), highlight=False)
    else:
        console.out("")
    return 0


def answer(chunks: list[Chunk]) -> dict[str, object]:
    """The answer as JSON values: text, ids, finish, usage, log-probabilities when asked for.

    Raises:
        InternalFault: the last chunk is missing.
    """
    last = chunks[-1] if chunks else None
    if last is None or last.finish is None or last.usage is None:
        raise InternalFault("the stream ended without its last chunk")
    logprobs = [item for chunk in chunks for item in chunk.logprobs]
    return {
        "request_id": chunks[0].request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": last.finish.reason.name.lower(),
        "stopped_by": _stopped_by(last.finish),
        "usage": asdict(last.usage),
        "seed": last.seed,
        "logprobs": [_logprob(item) for item in logprobs] or None,
    }


def _stopped_by(finish: Finish) -> str | int | None:
    return finish.stop_string if finish.stop_string is not None else finish.stop_token_id


def _logprob(item: TokenLogprob) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": value} for token_id, value in item.top]
    return {"token_id": item.token_id, "logprob": item.logprob, "top": top}
