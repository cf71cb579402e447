"""What a served worker computes with and its limits, as options of `serve` and as flags of a worker."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Literal

from cyclopts import Parameter, validators

from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS

AttentionName = Literal["auto", "torch", "tiled", "native", "flashinfer"]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeExecution:
    """What computes, and what is captured. Unset: as the worker chooses."""

    kernels: Literal["auto", "native", "torch"] | None = None
    """What computes fast numerics on the CPU. Default: native where it can run, else torch."""
    prefill_attention: AttentionName | None = None
    """Attention of every step but decode, where torch computes. Default: the best that there is."""
    decode_attention: AttentionName | None = None
    """Attention of decode steps, where torch computes; shares its KV pages with the other."""
    graph: Literal["off", "decode", "prefill", "all"] | None = None
    """Phases whose steps replay captured graphs, where torch computes. Default: all."""
    decode_buckets: str | None = None
    """Rows of the decode graphs, ascending, such as 1,2,4; see `buckets advise`. Default: the worker's own."""
    prefill_buckets: str | None = None
    """Tokens of the prefill graphs, ascending. Default: the worker's own."""
    decode_graph_backend: Literal["full", "breakable", "compiled"] | None = None
    """What captures decode steps. Default: full."""
    prefill_graph_backend: Literal["full", "breakable", "compiled"] | None = None
    """What captures other steps. Default: breakable."""
    debug_graph: Annotated[bool, Parameter(negative="")] = False
    """Keep graph runners, static buffers and padding, but run each step eagerly in them."""
    window: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=8))] = None
    """Plans in flight on a worker. Default: 2, so that no worker waits for the next plan."""
    kv_canary: Literal["off", "count", "refuse"] | None = None
    """Check on every read that KV slots hold the row's own tokens. Default: off."""

    def flags(self) -> dict[str, str]:
        """Of a worker: those that were given."""
        return given_flags({f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)})


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Limits of each worker."""

    num_pages: Annotated[int | None, Parameter(validator=validators.Number(gte=2))] = None
    """KV pages of each worker, one of which only takes what is padding: 2 or more. Default: what its memory gives."""
    memory_fraction: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=1))] = None
    """Share of the memory free at start that weights, graphs and KV pages may take, in place of --num-pages. Default:
    on the CPU a quarter of what the weights leave for KV pages, on a GPU 0.9."""
    max_rows: Annotated[int | None, Parameter(validator=validators.Number(gte=1, lte=MAX_PLAN_ROWS))] = None
    """Most requests that run on a worker at once. Default: 256."""
    max_tokens_per_plan: Annotated[int | None, Parameter(validator=validators.Number(gte=17, lte=MAX_PLAN_TOKENS))] = (
        None
    )
    """Most tokens of one plan. Default: 2048."""

    def flags(self) -> dict[str, str]:
        """Of a worker: those that were given."""
        return given_flags(
            {
                "--num-pages": self.num_pages,
                "--memory-fraction": self.memory_fraction,
                "--max-rows": self.max_rows,
                "--max-tokens": self.max_tokens_per_plan,
            }
        )


def given_flags(values: Mapping[str, object]) -> dict[str, str]:
    """Flags of a service with their texts, without those that are None or False, which the user did not give."""
    given = {name: value for name, value in values.items() if value is not None and value is not False}
    return {name: "true" if value is True else str(value) for name, value in given.items()}


AS_THE_WORKER_CHOOSES = ServeExecution()
OWN_LIMITS = WorkerOptions()
