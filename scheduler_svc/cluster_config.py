"""Settings of what Kubernetes decides: which workers there are, the epoch's object, and who of two schedulers serves.

A group of `scheduler_svc.config`. Knows nothing of where values come from.
"""

from enum import StrEnum
from typing import Annotated

from pydantic import Field

from protos.service.config import ConfigGroup
from protos.wire.limits import MAX_DEADLINE_S

Seconds = Annotated[float, Field(gt=0, le=MAX_DEADLINE_S)]


class LeaseRole(StrEnum):
    """Who of two schedulers gives way. A standby does, to a primary that waits: plain callers reach that alone."""

    PRIMARY = "primary"
    STANDBY = "standby"


class ClusterConfig(ConfigGroup):
    """The Kubernetes API server. Read where workers are discovered, the epoch is raised and the Lease is held."""

    worker_service: str | None = Field(
        default=None,
        min_length=1,
        description="Service whose endpoints are the workers, ready or not, in place of `workers`; unset = none.",
    )
    discovery_interval_s: Seconds = Field(default=2.0, description="Pause between two looks at the endpoints.")
    cluster_url: str | None = Field(
        default=None, min_length=1, description="URL of the API server; unset = the one of this pod's cluster."
    )
    cluster_namespace: str | None = Field(
        default=None, min_length=1, description="Namespace of the Service and the epoch object; unset = this pod's."
    )
    cluster_timeout_s: Seconds = Field(default=5.0, description="Most seconds one call to the API server may take.")
    lease_object: str | None = Field(
        default=None,
        min_length=1,
        description="Lease whose holder serves while other schedulers wait, warm; unset = this one serves at once.",
    )
    lease_role: LeaseRole = Field(
        default=LeaseRole.PRIMARY,
        description="standby: gives the Lease up to a primary that waits for it, since plain callers reach that alone.",
    )
    lease_duration_s: int = Field(
        default=10, ge=1, le=3600, description="Seconds after its last renewal at which another may take the Lease."
    )
