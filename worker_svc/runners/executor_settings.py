"""How plans are executed: what the composition root hands to the device side, as plain values."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorSettings:
    """How plans are executed. Made by the composition root, read once, at start."""

    numerics: str = "fast"
    """`reproducible` or `fast`."""
    dtype: str = "float32"
    """Of weights, activations and KV: `float32` or `bfloat16`."""
    device: str = "cpu"
    kernels: str = "auto"
    """Of fast numerics on the CPU: `auto`: native where they can run, else torch; `native`: or fail; `torch`."""
    prefill_attention: str = "auto"
    """Back-end of every step but decode: `auto`, or a name that `worker_svc/attention/choice.py` knows."""
    decode_attention: str = "auto"
    """Back-end of decode and idle steps."""
    page_size: int = 16
    """Tokens a page."""
    kv_bytes: int | None = None
    """Size of the KV pool. Neither this nor `num_pages`: a share of the free memory."""
    num_pages: int | None = None
    """Pages of the KV pool, the sink included."""
    memory_fraction: float | None = None
    """Of the memory free before the load: what weights, graphs and pools may take. Excludes both sizes. None: on the
    CPU a quarter of what the weights leave goes to the pools, on a GPU 0.9."""
    graph_memory_file: str | None = None
    """Where the memory of captured graphs is remembered. None: nothing is known of it."""
    kv_canary: str = "off"
    """Shadow of the KV pools: `off`, `count` mismatches, or `refuse` the rows that have them."""
    max_rows: int = 256
    """Most rows of a plan."""
    max_tokens: int = 2048
    """Most tokens of a plan."""
    window: int = 2
    """Most plans in flight."""
    threads: int | None = None
    """CPU threads of one operator. None: the physical cores, or as many of them as shorten native steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HiddenSettings:
    """Which final hidden states rows may ask for, and which every forward keeps: `null`, `last` or `full`."""

    max_hidden_mode: str = "full"
    """Highest that a row of a plan may ask for."""
    capture_hidden_mode: str = "null"
    """What every forward keeps at least; not above `max_hidden_mode`."""
