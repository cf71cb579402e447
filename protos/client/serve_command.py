"""`forwardplane serve`: one scheduler and its workers on this machine, as separate processes of one group.

Parses and starts; imports neither service. The model is fetched first, so that the processes only read files.
"""

import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Annotated, Literal

from cyclopts import Parameter, validators
from rich.console import Console

from protos.client.fetch_model import model_for_device
from protos.client.process_group import ProcessGroup, ServiceCommand
from protos.client.serve_execution import AS_THE_WORKER_CHOOSES, OWN_LIMITS, ServeExecution, WorkerOptions, given_flags
from protos.client.serve_files import NO_FILES, ServeFiles
from protos.client.simulated_model import SIMULATED_MODEL
from protos.service.config import ConfigError
from protos.service.lifecycle import SAME_SIGNAL_S
from protos.service.model_files import ModelFolder
from protos.service.private_folder import private_folder, remove_abandoned
from protos.service.security_config import is_loopback
from protos.service.server import prove_port_free
from protos.wire.errors import InvalidRequest

GENERATION_SERVICE = "forwardplane.v1.GenerationService"
WORKER_SERVICE = "forwardplane.v1.WorkerService"
DEFAULT_MODEL = "smollm2-135m-instruct"
DEFAULT_HTTP_PORT = 8000
START_TIMEOUT_S = 300.0

Port = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=65535))]
OptionalPort = Annotated[int, Parameter(validator=validators.Number(gte=0, lte=65535))]


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServePorts:
    """Where the processes listen. Worker i takes its three ports + i."""

    host: str = "127.0.0.1"
    """Address that callers reach."""
    port: Port = 50051
    """gRPC port of callers."""
    http_port: OptionalPort | None = None
    """OpenAI-compatible HTTP port of callers; 0: none. Default: 8000, and none for a demo."""
    health_port: Port = 50052
    """Plaintext gRPC health port of the scheduler."""
    metrics_port: Port = 9464
    """HTTP port of the scheduler core's metrics."""
    edge_metrics_port: Port = 9440
    """HTTP port of the first edge's metrics."""
    worker_port: Port = 50100
    """gRPC port of the first worker."""
    worker_health_port: Port = 50150
    """Plaintext gRPC health port of the first worker."""
    worker_metrics_port: Port = 9465
    """HTTP port of the first worker's metrics."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedOptions:
    """What the device `simulated` is like; refused for others."""

    simulated_steps: Annotated[Path | None, Parameter(validator=validators.Path(exists=True, dir_okay=False))] = None
    """TOML table of step times. Default: an H100-like device with an 8B model."""
    simulated_step_ms: Annotated[float | None, Parameter(validator=validators.Number(gt=0, lte=60_000))] = None
    """Milliseconds of every step, in place of the table's."""
    simulated_eos_ratio: Annotated[float | None, Parameter(validator=validators.Number(gte=0, lte=1))] = None
    """Share of positions at which the model ends its answer. Default: 0."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSecurity:
    """Who may call, and how calls are protected. On 127.0.0.1 nothing is needed."""

    tls_dir: Path | None = None
    """Folder with tls.crt and tls.key of the callers' ports; read again when they change."""
    callers: Path | None = None
    """TOML file of callers, hashes of their tokens and their quotas. Default: everybody may call."""
    insecure: Annotated[bool, Parameter(negative=())] = False
    """Accept plain text from other machines."""
    hardened: Annotated[bool, Parameter(negative=())] = False
    """No reflection, and no patience with clients that ping too often."""


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What to serve, how, and on which ports."""

    model: str | None = None
    """Name of a known model (see `fetch-model`), a model folder, or a .gguf file. Default: smollm2-135m-instruct, and
    simulated-8b for the device `simulated`."""
    model_cache: Path | None = None
    """Folder of fetched models. Default: ~/.cache/forwardplane/models."""
    device: Literal["cpu", "cuda", "simulated"] = "cpu"
    """Where workers run. `cuda`: on a GPU, on which no kernel of this release has ever been run. `simulated`: nowhere;
    a table of step times and made-up tokens, for load tests."""
    numerics: Literal["fast", "reproducible"] = "fast"
    """`reproducible`: a request's tokens are bit-identical in any batch; slower."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of weights, activations and KV, where torch computes; residuals and scores stay float32."""
    workers: Annotated[int, Parameter(validator=validators.Number(gte=1, lte=16))] = 1
    """Worker processes; each request runs on one of them."""
    budget_tokens: Annotated[int | None, Parameter(validator=validators.Number(gte=16, lte=65536))] = None
    """Prefill tokens of one plan, fixed. Default: the scheduler's own choice."""
    schedule_policy: Literal["fcfs", "lpm", "priority"] | None = None
    """Who of a caller's waiting requests goes next: who came first, who has most of its prompt cached, or who says so
    with `priority`. Default: fcfs."""
    max_hidden_mode: Literal["null", "last", "full"] = "null"
    """Highest hidden states of a prompt that callers may ask for."""
    log_level: Literal["debug", "info", "warning", "error"] = "warning"
    """What the processes log to stderr."""
    execution: ServeExecution = AS_THE_WORKER_CHOOSES
    """What computes."""
    security: ServeSecurity = ServeSecurity()
    """Who may call."""
    ports: ServePorts = ServePorts()
    """Where they listen."""
    limits: WorkerOptions = OWN_LIMITS
    """Limits of each worker."""
    simulated: SimulatedOptions = SimulatedOptions()
    """What the device `simulated` is like."""
    files: ServeFiles = NO_FILES
    """Files of the scheduler."""

    @property
    def model_name(self) -> str:
        """The model asked for, or the device's default."""
        return self.model or (SIMULATED_MODEL if self.device == "simulated" else DEFAULT_MODEL)


def resolve_model(options: ServeOptions, console: Console) -> ModelFolder:
    """The folder of the model to serve, fetched or prepared when it is not there yet.

    Raises:
        InvalidModelFile, UnknownModel, UnsupportedFeature: the name or the files cannot be used.
    """
    with console.status(f"model {options.model_name}") as status:

        def show(message: str) -> None:
            status.update(message)

        return model_for_device(options.model_name, device=options.device, cache=options.model_cache, progress=show)


def service_commands(options: ServeOptions, folder: ModelFolder) -> list[ServiceCommand]:
    """The processes of the group, workers first.

    Raises:
        ConfigError: other machines could read along, and that was not asked for.
        EngineError: a port cannot be had.
    """
    _check_exposure(options)
    _check_ports(options)
    workers = [_worker_command(options, folder, index) for index in range(options.workers)]
    return [*workers, _scheduler_command(options, folder)]


def _worker_command(options: ServeOptions, folder: ModelFolder, index: int) -> ServiceCommand:
    arguments = {
        "--model": str(folder.path),
        "--device": options.device,
        "--numerics": options.numerics,
        "--dtype": options.dtype,
        "--port": str(options.ports.worker_port + index),
        "--health-port": str(options.ports.worker_health_port + index),
        "--metrics-port": str(options.ports.worker_metrics_port + index),
        "--log-level": options.log_level,
    }
    return ServiceCommand(
        name=f"worker {index}",
        arguments=("-m", "worker_svc", *_flags(arguments | _chosen(options))),
        health_target=f"127.0.0.1:{options.ports.worker_health_port + index}",
        health_service=WORKER_SERVICE,
        restarts=True,
    )


def _chosen(options: ServeOptions) -> dict[str, str]:
    """Flags of a worker that are given only when the user gave them."""
    given = {"--hardened": options.security.hardened}
    return options.execution.flags() | options.limits.flags() | given_flags(given) | simulated_flags(options)


def simulated_flags(options: ServeOptions) -> dict[str, str]:
    """Flags of a worker that say what the simulated device is like; those that were given.

    Raises:
        InvalidRequest: the device is another.
    """
    flags = given_flags(
        {
            "--simulated-steps": options.simulated.simulated_steps,
            "--simulated-step-ms": options.simulated.simulated_step_ms,
            "--simulated-eos-ratio": options.simulated.simulated_eos_ratio,
        }
    )
    if flags and options.device != "simulated":
        name = next(iter(flags))
        raise InvalidRequest(f"{name} needs --device simulated; it is {options.device}", field=name)
    return flags


def _scheduler_command(options: ServeOptions, folder: ModelFolder) -> ServiceCommand:
    arguments = {
        "--model": str(folder.path),
        "--host": options.ports.host,
        "--port": str(options.ports.port),
        "--health-port": str(options.ports.health_port),
        "--metrics-port": str(options.ports.metrics_port),
        "--edge-metrics-port": str(options.ports.edge_metrics_port),
        "--workers": ",".join(f"127.0.0.1:{options.ports.worker_port + index}" for index in range(options.workers)),
        "--max-hidden-mode": options.max_hidden_mode,
        "--log-level": options.log_level,
    }
    if options.ports.http_port:
        arguments["--http-port"] = str(options.ports.http_port)
    if options.budget_tokens is not None:
        arguments["--budget-tokens"] = str(options.budget_tokens)
    if options.schedule_policy is not None:
        arguments["--schedule-policy"] = options.schedule_policy
    return ServiceCommand(
        name="scheduler",
        arguments=("-m", "scheduler_svc", *_flags(arguments | options.files.flags() | _guarded(options.security))),
        health_target=f"127.0.0.1:{options.ports.health_port}",
        health_service=GENERATION_SERVICE,
        restarts=options.files.resume_key_file is not None,
    )


def _check_exposure(options: ServeOptions) -> None:
    security = options.security
    if not (is_loopback(options.ports.host) or security.tls_dir or security.insecure):
        message = (
            f"--host {options.ports.host} can be reached from other machines, in plain text: give --tls-dir (a folder "
            "with tls.crt and tls.key) and --callers (a file of tokens), keep 127.0.0.1, or accept it with --insecure"
        )
        raise ConfigError([message])


def _guarded(security: ServeSecurity) -> dict[str, str]:
    """Flags of a scheduler that are given only when the user gave them."""
    return given_flags(
        {
            "--caller-tls-dir": security.tls_dir and security.tls_dir.absolute(),
            "--callers": security.callers and security.callers.absolute(),
            "--insecure": security.insecure,
            "--hardened": security.hardened,
        }
    )


def _flags(arguments: dict[str, str]) -> list[str]:
    return [part for pair in arguments.items() for part in pair]


def _check_ports(options: ServeOptions) -> None:
    taken: dict[int, str] = {}
    single = ("port", "http_port", "health_port", "metrics_port", "edge_metrics_port")
    ports = [(name, getattr(options.ports, name)) for name in single if getattr(options.ports, name)]
    for index in range(options.workers):
        ports += [(f"{name} + {index}", getattr(options.ports, name) + index) for name in _WORKER_PORTS]
    for name, port in ports:
        if port in taken:
            raise InvalidRequest(f"port {port} is asked for twice: {taken[port]} and {name}", field=name)
        prove_port_free(options.ports.host, port)
        taken[port] = name


_WORKER_PORTS = ("worker_port", "worker_health_port", "worker_metrics_port")


def serve(options: ServeOptions, console: Console) -> int:
    """Run until a signal or the end of a child that cannot be started again. Returns the exit code.

    Raises:
        EngineError: the model, a port or a process is not usable.
    """
    with private_folder() as folder:
        return _serve(replace(options, files=options.files.with_key(folder)), console)


def _serve(options: ServeOptions, console: Console) -> int:
    if options.ports.http_port is None:
        options = replace(options, ports=replace(options.ports, http_port=DEFAULT_HTTP_PORT))
    stop = threading.Event()
    group = ProcessGroup(notice=lambda text: console.print(text, highlight=False, markup=False))
    _stop_on_signal(stop, group, console)
    begin = time.monotonic()
    try:
        group.start(service_commands(options, resolve_model(options, console)))
        start_serving(group, console, stop)
        if not stop.is_set():
            console.print(f"serving {options.model_name} on {_where(options.ports)}", highlight=False)
            console.print(f"ready after {time.monotonic() - begin:.1f} s; Ctrl-C stops", style="dim", highlight=False)
        while not stop.wait(0.5):
            group.supervise()
    finally:
        code = group.stop()
        remove_abandoned()  # of a scheduler that was killed
    return 0 if code == 0 else 1


def _stop_on_signal(stop: threading.Event, group: ProcessGroup, console: Console) -> None:
    """The first signal asks for an orderly stop, a later one ends everything at once."""
    asked_at: list[float] = []

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()
        if not asked_at:
            asked_at.append(now)
            stop.set()
            console.print("stopping: running streams may finish; Ctrl-C again ends them", style="dim", highlight=False)
        elif now - asked_at[0] > SAME_SIGNAL_S:
            group.kill()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, on_signal)


def _where(ports: ServePorts) -> str:
    http = f" and http://{ports.host}:{ports.http_port}/v1" if ports.http_port else ""
    return f"{ports.host}:{ports.port}{http}"


def start_serving(group: ProcessGroup, console: Console, stop: threading.Event) -> None:
    """Wait until everything serves, showing for what; returns early when `stop` is set.

    Raises:
        EngineError: a process ended or did not serve in time.
    """
    with console.status("starting") as status:

        def show(name: str, elapsed_s: float) -> None:
            status.update(f"waiting for {name} ({elapsed_s:.0f} s)")
            if stop.is_set():
                raise _Stopped

        try:
            group.wait_serving(timeout_s=START_TIMEOUT_S, progress=show)
        except _Stopped:
            return


class _Stopped(Exception):
    """A signal arrived while starting."""
