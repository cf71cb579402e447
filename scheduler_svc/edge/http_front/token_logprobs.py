"""Log-probabilities in the two formats of OpenAI's API. Knows no calls."""

from collections.abc import Mapping, Sequence
from typing import Any

from protos.forwardplane.v1.sampling_pb2 import TokenLogprob
from scheduler_svc.text.detokenizer import IncrementalDecoder
from scheduler_svc.text.tokenizer import TextTokenizer

_LOWEST = -9999.0
"""OpenAI's word for very unlikely; JSON has no infinity."""


def chat_logprobs(items: Sequence[TokenLogprob], tokenizer: TextTokenizer) -> dict[str, Any]:
    """As `logprobs` of a chat's choice: each token with its bytes, since its text may be a part of a character."""

    def entry(token_id: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, _LOWEST), "bytes": list(raw)}

    content = [
        {
            **entry(item.token_id, item.logprob),
            "top_logprobs": [entry(best.token_id, best.logprob) for best in item.top],
        }
        for item in items
    ]
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """As `logprobs` of a completion's choice. One for each stream, since offsets go on from chunk to chunk."""

    def __init__(self, tokenizer: TextTokenizer, decoder: IncrementalDecoder, *, first_offset: int = 0) -> None:
        """Begin at the output's beginning.

        Args:
            tokenizer: of the served model.
            decoder: a fresh one that gives the text of this stream.
            first_offset: where in the choice's text it begins.
        """
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._num_chars = first_offset

    def of(self, items: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens; call it with all of them, in order."""
        return {
            "tokens": [self._name(item.token_id) for item in items],
            "token_logprobs": [max(item.logprob, _LOWEST) for item in items],
            "top_logprobs": [self._best(item) for item in items],
            "text_offset": [self._offset(item.token_id) for item in items],
        }

    def of_first(self, token_id: int, *, has_text: bool) -> dict[str, list[Any]]:
        """The first token of a prompt: nothing comes before it, so it has no log-probability."""
        return {
            "tokens": [self._name(token_id)],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._offset(token_id) if has_text else self._num_chars],
        }

    def _best(self, item: TokenLogprob) -> dict[str, float]:
        """Best first; the sampled token is always there. Of tokens with one name the better one stays."""
        named: dict[str, float] = {}
        pairs = [(best.token_id, best.logprob) for best in item.top]
        for token_id, logprob in (*pairs, (item.token_id, item.logprob)):
            named.setdefault(self._name(token_id), max(logprob, _LOWEST))
        return named

    def _name(self, token_id: int) -> str:
        raw = self._tokenizer.token_bytes(token_id)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)

    def _offset(self, token_id: int) -> int:
        """Of the token's text, in characters; of one inside a character: where that begins."""
        decoded = self._decoder.push(token_id)
        offset = self._num_chars + len(decoded.settled)
        self._num_chars = offset + len(decoded.text)
        return offset


class EchoedPrompt:
    """The prompt's part of the `logprobs` of a completion that echoes it. One for each prompt."""

    def __init__(self, writer: CompletionLogprobs, first_id: int, *, has_text: bool) -> None:
        """Begin at the prompt's beginning.

        Args:
            writer: whose decoder gives the prompt's text.
            first_id: the prompt's first token.
            has_text: it is part of the echoed text; not so one that the server put before a text.
        """
        self._writer = writer
        self._first = (first_id, has_text)
        self._said: list[dict[str, list[Any]]] = []

    def next(self, items: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens of the prompt; the first of all in front of those that are given first."""
        parts = [] if self._said else [self._writer.of_first(self._first[0], has_text=self._first[1])]
        new = joined([*parts, self._writer.of(items)])
        self._said.append(new)
        return new

    def again(self) -> dict[str, list[Any]]:
        """All that was said so far, for another sample of the same prompt."""
        return joined(self._said) if self._said else {}


class EchoedLogprobs:
    """As `logprobs` of a choice that begins with its prompt. One for each stream."""

    def __init__(self, prompt: EchoedPrompt, output: CompletionLogprobs, *, is_first_sample: bool) -> None:
        """Join the parts. Log-probabilities of a prompt come with its first sample."""
        self._prompt = prompt
        self._output = output
        self._is_first_sample = is_first_sample
        self._has_begun = False

    def of(self, of_prompt: Sequence[TokenLogprob], of_output: Sequence[TokenLogprob]) -> dict[str, list[Any]]:
        """The next tokens of both."""
        parts = [self._output.of(of_output)]
        if not self._has_begun or of_prompt:
            parts.insert(0, self._prompt.next(of_prompt) if self._is_first_sample else self._prompt.again())
        self._has_begun = True
        return joined(parts)


def joined(parts: Sequence[Mapping[str, list[Any]]]) -> dict[str, list[Any]]:
    """One behind the other."""
    return {name: [value for part in parts for value in part[name]] for name in parts[0]}
