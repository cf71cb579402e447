"""How a call empties its streams, whatever it writes them to: chunk by chunk, paced, or whole."""

import asyncio
import math
from collections.abc import AsyncGenerator

from protos.forwardplane.v1.generate_pb2 import GenerateChunk, Generation
from protos.wire.errors import InternalFault
from scheduler_svc.edge.caller_stream import CallerStream
from scheduler_svc.edge.stream_record import StreamRecord
from scheduler_svc.edge.write_pacing import WritePacing


async def paced_chunks(
    stream: CallerStream, record: StreamRecord, pacing: WritePacing
) -> AsyncGenerator[GenerateChunk, None]:
    """Chunks of `stream` as its reader may have them; what is not read yet waits in the stream.

    Raises:
        EngineError: the stream's end, after its last chunk, when it is not a good one.
    """
    loop = asyncio.get_running_loop()
    while (chunk := await stream.next_chunk()) is not None:
        num_ids = len(chunk.token_ids)
        is_of_prompt = bool(chunk.prompt_logprobs) or chunk.HasField("hidden_states")
        yield chunk
        now = loop.time()
        if num_ids or not is_of_prompt:  # times are those of output tokens
            record.wrote(num_ids, now)
        stream.pace(now + pacing.pause_s())
    if stream.error is not None:
        raise stream.error


async def whole_generation(stream: CallerStream) -> Generation:
    """Everything that a stream gave, once it has finished well.

    Raises:
        EngineError: it has not.
    """
    stream.pace(math.inf)
    chunk = await stream.next_chunk()
    if stream.error is not None:
        raise stream.error
    if chunk is None:
        raise InternalFault("a stream ended without its last chunk")
    return Generation(
        request_id=stream.names.request_id,
        client_tag=stream.names.client_tag,
        sample_index=stream.names.sample_index,
        token_ids=chunk.token_ids,
        text=chunk.text,
        logprobs=chunk.logprobs,
        finish=chunk.finish,
        usage=chunk.usage,
        seed=chunk.seed,
        prompt_text=chunk.prompt_text if chunk.HasField("prompt_text") else None,
        prompt_logprobs=chunk.prompt_logprobs,
        prompt_first_pos=chunk.prompt_first_pos,
        hidden_states=chunk.hidden_states if chunk.HasField("hidden_states") else None,
    )
