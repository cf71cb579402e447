"""What the core keeps of a worker whether or not it is attached."""

from dataclasses import dataclass

from protos.wire.worker_info import WorkerInfo
from scheduler_svc.memory.page_demand import SequenceCapacity


@dataclass(frozen=True, slots=True)
class WorkerFacts:
    """What was last known of a worker; kept when it is lost, since requests wait for its return."""

    info: WorkerInfo
    capacity: SequenceCapacity
