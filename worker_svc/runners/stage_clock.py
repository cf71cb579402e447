"""Where a plan's time goes on the device thread. Knows nothing of what the stages do."""

import time
from enum import Enum

from protos.wire.result import PlanTimings


class Stage(Enum):
    """Parts of one plan's execution, in order."""

    HOST_TO_DEVICE = "host_to_device"
    FORWARD = "forward"
    SAMPLE = "sample"
    DEVICE_TO_HOST = "device_to_host"


class StageClock:
    """Made when a plan is taken; every moment until the last lap belongs to one stage."""

    def __init__(self) -> None:
        self._total_ns = dict.fromkeys(Stage, 0)
        self._last_ns = time.perf_counter_ns()

    def lap(self, stage: Stage) -> int:
        """Nanoseconds since the last lap, which are counted for `stage`."""
        now_ns = time.perf_counter_ns()
        passed_ns = now_ns - self._last_ns
        self._last_ns = now_ns
        self._total_ns[stage] += passed_ns
        return passed_ns

    def timings(self) -> PlanTimings:
        """What the laps add up to."""
        return PlanTimings(
            host_to_device_ns=self._total_ns[Stage.HOST_TO_DEVICE],
            forward_ns=self._total_ns[Stage.FORWARD],
            sample_ns=self._total_ns[Stage.SAMPLE],
            device_to_host_ns=self._total_ns[Stage.DEVICE_TO_HOST],
        )
