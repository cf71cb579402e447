"""A checked request's prompt to token ids: chat template and tokenizer.

Long texts are tokenised in a thread, so that they do not hold up other streams. Knows nothing of gRPC.
"""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from protos.forwardplane.v1.generate_pb2 import ChatPrompt, DetokenizeRequest, GenerateRequest, TokenizeRequest
from protos.wire.errors import InvalidRequest, UnsupportedFeature
from protos.wire.limits import MAX_PROMPT_BYTES
from scheduler_svc.edge.model_facts import ModelFacts
from scheduler_svc.edge.validate_request import grammar_source, validate_detokenize, validate_tokenize
from scheduler_svc.text.chat_template import ChatTemplate
from scheduler_svc.text.grammar_checker import GrammarChecker
from scheduler_svc.text.tokenizer import TextTokenizer

# Up to so many characters or ids are done on the event loop: about a millisecond.
_MAX_ON_LOOP = 4096
_THREADS = 2


class PromptEncoder:
    """Made and closed by the edge's composition root; used on its event loop."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        template: ChatTemplate | None,
        first_token_id: int | None = None,
        grammars: GrammarChecker | None = None,
    ) -> None:
        """Join the parts.

        Args:
            tokenizer: of the served model.
            template: absent for base models.
            first_token_id: put before a raw text, for models that want it; templates write it themselves.
            grammars: tries out what outputs have to match; absent: they cannot be asked for.
        """
        self._grammars = grammars
        self._tokenizer = tokenizer
        self._template = template
        self._first_ids = [] if first_token_id is None else [first_token_id]
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def check_grammar(self, request: GenerateRequest) -> None:
        """Refuse a checked request whose output has to match something that cannot be used.

        Raises:
            EngineError: refused.
        """
        source = grammar_source(request)
        if source is None:
            return
        if self._grammars is None:
            raise UnsupportedFeature(f"{source.kind} is not offered by this server", field=source.kind)
        await self._grammars.check(source)

    def check_length(self, request: GenerateRequest, facts: ModelFacts) -> None:
        """Refuse a text that is too long whatever its tokens are, before it is tokenised.

        Raises:
            InvalidRequest: it is.
        """
        if len(request.text) <= _MAX_ON_LOOP:
            return
        least = self._tokenizer.least_tokens(request.text)
        if least >= facts.context_tokens:
            message = (
                f"prompt has {least} tokens or more; the context of {facts.context_tokens} leaves no room for output"
            )
            raise InvalidRequest(message, field="prompt")

    async def prompt_ids(self, request: GenerateRequest) -> list[int]:
        """Ids of a checked request's prompt, as they are if it brought ids."""
        if request.WhichOneof("prompt") == "tokens":
            return list(request.tokens.ids)
        return await self._text_ids(request)

    async def prompt_text(self, request: GenerateRequest, prompt_ids: list[int]) -> str:
        """The text of a checked request's prompt: as it came, or of its ids with special tokens.

        Raises:
            InvalidRequest: it is longer than any prompt text may be.
        """
        if request.WhichOneof("prompt") == "text":
            return request.text
        text = await self._decode(prompt_ids, keep_special=True)
        size = len(text.encode())
        if size > MAX_PROMPT_BYTES:
            message = f"echo: the prompt's text has {size} bytes; the limit is {MAX_PROMPT_BYTES}"
            raise InvalidRequest(message, field="echo")
        return text

    async def tokenize(self, request: TokenizeRequest, facts: ModelFacts) -> list[int]:
        """The ids that a generation would get from the same input.

        Raises:
            EngineError: refused.
        """
        validate_tokenize(request, facts)
        return await self._text_ids(request)

    async def detokenize(self, request: DetokenizeRequest, facts: ModelFacts) -> str:
        """Text of ids; broken characters come out as U+FFFD.

        Raises:
            EngineError: refused.
        """
        validate_detokenize(request, facts)
        return await self._decode(list(request.token_ids), keep_special=request.keep_special_tokens)

    def close(self) -> None:
        """End the threads. Safe to repeat."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _text_ids(self, request: GenerateRequest | TokenizeRequest) -> list[int]:
        if request.HasField("chat"):
            return await self._encode(await self._rendered(request.chat))
        return self._first_ids + await self._encode(request.text)

    async def _decode(self, token_ids: list[int], *, keep_special: bool) -> str:
        decode = partial(self._tokenizer.decode, token_ids, keep_special=keep_special)
        if len(token_ids) <= _MAX_ON_LOOP:
            return decode()
        return await asyncio.get_running_loop().run_in_executor(self._threads, decode)

    async def _encode(self, text: str) -> list[int]:
        if len(text) <= _MAX_ON_LOOP:
            return self._tokenizer.encode(text)
        return await asyncio.get_running_loop().run_in_executor(self._threads, self._tokenizer.encode, text)

    async def _rendered(self, chat: ChatPrompt) -> str:
        if self._template is None:
            raise UnsupportedFeature("this model has no chat template; send the prompt as raw text", field="chat")
        text = await self._template.render([(message.role, message.content) for message in chat.messages])
        size = len(text.encode())
        if size > MAX_PROMPT_BYTES:
            message = f"chat has {size} bytes after the model's template; the limit is {MAX_PROMPT_BYTES}"
            raise InvalidRequest(message, field="chat")
        return text
