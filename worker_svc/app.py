"""Composition root of a worker over torch: the one place that joins the service to the device side."""

import importlib
import logging
from functools import partial

from protos.service.collector import keep_collector_away
from protos.service.config import prefer_environment
from protos.service.lifecycle import ExitCode
from protos.service.model_description import described_folder
from protos.service.model_files import ModelFolder, read_model_folder
from worker_svc.config import Device, ExecutorConfig, WorkerConfig
from worker_svc.executor import Executor
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService
from worker_svc.setting_rules import combination_problems

_logger = logging.getLogger(__name__)

_DEVICE_SIDE = "worker_svc.build"
"""Imported by name on the device thread: torch takes seconds to load, and the ports answer LOADING meanwhile."""

_GPU = "worker_svc.device.gpu"
"""The same of its question, whether there is one."""

_TORCH_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""The worker shares its cores with scheduler and callers. OpenMP threads that spin for a partner that is not running
made a step 40 times slower there (2,093 ms against 54 ms at one row, two busy cores)."""


def setting_problems(executor: ExecutorConfig) -> list[str]:
    """What is wrong with settings that are good each on its own: one line each.

    Loads torch only to ask for a GPU, which a CPU's worker does not need.
    """
    problems = combination_problems(executor)
    if executor.device is Device.CUDA:
        problem = importlib.import_module(_GPU).why_no_gpu()
        problems += [] if problem is None else [f"device = cuda: {problem}"]
    return problems


async def run_worker(config: WorkerConfig) -> ExitCode:
    """Serve until told to stop, or until the device fails; the code to exit with.

    Raises:
        EngineError: the model folder cannot be used, as far as its headers say.
    """
    folder = read_model_folder(config.model.folder)
    described_folder(folder)  # refused here, no port has been opened
    _logger.info("model", extra={"model": folder.card.name, "architecture": folder.card.architecture})
    build = partial(build_executor, folder, config)
    service = WorkerService(build, Listeners(config.server, config.observability, config.tls), config.server)
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
    keep_collector_away()
    return executor
