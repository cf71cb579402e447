"""Settings of the scheduler service: frozen groups, one per component, which gets its group and never the whole.

Knows nothing of where values come from; `protos.service.config` loads them.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator, model_validator

from protos.service.config import ConfigGroup, UserPath
from protos.service.histogram_buckets import SCHEDULER_HISTOGRAMS, BucketTable, chosen_buckets
from protos.service.model_files import DEFAULT_MODEL_CACHE
from protos.service.security_config import TlsConfig, host_of, is_loopback
from protos.service.tracing import TraceEndpoint, TraceSettings
from scheduler_svc.cluster_config import ClusterConfig, Seconds

Port = Annotated[int, Field(ge=0, le=65535)]


class Role(StrEnum):
    """Which process of the service this one is. The parent starts the others."""

    PARENT = "parent"
    CORE = "core"
    EDGE = "edge"


class EpochSourceKind(StrEnum):
    """Where the scheduler's epoch comes from."""

    FILE = "file"
    WORKERS = "workers"
    KUBERNETES = "kubernetes"


class SchedulePolicy(StrEnum):
    """Who of the waiting requests goes next."""

    FCFS = "fcfs"
    LPM = "lpm"
    PRIORITY = "priority"


class LogLevel(StrEnum):
    """Severity of a log line."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """How a log line looks."""

    TEXT = "text"
    JSON = "json"


class HiddenStates(StrEnum):
    """Final hidden states of a prompt. Ordered."""

    NULL = "null"
    LAST = "last"
    FULL = "full"


class ProcessConfig(ConfigGroup):
    """The processes of one scheduler and how they end. Read by the parent and by each composition root."""

    role: Role = Field(default=Role.PARENT, description="Which process this is; the parent starts core and edges.")
    edges: int = Field(default=1, ge=1, le=64, description="Number of edge processes.")
    edge_index: int = Field(
        default=0, ge=0, le=63, description="Which of the edge processes this is. Set by the parent."
    )
    parent_fd: int = Field(
        default=-1, ge=-1, description="Descriptor that ends with the parent; -1 = none. Set by the parent."
    )
    socket_dir: UserPath | None = Field(
        default=None, description="Folder for the core's private socket folder. Default: temporary."
    )
    drain_timeout_s: Seconds = Field(
        default=20.0, description="Most seconds edges may finish streams in after SIGTERM."
    )
    edge_restarts: int = Field(
        default=5, ge=0, description="Restarts of edges within one minute before everything ends."
    )

    @model_validator(mode="after")
    def _check_child(self) -> "ProcessConfig":
        if self.role is not Role.PARENT and self.socket_dir is None:
            raise ValueError("a core or edge process needs socket_dir; the parent sets it")
        return self

    @property
    def socket_path(self) -> Path:
        """Where core and edges meet, once the parent has made the private folder."""
        assert self.socket_dir is not None, "the parent names the folder"
        return self.socket_dir / "core.sock"


class ModelConfig(ConfigGroup):
    """Which model is served. Read by the core (fingerprints) and the edges (tokenizer, template)."""

    model: str = Field(default="smollm2-135m-instruct", description="Model name, or path of a model folder.")
    model_cache: UserPath = Field(default=DEFAULT_MODEL_CACHE, description="Folder that holds fetched models by name.")

    @property
    def folder(self) -> Path:
        """The model's folder: `model` itself when it is a folder, else the one of that name in the cache."""
        named = Path(self.model).expanduser()
        return named if named.is_dir() else self.model_cache / self.model


class EdgeConfig(ConfigGroup):
    """The callers' side. Read by the edges."""

    host: str = Field(default="127.0.0.1", description="Address the callers' gRPC and HTTP ports listen on.")
    port: Port = Field(default=50051, description="Callers' gRPC port; 0 = any free one.")
    health_port: Port = Field(
        default=50052, description="Plaintext health port of edge 0; edge j listens j above it. 0 = any."
    )
    http_port: int | None = Field(
        default=None, ge=0, le=65535, description="Port of the OpenAI-compatible HTTP front; unset = none, 0 = any."
    )
    edge_metrics_port: Port = Field(
        default=9440, description="Metrics port of edge 0; edge j listens j above it. 0 = any."
    )
    max_hidden_mode: HiddenStates = Field(
        default=HiddenStates.NULL, description="Highest hidden states that callers may ask for: null, last or full."
    )
    max_streams: int = Field(
        default=2048,
        ge=1,
        description="Most calls one edge serves at once, and most streams: a call has one for each sample of a prompt, "
        "up to 1024.",
    )


class ResumeConfig(ConfigGroup):
    """What outlives a scheduler. Read by the edges."""

    resume_key_file: UserPath | None = Field(
        default=None,
        description="File of keys, one a line in hexadecimal, 32 bytes or more: the first seals the tickets with which "
        "callers go on after a scheduler's death, each opens them; unset = they cannot.",
    )


class CallerCertificates(StrEnum):
    """Whether callers must have a certificate of the authority in `caller_tls_dir`."""

    NONE = "none"
    REQUIRED = "required"


class SchedulerTlsConfig(TlsConfig):
    """Who may connect, and how it is protected. Read by composition roots."""

    caller_tls_dir: UserPath | None = Field(
        default=None,
        description="Folder with tls.crt and tls.key of the callers' gRPC and HTTP ports; re-read when they change; "
        "unset = plain text.",
    )
    caller_certificates: CallerCertificates = Field(
        default=CallerCertificates.NONE,
        description="required: only callers with a certificate of ca.crt in caller_tls_dir can connect.",
    )
    callers: UserPath | None = Field(
        default=None,
        description="TOML file of callers, hashes of their tokens and their quotas; unset = everybody may call.",
    )

    @model_validator(mode="after")
    def _check_certificates(self) -> "SchedulerTlsConfig":
        if self.caller_certificates is CallerCertificates.REQUIRED and self.caller_tls_dir is None:
            raise ValueError("caller_certificates required needs caller_tls_dir")
        return self


class CoreConfig(ConfigGroup):
    """Scheduling. Read by the core."""

    budget_tokens: int | None = Field(
        default=None, ge=1, description="Fixed prefill tokens a plan; unset = from the cost model."
    )
    target_step_ms: float | None = Field(
        default=None, gt=0, le=60_000, description="Milliseconds a plan may take by the cost model; unset = by device."
    )
    schedule_policy: SchedulePolicy = Field(
        default=SchedulePolicy.FCFS, description="Who goes next: fcfs, lpm (most cached tokens) or priority."
    )
    priority_aging_s: Seconds = Field(
        default=10.0, description="Seconds of waiting that weigh as much as one level of priority."
    )
    first_new_token_ratio: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description="Share of its output that pages are kept free for at a request's admission, at first.",
    )
    least_new_token_ratio: float = Field(
        default=0.1, ge=0, le=1, description="The least that share falls to while no request is retracted."
    )
    new_token_ratio_decay_steps: int = Field(
        default=600, ge=1, description="Decode steps in which that share falls from its first value to its least."
    )
    max_waiting_requests: int = Field(
        default=1024,
        ge=1,
        description="Most requests that wait for admission, each sample counted; a call with more is never taken.",
    )

    @model_validator(mode="after")
    def _check_ratios(self) -> "CoreConfig":
        if self.least_new_token_ratio > self.first_new_token_ratio:
            raise ValueError("least_new_token_ratio is above first_new_token_ratio")
        return self


class GrammarConfig(ConfigGroup):
    """Structured output. Read by the edges, which try grammars out, and by the core, whose rows are masked."""

    grammar_processes: int = Field(default=1, ge=1, le=64, description="Processes of the core that make masks.")
    grammar_cpu_s: int = Field(
        default=2, ge=1, le=60, description="Most seconds of processor time one grammar or mask may take."
    )
    grammar_memory_bytes: int = Field(
        default=512 << 20, ge=64 << 20, description="Most memory of a grammar process, beside its tokenizer."
    )
    grammar_cache_bytes: int = Field(
        default=64 << 20, ge=0, description="Most memory of compiled grammars that a grammar process keeps."
    )


class LinksConfig(ConfigGroup):
    """Connections to the workers. Read by the worker links."""

    workers: tuple[str, ...] = Field(default=("127.0.0.1:50100",), description="Workers, HOST:PORT each.")
    epoch_source: EpochSourceKind = Field(
        default=EpochSourceKind.WORKERS,
        description="file: a counter file; kubernetes: an annotation of epoch_object; workers: above what workers saw "
        "(one scheduler only).",
    )
    epoch_file: UserPath | None = Field(default=None, description="Counter file of the epoch source `file`.")
    epoch_object: str | None = Field(
        default=None, min_length=1, description="ConfigMap that carries the epoch of the source `kubernetes`."
    )
    attach_timeout_s: Seconds = Field(default=10.0, description="Most seconds one attach may take.")
    open_timeout_s: Seconds = Field(
        default=5.0, description="Most seconds opening or writing to the plan stream may take."
    )
    plan_timeout_s: Seconds = Field(
        default=60.0, description="Most seconds the device may stand still on a plan without budget."
    )
    report_interval_ms: int = Field(
        default=250, ge=10, le=10_000, description="Milliseconds between a worker's reports."
    )
    report_late_s: Seconds = Field(
        default=1.0, description="Seconds without a report after which a worker gets no new requests."
    )
    report_lost_s: Seconds = Field(
        default=2.75, description="Seconds without a report after which a worker counts as lost."
    )
    reattach_min_s: Seconds = Field(default=0.1, description="First pause before attaching again.")
    reattach_max_s: Seconds = Field(default=1.0, description="Longest pause before attaching again.")

    @field_validator("workers")
    @classmethod
    def _check_workers(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value:
            raise ValueError("names no worker")
        if len(set(value)) != len(value):
            raise ValueError("names a worker twice")
        for address in value:
            host, _, port = address.rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) <= 65535:
                message = f"{address!r} is not HOST:PORT"
                raise ValueError(message)
        return value

    @model_validator(mode="after")
    def _check_epoch_file(self) -> "LinksConfig":
        if self.epoch_source is EpochSourceKind.FILE and self.epoch_file is None:
            raise ValueError("epoch_source file needs epoch_file")
        if self.epoch_source is EpochSourceKind.KUBERNETES and self.epoch_object is None:
            raise ValueError("epoch_source kubernetes needs epoch_object")
        return self


class RecordingConfig(ConfigGroup):
    """Recording of plans and results for replay. Read by the worker links. Files hold token ids."""

    record: UserPath | None = Field(default=None, description="File to record every plan and result in; unset = none.")
    record_bytes: int = Field(default=256 << 20, ge=1 << 12, description="Size at which a new file is begun.")
    record_files: int = Field(default=4, ge=1, le=1000, description="Files that are kept, the newest one included.")


class ObservabilityConfig(ConfigGroup):
    """Logs and metrics. Read by each composition root."""

    metrics_host: str = Field(default="127.0.0.1", description="Address all metrics ports listen on.")
    metrics_port: Port = Field(default=9464, description="Metrics port of the core; 0 = any free one.")
    log_level: LogLevel = Field(default=LogLevel.INFO, description="Least severe lines that are logged.")
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="Lines for people, or one JSON object a line.")
    trace_endpoint: TraceEndpoint = None
    trace_ratio: float = Field(
        default=1.0, ge=0, le=1, description="Share of calls that are traced, of those whose caller did not decide."
    )
    trace_plan_ratio: float = Field(
        default=0.01, ge=0, le=1, description="Share of a traced request's plans that have a span, on workers too."
    )

    histogram_buckets: str = Field(
        default="",
        description="NAME=LIMIT,LIMIT;NAME=LIMIT: buckets in place of the usual, by a histogram's name without "
        "forwardplane_scheduler_.",
    )

    @field_validator("histogram_buckets")
    @classmethod
    def _check_buckets(cls, value: str) -> str:
        chosen_buckets(value, SCHEDULER_HISTOGRAMS)
        return value

    def buckets(self) -> BucketTable:
        """Of every histogram."""
        return chosen_buckets(self.histogram_buckets, SCHEDULER_HISTOGRAMS)

    def traces(self) -> TraceSettings:
        """Where traces go, and of which calls."""
        return TraceSettings(endpoint=self.trace_endpoint, ratio=self.trace_ratio)


class SchedulerConfig(ConfigGroup):
    """Everything. Only composition roots hold it."""

    process: ProcessConfig = ProcessConfig()
    model: ModelConfig = ModelConfig()
    edge: EdgeConfig = EdgeConfig()
    resume: ResumeConfig = ResumeConfig()
    tls: SchedulerTlsConfig = SchedulerTlsConfig()
    core: CoreConfig = CoreConfig()
    grammar: GrammarConfig = GrammarConfig()
    links: LinksConfig = LinksConfig()
    cluster: ClusterConfig = ClusterConfig()
    recording: RecordingConfig = RecordingConfig()
    observability: ObservabilityConfig = ObservabilityConfig()

    @model_validator(mode="after")
    def _check_together(self) -> "SchedulerConfig":
        problems = [*self._exposures(), *self._contradictions()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _contradictions(self) -> list[str]:
        if self.cluster.lease_object is not None and self.links.epoch_source is not EpochSourceKind.KUBERNETES:
            return ["lease_object needs epoch_source kubernetes: the Lease elects, the epoch protects"]
        return []

    def _exposures(self) -> list[str]:
        if self.tls.insecure:
            return []
        problems = []
        if not is_loopback(self.edge.host) and self.tls.caller_tls_dir is None:
            problems.append(
                f"host = {self.edge.host} can be reached from other machines in plain text: set caller_tls_dir (a "
                "folder with tls.crt and tls.key) and callers (a file of tokens)"
            )
        far = [worker for worker in self.links.workers if not is_loopback(host_of(worker))]
        if self.tls.tls_dir is None and (far or self.cluster.worker_service):
            problems.append("workers on other machines get plans in plain text: set tls_dir here and for the workers")
        if problems:
            problems[-1] += "; or keep to 127.0.0.1, or accept plain text with insecure"
        return problems
