"""Composition root of a simulated worker: the same service over a cost model. Never imports torch."""

import logging
from functools import partial

from protos.service.collector import keep_collector_away
from protos.service.lifecycle import ExitCode
from protos.service.model_files import ModelFolder, read_model_folder
from worker_svc.config import SimulatedChecks, WorkerConfig
from worker_svc.executor import Executor
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService
from worker_svc.simulated.build import SimulatedSettings, build_simulated_executor

_logger = logging.getLogger(__name__)


async def run_simulated_worker(config: WorkerConfig) -> ExitCode:
    """Serve until told to stop; the code to exit with.

    Raises:
        EngineError: the model folder cannot be used.
    """
    folder = read_model_folder(config.model.folder)
    _logger.warning("the device is simulated: tokens have no meaning", extra={"model": folder.card.name})
    build = partial(build_executor, folder, config)
    keep_collector_away()
    service = WorkerService(build, Listeners(config.server, config.observability, config.tls), config.server)
    return await service.run()


def build_executor(folder: ModelFolder, config: WorkerConfig) -> Executor:
    """The executor of these settings.

    Raises:
        EngineError: a setting cannot be used.
    """
    executor, simulated = config.executor, config.simulated
    settings = SimulatedSettings(
        step_times=simulated.simulated_steps,
        step_ms=simulated.simulated_step_ms,
        num_pages=executor.num_pages,
        kv_bytes=executor.kv_bytes,
        page_size=executor.page_size,
        max_rows=executor.max_rows,
        max_tokens=executor.max_tokens,
        window=executor.window,
        eos_ratio=simulated.simulated_eos_ratio,
        checks_pages=simulated.simulated_checks is SimulatedChecks.PAGES,
    )
    return build_simulated_executor(folder.card, settings)
