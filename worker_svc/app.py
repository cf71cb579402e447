"""Composition root of a worker over torch: the one place that joins the service to the device side."""

import importlib
import logging
from functools import partial

from protos.service.config import prefer_environment
from protos.service.lifecycle import ExitCode
from protos.service.model_description import described_folder
from protos.service.model_files import ModelFolder, read_model_folder
from worker_svc.config import WorkerConfig
from worker_svc.executor import Executor
from worker_svc.rpc.service import WorkerService

_logger = logging.getLogger(__name__)

_DEVICE_SIDE = "worker_svc.build"
"""Imported by name on the device thread: torch takes seconds to load, and the ports answer LOADING meanwhile."""

_TORCH_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The worker shares its cores with scheduler and callers. OpenMP threads that spin for a partner that is not running
made a step 40 times slower there (2,093 ms against 54 ms at one row, two busy cores)."""


async def run_worker(config: WorkerConfig) -> ExitCode:
    """Serve until told to stop, or until the device fails; the code to exit with.

    Raises:
        EngineError: the model folder cannot be used, as far as its headers say.
    """
    folder = read_model_folder(config.model.folder)
    described_folder(folder)  # refused here, no port has been opened
    _logger.info("model", extra={"model": folder.card.name, "architecture": folder.card.architecture})
    build = partial(build_executor, folder, config)
    service = WorkerService(build, server=config.server, observability=config.observability, tls=config.tls)
    return await service.run()


def build_executor(folder: ModelFolder, config: WorkerConfig) -> Executor:
    """The executor of these settings, made on the calling thread.

    Raises:
        EngineError: the model or a setting cannot be used.
    """
    prefer_environment(_TORCH_ENVIRONMENT)
    device_side = importlib.import_module(_DEVICE_SIDE)
    settings = device_side.executor_settings(
        config.executor.model_dump(mode="json"), config.graphs.model_dump(mode="json")
    )
    hidden = device_side.HiddenSettings(**config.hidden_states.model_dump(mode="json"))
    executor: Executor = device_side.build_tp_model_worker(folder, settings, hidden=hidden)
    return executor
