"""Requests that ask for hostile grammars, and what a well-behaved caller sends beside them."""

from protos.client.generation_client import AsyncGenerationClient
from protos.client.messages import Chat, GenerateOptions
from protos.wire.errors import EngineError, InvalidRequest
from scheduler_svc.text.grammar_source import GrammarKind, GrammarSource

PROMPT = Chat.user("Count to twenty in words.")


def options_of(source: GrammarSource, *, max_tokens: int = 4) -> GenerateOptions:
    """What asks for that grammar, which is not of the kind choice: that has a limit on its texts."""
    assert source.kind is not GrammarKind.CHOICE
    return GenerateOptions(max_tokens=max_tokens, seed=1, **{str(source.kind): source.text})


async def ask_for(client: AsyncGenerationClient, source: GrammarSource) -> EngineError | None:
    """Why it failed; None: it was borne."""
    try:
        await client.generate([PROMPT], options_of(source))
    except EngineError as error:
        return error
    return None


def check_refusal(source: GrammarSource, error: EngineError) -> None:
    """It failed as a caller's fault, and says which field."""
    assert isinstance(error, InvalidRequest), (source.kind, source.text[:60], error)
    assert error.field.removeprefix("requests[0].") == source.kind, (source.kind, source.text[:60], error.field)
    assert source.text[:40] not in error.message or len(source.text) < 8
