"""`forwardplane generate`: one prompt, streamed to the terminal or as one JSON line."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from rich.console import Console

from protos.client.exit_codes import WrongUsage
from protos.client.flag_types import OldFile
from protos.client.generation_client import GenerationClient
from protos.client.messages import Chat, Chunk, Finish, GenerateOptions, Prompt, TokenIds
from protos.client.prompt_messages import HiddenStates, TokenLogprob
from protos.client.server_access import ServerAccess
from protos.wire.errors import InternalFault, InvalidRequest
from protos.wire.limits import MAX_DEADLINE_S


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerArguments:
    """How many answers, and which tokens may come in them."""

    n: int = 1
    """Answers to the one prompt."""
    repetition_penalty: float | None = None
    """Above 1: tokens of prompt and answer become less likely."""
    frequency_penalty: float | None = None
    """Taken from a token's logit for each time it came."""
    presence_penalty: float | None = None
    """Taken once from the logit of a token that came."""
    logit_bias: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """`ID:VALUE`, added to that token's logit; may be given several times."""
    min_tokens: int | None = None
    """New tokens before the end-of-sequence token may come; text of `--stop`, or an answer that matches as a whole,
    ends it sooner."""
    json_schema: OldFile | None = None
    """File with a JSON schema that the answer has to match."""
    regex: str | None = None
    """Regular expression that the answer has to match."""
    ebnf: OldFile | None = None
    """File with a grammar in Lark syntax that the answer has to match."""
    choice: Annotated[tuple[str, ...], Parameter(negative=())] = ()
    """The answer is one of these; may be given several times."""
    prompt_logprobs: int | None = None
    """Log-probabilities of the prompt's tokens, with this many best alternatives. `--max-tokens 0` gives only these."""
    prompt_logprobs_start: int | None = None
    """Position of the first token whose log-probability is wanted. Default: all but the first, which has none."""
    hidden_states: Literal["last", "full"] | None = None
    """With `--json`: final hidden states of the prompt's last token, or of all, where the server allows them (its
    `--max-hidden-mode`). For one vector of a text see `forwardplane embed`."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class GenerateArguments:
    """Where to ask, what to ask for, and how to show it."""

    server: ServerAccess = field(default_factory=ServerAccess)
    """Where to ask, and as whom."""
    ids: str | None = None
    """Prompt as token ids, `1,2,3`, in place of text."""
    raw: Annotated[bool, Parameter(negative=())] = False
    """Take the prompt as it is, without the model's chat template."""
    system: str | None = None
    """System message of the chat."""
    max_tokens: int = 512
    """Most new tokens."""
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
    """Log-probabilities of new tokens, with this many best alternatives: the model's own, before temperature,
    penalties, bias, bans and grammar."""
    timeout_s: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=MAX_DEADLINE_S))] = None
    """Deadline of the request, seconds. Default: the server's, 600."""
    json: Annotated[bool, Parameter(negative=())] = False
    """Print one JSON line at the end in place of the text."""
    answers: AnswerArguments = AnswerArguments()
    """How many answers, and which tokens may come in them."""


def prompt_of(text: str | None, arguments: GenerateArguments) -> Prompt:
    """The prompt that the command line names.

    Raises:
        WrongUsage: none, or two of them, or a system message without a chat.
    """
    if (text is None) == (arguments.ids is None):
        raise WrongUsage("give a prompt as an argument, or token ids with --ids")
    if arguments.system is not None and (arguments.raw or arguments.ids is not None):
        raise WrongUsage("--system belongs to a chat, not to --raw or --ids")
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
        raise WrongUsage("--ids takes whole numbers with commas between them") from error


def options_of(arguments: GenerateArguments) -> GenerateOptions:
    """The options that the command line names.

    Raises:
        InvalidRequest: one of them cannot be read.
        WrongUsage: one would not be shown, or means nothing without another.
    """
    asked = arguments.answers
    if asked.hidden_states is not None and not arguments.json:
        raise WrongUsage("--hidden-states needs --json")
    if asked.prompt_logprobs_start is not None and asked.prompt_logprobs is None:
        raise WrongUsage("--prompt-logprobs-start needs --prompt-logprobs")
    return GenerateOptions(
        max_tokens=arguments.max_tokens,
        min_tokens=asked.min_tokens,
        temperature=arguments.temperature,
        top_p=arguments.top_p,
        top_k=arguments.top_k,
        min_p=arguments.min_p,
        repetition_penalty=asked.repetition_penalty,
        frequency_penalty=asked.frequency_penalty,
        presence_penalty=asked.presence_penalty,
        logit_bias=_parse_bias(asked.logit_bias),
        seed=arguments.seed,
        n=asked.n,
        stop_strings=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        logprobs=arguments.logprobs,
        prompt_logprobs=asked.prompt_logprobs,
        prompt_logprobs_start=asked.prompt_logprobs_start,
        hidden_states=asked.hidden_states,
        json_schema=_read(asked.json_schema, "json-schema"),
        regex=asked.regex,
        ebnf=_read(asked.ebnf, "ebnf"),
        choice=asked.choice,
    )


def _parse_bias(items: tuple[str, ...]) -> dict[int, float]:
    try:
        pairs = [item.split(":") for item in items]
        return {int(token_id): float(value) for token_id, value in pairs}
    except ValueError as error:
        raise WrongUsage("--logit-bias takes ID:VALUE") from error


def _read(path: Path | None, option: str) -> str | None:
    if path is None:
        return None
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"the file of --{option} cannot be read as text", field=option) from error


def generate(text: str | None, arguments: GenerateArguments, console: Console) -> int:
    """Ask, and show the answer. Returns the exit code.

    Raises:
        EngineError: bad usage, a refusal or a failure.
    """
    prompt = prompt_of(text, arguments)
    options = options_of(arguments)
    chunks: list[Chunk] = []
    num_answers = arguments.answers.n
    shows_parts = num_answers == 1 and not arguments.json
    server, timeout_s = arguments.server, arguments.timeout_s
    with GenerationClient(server.target, timeout_s=timeout_s, credentials=server.credentials()) as client:
        for chunk in client.stream(prompt, options):
            chunks.append(chunk)
            if shows_parts:
                show_prompt(chunk, console)
                console.out(chunk.text, end="", highlight=False)
    samples = [[chunk for chunk in chunks if chunk.sample_index == index] for index in range(num_answers)]
    if arguments.json:
        answers = [answer(sample) for sample in samples]
        shown = answers[0] if num_answers == 1 else {"samples": answers}
        console.out(json.dumps(shown, ensure_ascii=False), highlight=False)
    elif num_answers == 1:
        console.out("")
    else:
        for index, sample in enumerate(samples):
            console.out(f"[{index}] " + "".join(chunk.text for chunk in sample), highlight=False)
    return 0


def answer(chunks: list[Chunk]) -> dict[str, object]:
    """One sample as JSON values: text, ids, finish, usage, log-probabilities when asked for.

    Raises:
        InternalFault: the last chunk is missing.
    """
    last = chunks[-1] if chunks else None
    if last is None or last.finish is None or last.usage is None:
        raise InternalFault("the stream ended without its last chunk")
    logprobs = [item for chunk in chunks for item in chunk.logprobs]
    of_prompt = [item for chunk in chunks for item in chunk.prompt.logprobs]
    first_pos = next((chunk.prompt.first_pos for chunk in chunks if chunk.prompt.logprobs), None)
    states = next((chunk.prompt.hidden_states for chunk in chunks if chunk.prompt.hidden_states is not None), None)
    return {
        "request_id": chunks[0].request_id,
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token_id for chunk in chunks for token_id in chunk.token_ids],
        "finish_reason": last.finish.reason.name.lower(),
        "stopped_by": _stopped_by(last.finish),
        "usage": asdict(last.usage),
        "seed": last.seed,
        "logprobs": [_logprob(item) for item in logprobs] or None,
        "prompt_logprobs": [_logprob(item) for item in of_prompt] or None,
        "prompt_first_pos": first_pos,
        "hidden_states": None if states is None else _states(states),
    }


def show_prompt(chunk: Chunk, console: Console) -> None:
    """One line for each token of the prompt that the chunk tells of."""
    for offset, item in enumerate(chunk.prompt.logprobs):
        console.out(prompt_line(chunk.prompt.first_pos + offset, item), highlight=False)


def prompt_line(position: int, item: TokenLogprob) -> str:
    """One token of the prompt as people read it: position, id, log-probability, best alternatives."""
    best = " ".join(f"{token_id}:{value:.4f}" for token_id, value in item.top)
    return f"{position:>6} {item.token_id:>7} {item.logprob:>10.4f}  {best}".rstrip()


def _stopped_by(finish: Finish) -> str | int | None:
    return finish.stop_string if finish.stop_string is not None else finish.stop_token_id


def _states(states: HiddenStates) -> dict[str, object]:
    """Position of the first one, and each as numbers."""
    return {"first_pos": states.first_pos, "states": states.array().tolist()}


def _logprob(item: TokenLogprob) -> dict[str, object]:
    top = [{"token_id": token_id, "logprob": value} for token_id, value in item.top]
    return {"token_id": item.token_id, "logprob": item.logprob, "top": top}
