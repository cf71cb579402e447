"""Entry point of every process of the scheduler: `python -m scheduler_svc [flags]`."""

import asyncio
import logging
import pkgutil
import sys
from collections.abc import Sequence
from types import MappingProxyType

from protos.service.collector import keep_collector_away
from protos.service.config import LoadedConfig, load_or_exit
from protos.service.lifecycle import exit_code_of
from protos.service.logs import configure_logs
from protos.service.ownership import assert_package_owner
from protos.service.runtime import assert_protobuf_backend
from protos.service.status import fault_border
from protos.wire.errors import EngineError
from scheduler_svc.bridge.parent_watch import obey_parent, watch_parent
from scheduler_svc.config import LogFormat, Role, SchedulerConfig

_logger = logging.getLogger(__name__)

# By name, so that each process loads what its role needs: the core no tokenizer, the parent neither of the two.
_ROLES = MappingProxyType(
    {
        Role.PARENT: "scheduler_svc.parent:run_parent",
        Role.CORE: "scheduler_svc.app:run_core",
        Role.EDGE: "scheduler_svc.edge.edge_app:run_edge",
    }
)


def main(arguments: Sequence[str]) -> int:
    """Run the process that `arguments` ask for; returns its exit code."""
    loaded = load_or_exit(
        SchedulerConfig, arguments, program="scheduler_svc", description="The scheduler: one core, one or more edges."
    )
    config = loaded.value
    _start_logs(loaded)
    try:
        with fault_border("scheduler process"):
            assert_protobuf_backend()
            if config.process.role is Role.PARENT:
                assert_package_owner()
            return asyncio.run(_run(config, arguments))
    except EngineError as error:
        return _refused(error)


def _refused(error: EngineError) -> int:
    """Say in one line what an operator must change; a bug's stack is in the log already."""
    _logger.error("cannot run", extra={"reason": error.reason, "field": error.field, "error": error.message})
    return int(exit_code_of(error))


async def _run(config: SchedulerConfig, arguments: Sequence[str]) -> int:
    role = config.process.role
    if config.process.parent_fd >= 0:
        obey_parent()
        watch_parent(config.process.parent_fd)
    run = pkgutil.resolve_name(_ROLES[role])
    if role is Role.PARENT:
        return int(await run(config, arguments))
    keep_collector_away()
    if role is Role.EDGE:
        return int(await run(config, config.process.edge_index))
    return int(await run(config))


def _start_logs(loaded: LoadedConfig[SchedulerConfig]) -> None:
    config = loaded.value
    role = config.process.role
    name = f"edge-{config.process.edge_index}" if role is Role.EDGE else role.value
    configure_logs(
        level=config.observability.log_level.value,
        json_lines=config.observability.log_format is LogFormat.JSON,
        process=f"scheduler-{name}",
    )
    if role is Role.PARENT:
        for line in loaded.describe().splitlines():
            _logger.info("setting", extra={"setting": line})
        for warning in loaded.warnings:
            _logger.warning("setting not known", extra={"problem": warning})
        for note in loaded.notes:
            _logger.info("setting of another process", extra={"problem": note})


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
