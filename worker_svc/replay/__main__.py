"""Entry point of a replay: `python -m worker_svc.replay --recording FILE --model …`. Exits 0 when equal, 1 when not.

Writes one JSON object a line: progress, then the outcome.
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path

from pydantic import Field

from protos.service.config import ConfigGroup, LoadedConfig, UserPath, load_or_exit
from protos.service.lifecycle import exit_code_of
from protos.service.logs import configure_logs
from protos.service.model_files import ModelFolder, read_model_folder
from protos.service.plan_recording import EntryKind, read_entries, read_header
from protos.service.status import fault_border
from protos.wire.errors import DataFault, EngineError, InvalidModelFile, InvalidRequest
from protos.wire.worker_info import Buckets
from worker_svc import app, app_simulated
from worker_svc.config import (
    Device,
    ExecutorConfig,
    Graph,
    GraphConfig,
    LogFormat,
    ModelConfig,
    ObservabilityConfig,
    SimulatedConfig,
    WorkerConfig,
)
from worker_svc.executor import Executor
from worker_svc.replay.graph_choice import capture_all, with_graphs
from worker_svc.replay.replayer import Replayer, ReplayRules

_logger = logging.getLogger(__name__)

EQUAL, DIFFERENT = 0, 1
_PROGRESS_PLANS = 100


class Runner(StrEnum):
    """What runs the forwards."""

    EAGER = "eager"
    GRAPH = "graph"


class Comparison(StrEnum):
    """Whether results are compared."""

    ALL = "all"
    NONE = "none"


class ReplayConfig(ConfigGroup):
    """What is run again, and how results are compared."""

    recording: UserPath | None = Field(default=None, description="File of recorded plans; must be given.")
    recorded_worker: str = Field(default="", description="Worker whose plans are run; empty = the only one.")
    runner: Runner = Field(default=Runner.EAGER, description="What runs the forwards.")
    comparison: Comparison = Field(default=Comparison.ALL, description="all: tokens and log-probabilities; none.")
    logprob_tolerance_ratio: float = Field(default=0.0, ge=0, le=1, description="Most a log-probability may differ.")


class ReplayProgram(ConfigGroup):
    """Everything."""

    replay: ReplayConfig = ReplayConfig()
    model: ModelConfig = ModelConfig()
    executor: ExecutorConfig = ExecutorConfig()
    graphs: GraphConfig = GraphConfig()
    simulated: SimulatedConfig = SimulatedConfig()
    observability: ObservabilityConfig = ObservabilityConfig()


def main(arguments: Sequence[str]) -> int:
    """Run again and compare; returns the process's exit code."""
    loaded = load_or_exit(
        ReplayProgram,
        arguments,
        program="worker_svc.replay",
        description="Runs recorded plans again and compares.",
        check=lambda config: app.setting_problems(config.executor),
    )
    _start_logs(loaded)
    try:
        with fault_border("replay"):
            return replay(loaded.value)
    except EngineError as error:
        extra = {"reason": error.reason, "field": error.field, "error": error.message, "plan_seq": error.plan_seq}
        _logger.error("cannot replay", extra=extra)  # noqa: TRY400 (one line for the operator; a bug is logged already)
        _say({"error": error.message, "reason": error.reason, "plan_seq": error.plan_seq})
        return int(exit_code_of(error))


def replay(config: ReplayProgram) -> int:
    """Run the recording on a fresh executor; the exit code.

    Raises:
        EngineError: the recording, the model or a setting cannot be used.
    """
    if config.replay.recording is None:
        raise InvalidRequest("no recording is named", field="recording")
    path = config.replay.recording
    header = read_header(path)
    folder = read_model_folder(config.model.folder)
    if folder.card.weights_fingerprint != header.weights_fingerprint:
        message = f"{path.name} was recorded with other weights than those of {folder.card.name}"
        raise InvalidModelFile(message, field="model")
    worker = recorded_worker(path, config.replay.recorded_worker)
    executor = build_executor(folder, config)
    rules = ReplayRules(
        worker=worker,
        compares=config.replay.comparison is Comparison.ALL,
        logprob_tolerance=config.replay.logprob_tolerance_ratio,
        on_graphs=partial(with_graphs, buckets=_graphs(executor, config.replay.runner)),
    )
    replayer = Replayer(executor, rules)
    for number, _ in enumerate(replayer.run(read_entries(path)), start=1):
        if number % _PROGRESS_PLANS == 0:
            _say({"plans": replayer.counts.plans})
    first = None if replayer.first is None else asdict(replayer.first)
    _say(
        {
            "worker": rules.worker,
            "counts": asdict(replayer.counts),
            "first_difference": first,
            "cut": replayer.cut,
        }
    )
    return EQUAL if first is None else DIFFERENT


def recorded_worker(path: Path, wanted: str) -> str:
    """The worker whose plans are run: the wanted one, or the only one in the file.

    Raises:
        InvalidRequest: it is not there, or there are several.
        DataFault: the file is damaged before its first plan, or holds none.
    """
    workers: list[str] = []
    try:
        for entry in read_entries(path):
            if entry.kind is EntryKind.ATTACH and entry.worker not in workers:
                workers.append(entry.worker)
    except DataFault:
        if not workers:
            raise
        # The run finds it again, at its place.
    if not workers:
        raise DataFault(f"{path.name} holds no worker", field="recording")
    if wanted and wanted not in workers:
        raise InvalidRequest(f"{path.name} holds {', '.join(workers)}, not {wanted[:100]}", field="recorded_worker")
    if not wanted and len(workers) > 1:
        raise InvalidRequest(f"{path.name} holds {', '.join(workers)}: name one", field="recorded_worker")
    return wanted or workers[0]


def build_executor(folder: ModelFolder, config: ReplayProgram) -> Executor:
    """A fresh executor of the settings' device.

    Raises:
        EngineError: the model or a setting cannot be used.
    """
    if config.executor.device is Device.SIMULATED:
        worker = WorkerConfig(model=config.model, executor=config.executor, simulated=config.simulated)
        return app_simulated.build_executor(folder, worker)
    graphs = config.graphs if config.replay.runner is Runner.GRAPH else GraphConfig(graph=Graph.OFF)
    return app.build_executor(folder, WorkerConfig(model=config.model, executor=config.executor, graphs=graphs))


def _graphs(executor: Executor, runner: Runner) -> tuple[Buckets, ...]:
    if runner is Runner.EAGER:
        return ()
    return capture_all(executor, progress=lambda count: _say({"captured": count}))


def _say(content: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(content) + "\n")
    sys.stdout.flush()


def _start_logs(loaded: LoadedConfig[ReplayProgram]) -> None:
    observability = loaded.value.observability
    configure_logs(
        level=observability.log_level,
        json_lines=observability.log_format is LogFormat.JSON,
        process="replay",
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
