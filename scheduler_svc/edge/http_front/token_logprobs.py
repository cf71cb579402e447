"""Log-probabilities in the two formats of OpenAI's API. Knows no calls."""

from collections.abc import Sequence
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

    def __init__(self, tokenizer: TextTokenizer, decoder: IncrementalDecoder) -> None:
        """Begin at the output's beginning.

        Args:
            tokenizer: of the served model.
            decoder: a fresh one that gives the text of this stream.
        """
        self._tokenizer = tokenizer
        self._decoder = decoder
        self._num_chars = 0

    def of(self, items: Sequence[TokenLogprob]) -> dict[str, Any]:
        """The next tokens; call it with all of them, in order."""
        return {
            "tokens": [self._name(item.token_id) for item in items],
            "token_logprobs": [max(item.logprob, _LOWEST) for item in items],
            "top_logprobs": [self._best(item) for item in items],
            "text_offset": [self._offset(item.token_id) for item in items],
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
