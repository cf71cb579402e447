"""From a received plan message to what the ordering protocol takes: checksum, decode, validate, stage.

Guards: whatever the bytes are, the device is not touched; a plan that can be named by its seq is refused as a plan, one
that cannot ends the stream.
"""

from collections.abc import Callable

from protos.forwardplane.v1.worker_pb2 import PlanMessage
from protos.wire.codec import decode_identity, decode_plan, open_message
from protos.wire.enums import Feature
from protos.wire.errors import EngineError, InvalidPlan, NeedFullPlan, UnsupportedFeature
from protos.wire.plan import ForwardPlan, PlanIdentity
from protos.wire.result import ForwardResult, PlanRejection
from protos.wire.validate import validate_plan
from protos.wire.worker_info import WorkerInfo
from worker_svc.protocol.delta_bases import DeltaBases
from worker_svc.protocol.messages import ArrivedPlan, IntakeTimes, MissingBase

Run = Callable[[], ForwardResult]
Stage = Callable[[ForwardPlan, bytes | None], Run]
"""Of a validated plan, and its digest where that is known."""

_SPARE_BASES = 2
"""Plans kept beyond those in flight."""


class PlanIntake:
    """One per loaded worker. Keeps the last plans as delta bases. Works while the device runs an earlier plan."""

    def __init__(self, info: WorkerInfo, clock_ns: Callable[[], int], stage: Stage) -> None:
        self._info = info
        self._clock_ns = clock_ns
        self._stage = stage
        page_sizes = [pool.page_size for pool in info.sub_pools]
        self.bases = DeltaBases(page_sizes=page_sizes, num_plans=info.limits.window + _SPARE_BASES)

    def read(self, message: PlanMessage) -> ArrivedPlan:
        """The plan in `message`, or its identity and why it is refused.

        Raises:
            DataFault: wrong checksum, or bytes whose identity cannot be read: no seq is consumed.
        """
        began_ns = self._clock_ns()
        body = open_message(message.body, message.crc32)
        received_ns = self._clock_ns()
        identity, content, run = self._parse(body)
        parsed_ns = self._clock_ns()
        times = IntakeTimes(receive_ns=received_ns - began_ns, parse_ns=parsed_ns - received_ns, parsed_at_ns=parsed_ns)
        return ArrivedPlan(identity, content, times, run)

    def _parse(self, body: bytes) -> tuple[PlanIdentity, ForwardPlan | PlanRejection | MissingBase, Run | None]:
        try:
            self._check_size(body)
            sent = decode_plan(body)
            plan = self._whole(sent)
            validate_plan(plan, self._info)
            digest = None if sent.delta is None else sent.delta.digest
            run = self._stage(plan, digest)
        except NeedFullPlan:
            return decode_identity(body), MissingBase(), None
        except (InvalidPlan, UnsupportedFeature) as error:
            return decode_identity(body), rejection_of(error), None
        if Feature.DELTAS in self._info.features:
            self.bases.keep(plan, digest)
        return plan.identity, plan, run

    def _whole(self, plan: ForwardPlan) -> ForwardPlan:
        if Feature.DELTAS not in self._info.features:
            return plan  # validation refuses a delta
        return self.bases.whole(plan)

    def _check_size(self, body: bytes) -> None:
        limit = self._info.limits.max_plan_bytes
        if len(body) > limit:
            raise InvalidPlan(f"a plan has {len(body)} bytes, the limit is {limit}", field="body")


def rejection_of(error: EngineError) -> PlanRejection:
    """How a refusal travels in the order of results."""
    row = error.rows[0] if error.rows else None
    return PlanRejection(reason=error.reason, field=error.field, row=row, message=error.message)
