"""Composition root of a worker process over `FakeExecutor`: `python -m tests.support.fake_worker_process [flags]`.

Behind the worker's own flags: `slow=SECONDS` before the load ends, `fault=SEQ` for a device that breaks there.
"""

import asyncio
import sys
import time

from protos.service.config import load_or_exit
from protos.service.logs import configure_logs
from protos.wire.errors import DeviceFault
from tests.support.fake_executor import FakeExecutor
from tests.support.plans import make_info, make_limits
from worker_svc.config import LogFormat, WorkerConfig
from worker_svc.rpc.listeners import Listeners
from worker_svc.rpc.service import WorkerService


async def run(config, options):
    def build():
        time.sleep(float(options.get("slow", 0)))
        fault = DeviceFault("the fake device broke")
        info = make_info(limits=make_limits(window=1))
        return FakeExecutor(info, fault_at_seq=int(options.get("fault", 0)), fault=fault)

    service = WorkerService(build, Listeners(config.server, config.observability, config.tls), config.server)
    return await service.run()


def main(arguments):
    flags = [argument for argument in arguments if argument.startswith("--") or "=" not in argument]
    options = dict(argument.split("=") for argument in arguments if argument not in flags)
    config = load_or_exit(WorkerConfig, flags, program="fake worker").value
    is_json = config.observability.log_format is LogFormat.JSON
    configure_logs(level=config.observability.log_level, json_lines=is_json, process="fake worker")
    return int(asyncio.run(run(config, options)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
