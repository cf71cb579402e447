"""The next token of many streams as columns. Pure; both ends of the bridge."""

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import numpy as np

from protos.forwardplane.v1.bridge_pb2 import NextTokens
from protos.wire.errors import DataFault

NextToken: TypeAlias = tuple[int, int, int]
"""Stream, position within its output, token."""

_STREAM_IDS = np.dtype("<u8")
_POSITIONS = np.dtype("<u4")
_TOKEN_IDS = np.dtype("<i4")


def next_tokens_to_message(tokens: Sequence[NextToken]) -> NextTokens:
    """The message that holds them, in their order; there is at least one."""
    stream_ids, positions, token_ids = zip(*tokens, strict=True)
    return NextTokens(
        stream_ids=np.array(stream_ids, _STREAM_IDS).tobytes(),
        positions=np.array(positions, _POSITIONS).tobytes(),
        token_ids=np.array(token_ids, _TOKEN_IDS).tobytes(),
    )


def next_tokens_from_message(message: NextTokens) -> Iterable[NextToken]:
    """What it holds, in order.

    Raises:
        DataFault: its columns differ in length.
    """
    contents = (message.stream_ids, message.positions, message.token_ids)
    sizes = [dtype.itemsize for dtype in (_STREAM_IDS, _POSITIONS, _TOKEN_IDS)]
    counts = [len(content) / size for content, size in zip(contents, sizes, strict=True)]
    if counts != [len(message.token_ids) // _TOKEN_IDS.itemsize] * len(counts):
        raise DataFault("the core sent columns of different lengths", field="next_tokens")
    stream_ids, positions, token_ids = contents
    return zip(
        np.frombuffer(stream_ids, _STREAM_IDS).tolist(),
        np.frombuffer(positions, _POSITIONS).tolist(),
        np.frombuffer(token_ids, _TOKEN_IDS).tolist(),
        strict=True,
    )
