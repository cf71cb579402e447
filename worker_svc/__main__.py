"""Entry point of a worker process: `python -m worker_svc [flags]`."""

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from protos.service.config import LoadedConfig, load_or_exit
from protos.service.lifecycle import exit_code_of
from protos.service.logs import configure_logs
from protos.service.ownership import assert_package_owner
from protos.service.runtime import assert_protobuf_backend
from protos.service.status import fault_border
from protos.wire.errors import EngineError
from worker_svc.app import run_worker, setting_problems
from worker_svc.app_simulated import run_simulated_worker
from worker_svc.config import Device, LogFormat, WorkerConfig
from worker_svc.executor import UNENDED_THREADS

_logger = logging.getLogger(__name__)


def main(arguments: Sequence[str]) -> int:
    """Run a worker; returns the process's exit code."""
    loaded = load_or_exit(
        WorkerConfig,
        arguments,
        program="worker_svc",
        description="A worker: runs forward plans on one device.",
        check=lambda config: setting_problems(config.executor),
    )
    _start_logs(loaded)
    try:
        with fault_border("worker process"):
            assert_package_owner()
            assert_protobuf_backend()
            is_simulated = loaded.value.executor.device is Device.SIMULATED
            serving = run_simulated_worker if is_simulated else run_worker
            return int(asyncio.run(serving(loaded.value)))
    except EngineError as error:
        return _refused(error)


def end(code: int) -> NoReturn:
    """End the process, whose services have stopped.

    A thread that compiles a graph, or whose device work outlasted the stop, would be ended by the interpreter in the
    middle of C++, which aborts the process: so nothing is torn down, and the system takes all at once.
    """
    if any(thread.name in UNENDED_THREADS for thread in threading.enumerate()):
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _refused(error: EngineError) -> int:
    """Say in one line what an operator must change; a bug's stack is in the log already."""
    _logger.error("cannot run", extra={"reason": error.reason, "field": error.field, "error": error.message})
    return int(exit_code_of(error))


def _start_logs(loaded: LoadedConfig[WorkerConfig]) -> None:
    observability = loaded.value.observability
    configure_logs(
        level=observability.log_level,
        json_lines=observability.log_format is LogFormat.JSON,
        process="worker",
    )
    for line in loaded.describe().splitlines():
        _logger.info("setting", extra={"setting": line})
    for warning in loaded.warnings:
        _logger.warning("setting not known", extra={"problem": warning})
    for note in loaded.notes:
        _logger.info("setting of another process", extra={"problem": note})


if __name__ == "__main__":
    end(main(sys.argv[1:]))
