"""Settings of the worker service: frozen groups, one per component, which gets its group and never the whole.

Knows nothing of where values come from; `protos.service.config` loads them. What the scheduler must know of them
travels in `WorkerInfo`.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from protos.service.config import ConfigGroup, UserPath
from protos.service.histogram_buckets import WORKER_HISTOGRAMS, BucketTable, chosen_buckets
from protos.service.logs import LEVELS
from protos.service.security_config import TlsConfig, is_loopback
from protos.service.tracing import TraceEndpoint, TraceSettings
from protos.wire.bucket_lists import list_problem
from protos.wire.limits import MAX_PLAN_ROWS, MAX_PLAN_TOKENS, MAX_WINDOW

Port = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]


class LogFormat(StrEnum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


class Device(StrEnum):
    """Where the model runs."""

    CPU = "cpu"
    CUDA = "cuda"
    """The GPU that torch chooses. No kernel here has been run on one: see the README."""
    SIMULATED = "simulated"
    """Nowhere: a table of step times and made-up tokens, for load tests."""


class Numerics(StrEnum):
    """Which promise results carry."""

    REPRODUCIBLE = "reproducible"
    """A row's result does not depend on its batch or on chunking, bit for bit."""
    FAST = "fast"


class Kernels(StrEnum):
    """What computes fast numerics on the CPU."""

    AUTO = "auto"
    """The native kernels where they can run, else torch, which is logged."""
    NATIVE = "native"
    TORCH = "torch"


class Attention(StrEnum):
    """What computes attention where torch computes the rest."""

    AUTO = "auto"
    """The fastest that keeps the promise of the numerics; what is passed over is logged."""
    TORCH = "torch"
    TILED = "tiled"
    NATIVE = "native"
    FLASHINFER = "flashinfer"


class KVCanary(StrEnum):
    """What happens when a KV slot does not hold what it should."""

    OFF = "off"
    """Nothing is checked."""
    COUNT = "count"
    """It is logged and counted, and the row goes on."""
    REFUSE = "refuse"
    """The row fails, writes nothing, and is computed anew."""


class Graph(StrEnum):
    """Phases whose steps replay captured graphs."""

    OFF = "off"
    DECODE = "decode"
    PREFILL = "prefill"
    ALL = "all"


class GraphBackend(StrEnum):
    """How a graph is captured and replayed."""

    FULL = "full"
    """In one piece."""
    BREAKABLE = "breakable"
    """Attention runs eagerly between pieces."""
    COMPILED = "compiled"
    """torch.compile between attention calls; takes minutes to prepare."""


class Dtype(StrEnum):
    """Type of activations and KV."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"


class SimulatedChecks(StrEnum):
    """What of a row's pages a simulated device looks at."""

    PAGES = "pages"
    """Each of them: a wrong page anywhere is a wrong token."""
    LAST = "last"
    """The one that holds the last token before the row's new ones."""


class HiddenStates(StrEnum):
    """Final hidden states of a row. Ordered."""

    NULL = "null"
    LAST = "last"
    FULL = "full"


class ServerConfig(ConfigGroup):
    """Ports and the life of the process. Read by the service."""

    host: str = Field(default="127.0.0.1", description="Address the gRPC and health ports listen on.")
    port: Port = Field(default=50100, description="gRPC port for the scheduler; 0 = any free one.")
    health_port: Port = Field(default=50150, description="Plaintext health port; 0 = any free one.")
    load_timeout_s: Seconds = Field(default=900.0, description="Most seconds loading the weights may take.")
    drain_timeout_s: Seconds = Field(
        default=20.0, description="Most seconds the running plan may take to finish after SIGTERM."
    )


class ModelConfig(ConfigGroup):
    """Which model is served. Read at load."""

    model: str = Field(default="smollm2-135m-instruct", description="Model name, or path of a model folder.")
    model_cache: UserPath = Field(
        default=Path("~/.cache/forwardplane/models"), description="Folder that holds fetched models by name."
    )

    @property
    def folder(self) -> Path:
        """The model's folder: `model` itself when it is a folder, else the one of that name in the cache."""
        named = Path(self.model).expanduser()
        return named if named.is_dir() else self.model_cache / self.model


class ExecutorConfig(ConfigGroup):
    """How plans are executed. Read at load."""

    device: Device = Field(default=Device.CPU, description="Where the model runs.")
    numerics: Numerics = Field(default=Numerics.FAST, description="Which promise results carry.")
    dtype: Dtype = Field(default=Dtype.FLOAT32, description="Type of weights, activations and KV.")
    kernels: Kernels = Field(default=Kernels.AUTO, description="What computes fast numerics on the CPU.")
    prefill_attention: Attention = Field(default=Attention.AUTO, description="Attention of every step but decode.")
    decode_attention: Attention = Field(default=Attention.AUTO, description="Attention of decode steps.")
    kv_bytes: int | None = Field(default=None, ge=1, description="Bytes of the KV pools; unset = from free memory.")
    num_pages: int | None = Field(
        default=None,
        ge=2,
        description="Pages of the KV pool, one of which only takes what is padding; excludes kv_bytes.",
    )
    memory_fraction: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Share of the memory free at start that weights, graphs and KV pools may take; excludes kv_bytes "
        "and num_pages; unset = on the CPU a quarter of what the weights leave, on a GPU 0.9.",
    )
    kv_canary: KVCanary = Field(
        default=KVCanary.OFF, description="Check on every read that KV slots hold the tokens they should."
    )
    page_size: int = Field(default=16, ge=1, le=1024, description="Tokens a page.")
    max_rows: int = Field(default=256, ge=1, le=MAX_PLAN_ROWS, description="Most rows of a plan.")
    max_tokens: int = Field(default=2048, ge=1, le=MAX_PLAN_TOKENS, description="Most tokens of a plan.")
    window: int = Field(
        default=2, ge=1, le=MAX_WINDOW, description="Plans in flight: 2 = the next one is here when one ends; 1 = none."
    )
    threads: int | None = Field(
        default=None,
        ge=1,
        le=1024,
        description="CPU threads of one operator; unset = physical cores, or as many as measured steps say.",
    )

    @model_validator(mode="after")
    def _check_pool(self) -> "ExecutorConfig":
        if self.kv_bytes is not None and self.num_pages is not None:
            raise ValueError(f"kv_bytes {self.kv_bytes} and num_pages {self.num_pages} exclude each other")
        if self.memory_fraction is not None and (self.kv_bytes is not None or self.num_pages is not None):
            other = f"kv_bytes {self.kv_bytes}" if self.num_pages is None else f"num_pages {self.num_pages}"
            message = f"memory_fraction {self.memory_fraction} and {other} exclude each other: give one"
            raise ValueError(message)
        if self.numerics is Numerics.REPRODUCIBLE and self.dtype is not Dtype.FLOAT32:
            raise ValueError("numerics reproducible needs dtype float32")
        return self


class GraphConfig(ConfigGroup):
    """What is captured, where torch computes. Read at load."""

    graph: Graph = Field(default=Graph.ALL, description="Phases whose steps replay captured graphs.")
    decode_graph_backend: GraphBackend = Field(default=GraphBackend.FULL, description="Graphs of decode steps.")
    prefill_graph_backend: GraphBackend = Field(default=GraphBackend.BREAKABLE, description="Graphs of other steps.")
    decode_buckets: tuple[int, ...] = Field(
        default=(),
        description="Rows of the decode graphs, ascending; unset = 1,2,4,8,12,16,24 and on, to 64 on the CPU.",
    )
    prefill_buckets: tuple[int, ...] = Field(
        default=(), description="Tokens of the prefill graphs, ascending; unset = 16,32,48 and on, to 256 on the CPU."
    )
    graph_slots: int = Field(default=32, ge=1, le=MAX_PLAN_ROWS, description="Most rows of a prefill graph.")
    capture_wait_s: float = Field(
        default=10.0,
        ge=0,
        le=86_400,
        description="Most seconds that a piece of a capture above 100 ms waits for an idle device.",
    )
    graph_memory_file: UserPath = Field(
        default=Path("~/.cache/forwardplane/graph_memory.json"),
        description="File that remembers how much memory captured graphs take.",
    )
    debug_graph: bool = Field(
        default=False, description="Keep graph runners, static buffers and padding, but run each step eagerly in them."
    )


class SimulatedConfig(ConfigGroup):
    """The simulated device. Read at load; without meaning for other devices."""

    simulated_steps: UserPath | None = Field(
        default=None, description="TOML table of step times; unset = an H100-like device with an 8B model."
    )
    simulated_step_ms: float | None = Field(
        default=None, gt=0, le=60_000, description="Milliseconds that every step takes, in place of the table's."
    )
    simulated_eos_ratio: float = Field(
        default=0.0, ge=0, le=1, description="Share of positions at which the model ends its answer."
    )
    simulated_checks: SimulatedChecks = Field(
        default=SimulatedChecks.PAGES, description="pages: every page of a row is checked; last: only the last one."
    )


class HiddenStatesConfig(ConfigGroup):
    """Final hidden states of rows. Read at load."""

    max_hidden_mode: HiddenStates = Field(
        default=HiddenStates.FULL, description="Highest hidden mode that a row of a plan may ask for."
    )
    capture_hidden_mode: HiddenStates = Field(
        default=HiddenStates.NULL, description="Hidden mode that every forward keeps at least."
    )

    @model_validator(mode="after")
    def _check_order(self) -> "HiddenStatesConfig":
        order = list(HiddenStates)
        if order.index(self.capture_hidden_mode) > order.index(self.max_hidden_mode):
            raise ValueError("capture_hidden_mode is above max_hidden_mode")
        return self


class ObservabilityConfig(ConfigGroup):
    """Logs and metrics. Read by the composition root."""

    metrics_host: str = Field(default="127.0.0.1", description="Address the metrics port listens on.")
    metrics_port: Port = Field(default=9465, description="Metrics port; 0 = any free one.")
    log_level: str = Field(default="info", description="debug, info, warning or error.")
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="text or json.")
    trace_endpoint: TraceEndpoint = None

    histogram_buckets: str = Field(
        default="",
        description="NAME=LIMIT,LIMIT;NAME=LIMIT: buckets in place of the usual, by a histogram's name without "
        "forwardplane_worker_.",
    )

    @field_validator("histogram_buckets")
    @classmethod
    def _check_buckets(cls, value: str) -> str:
        chosen_buckets(value, WORKER_HISTOGRAMS)
        return value

    def buckets(self) -> BucketTable:
        """Of every histogram."""
        return chosen_buckets(self.histogram_buckets, WORKER_HISTOGRAMS)

    def traces(self) -> TraceSettings:
        """Where traces go. Of which plans, the scheduler decides."""
        return TraceSettings(endpoint=self.trace_endpoint)

    @field_validator("log_level")
    @classmethod
    def _check_level(cls, value: str) -> str:
        if value not in LEVELS:
            message = f"is none of {', '.join(LEVELS)}"
            raise ValueError(message)
        return value


class WorkerConfig(ConfigGroup):
    """Everything. Only composition roots hold it."""

    server: ServerConfig = ServerConfig()
    tls: TlsConfig = TlsConfig()
    model: ModelConfig = ModelConfig()
    executor: ExecutorConfig = ExecutorConfig()
    graphs: GraphConfig = GraphConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    hidden_states: HiddenStatesConfig = HiddenStatesConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _check_exposure(self) -> "WorkerConfig":
        if not (is_loopback(self.server.host) or self.tls.tls_dir or self.tls.insecure):
            message = (
                f"host = {self.server.host} can be reached from other machines, and whoever reaches it owns this "
                "worker: set tls_dir (a folder with tls.crt, tls.key and ca.crt), keep 127.0.0.1, or accept plain text "
                "with insecure"
            )
            raise ValueError(message)
        return self

    @model_validator(mode="after")
    def _check_buckets(self) -> "WorkerConfig":
        found = {
            "decode_buckets": list_problem(self.graphs.decode_buckets, limit=self.executor.max_rows),
            "prefill_buckets": list_problem(self.graphs.prefill_buckets, limit=self.executor.max_tokens),
        }
        problems = [f"{name} {problem}" for name, problem in found.items() if problem is not None]
        if problems:
            raise ValueError("; ".join(problems))
        return self
