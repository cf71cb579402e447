"""`forwardplane embed`: vectors of texts, one JSON line each."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Literal

from rich.console import Console

from protos.client.embed_messages import EmbedOptions
from protos.client.exit_codes import WrongUsage
from protos.client.generation_client import GenerationClient
from protos.client.server_access import ServerAccess

Pooling = Literal["last", "mean"]


def embed(texts: Sequence[str], console: Console, *, server: ServerAccess, pooling: Pooling) -> int:
    """Ask, and print each vector of length 1 with its usage. Returns the exit code.

    Raises:
        EngineError: bad usage, a refusal or a failure.
    """
    if not texts:
        raise WrongUsage("give one or more texts as arguments")
    with GenerationClient(server.target, credentials=server.credentials()) as client:
        made = client.embed(texts, EmbedOptions(pooling=pooling))
    for one in made:
        console.out(json.dumps({"embedding": one.values, "usage": asdict(one.usage)}), highlight=False)
    return 0
