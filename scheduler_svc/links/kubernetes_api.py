"""What the scheduler asks of a Kubernetes API server: a Service's endpoints, one object's epoch annotation, one Lease.

Loaded only where settings ask for Kubernetes: its client is an optional dependency. Knows nothing of links. Guards:
every failure is an error of the taxonomy; UnavailableError passes by itself, InvalidRequest needs an operator.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from kubernetes_asyncio import client, config

from protos.wire.errors import InvalidRequest, UnavailableError
from scheduler_svc.links.lease import LeaseRecord

EPOCH_ANNOTATION = "forwardplane.dev/epoch"
WANTED_ANNOTATION = "forwardplane.dev/wanted-by"

_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
_PORT_NAME = "grpc"
_CONFLICT = 409
# Answers that time alone does not change.
_LASTING = {
    401: "does not know who asks",
    403: "does not allow this",
    404: "has no such object",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings:
    """Which API server and what of it."""

    url: str | None
    """None: that of the cluster this pod runs in, with the pod's own token."""
    namespace: str | None
    """None: this pod's own."""
    timeout_s: float
    """Most seconds of one call."""


class KubernetesApi:
    """One for the process. Made in its event loop; `close` ends its connections."""

    def __init__(self, settings: ClusterSettings) -> None:
        """Read where the API server is; connects at the first call.

        Raises:
            InvalidRequest: this process is in no pod, and settings name no API server or namespace.
        """
        self._timeout_s = settings.timeout_s
        self._namespace = settings.namespace or _own_namespace()
        self._client = client.ApiClient(_configuration(settings.url))

    async def close(self) -> None:
        """Close all connections."""
        await self._client.close()

    async def worker_addresses(self, service: str) -> frozenset[str]:
        """HOST:PORT of every endpoint of `service`, ready or not: a worker is attached before it is ready.

        Raises:
            InvalidRequest: the API server does not let this pod list EndpointSlices.
            UnavailableError: the API server does not answer.
        """
        api = client.DiscoveryV1Api(self._client)
        with _api_errors("EndpointSlices", field="worker_service"):
            found = await api.list_namespaced_endpoint_slice(
                self._namespace,
                label_selector=f"kubernetes.io/service-name={service}",
                resource_version="0",  # from the API server's cache
                _request_timeout=self._timeout_s,
            )
        return frozenset(address for piece in found.items for address in _addresses(piece))

    async def raise_epoch(self, name: str) -> int | None:
        """One more than the annotation of ConfigMap `name` says, which is stored; None: another raised it meanwhile.

        Raises:
            InvalidRequest: the object is missing, may not be used, or holds something else than a number.
            UnavailableError: the API server does not answer.
        """
        api = client.CoreV1Api(self._client)
        with _api_errors(f"ConfigMap {name}", field="epoch_object"):
            found = await api.read_namespaced_config_map(name, self._namespace, _request_timeout=self._timeout_s)
        epoch = _stored_epoch(found.metadata.annotations or {}, name) + 1
        found.metadata.annotations = {**(found.metadata.annotations or {}), EPOCH_ANNOTATION: str(epoch)}
        # The object carries its resource version: the API server refuses it if anyone wrote since.
        with _api_errors(f"ConfigMap {name}", field="epoch_object") as answer:
            await api.replace_namespaced_config_map(name, self._namespace, found, _request_timeout=self._timeout_s)
        return None if answer.is_conflict else epoch

    def lease(self, name: str) -> "ClusterLease":
        """The Lease of that name in this namespace."""
        return ClusterLease(
            client.CoordinationV1Api(self._client), name, namespace=self._namespace, timeout_s=self._timeout_s
        )


class ClusterLease:
    """One Lease object. Made by `KubernetesApi.lease`; fails as that does."""

    def __init__(self, api: Any, name: str, *, namespace: str, timeout_s: float) -> None:
        self._api = api
        self._name = name
        self._namespace = namespace
        self._timeout_s = timeout_s

    async def read(self) -> LeaseRecord:
        """The Lease now.

        Raises:
            InvalidRequest: it is missing, or may not be read.
            UnavailableError: the API server does not answer.
        """
        with _api_errors(f"Lease {self._name}", field="lease_object"):
            found = await self._api.read_namespaced_lease(self._name, self._namespace, _request_timeout=self._timeout_s)
        spec = found.spec or client.V1LeaseSpec()
        return LeaseRecord(
            holder=spec.holder_identity or "",
            duration_s=spec.lease_duration_seconds or 0,
            renewals=str(spec.renew_time or ""),
            wanted_by=(found.metadata.annotations or {}).get(WANTED_ANNOTATION, ""),
            found=found,
        )

    async def write(self, record: LeaseRecord, *, renews: bool) -> bool:
        """Store `record` over what it was read from; False: anyone wrote since.

        Raises:
            InvalidRequest: it is missing, or may not be written.
            UnavailableError: the API server does not answer.
        """
        body: Any = record.found
        spec = body.spec = body.spec or client.V1LeaseSpec()
        now = _micro_time()
        if record.holder != (spec.holder_identity or ""):
            spec.lease_transitions = (spec.lease_transitions or 0) + bool(record.holder)
            spec.acquire_time = now
        spec.holder_identity = record.holder or None
        spec.lease_duration_seconds = record.duration_s or None
        spec.renew_time = now if renews else spec.renew_time
        others = {key: text for key, text in (body.metadata.annotations or {}).items() if key != WANTED_ANNOTATION}
        wanted = {WANTED_ANNOTATION: record.wanted_by} if record.wanted_by else {}
        body.metadata.annotations = {**others, **wanted}
        # The object carries its resource version: the API server refuses it if anyone wrote since.
        with _api_errors(f"Lease {self._name}", field="lease_object") as answer:
            await self._api.replace_namespaced_lease(
                self._name, self._namespace, body, _request_timeout=self._timeout_s
            )
        return not answer.is_conflict


def _micro_time() -> datetime:
    """Now, as the API server reads it: with a fraction of six digits, which a time on the second would not get."""
    now = datetime.now(UTC)
    return now.replace(microsecond=now.microsecond or 1)


@dataclass(slots=True)
class _Answer:
    is_conflict: bool = False


@contextmanager
def _api_errors(what: str, *, field: str) -> Iterator[_Answer]:
    answer = _Answer()
    try:
        yield answer
    except client.ApiException as error:
        if error.status in _LASTING:
            message = f"the API server {_LASTING[error.status]}: {what}"
            raise InvalidRequest(message, field=field) from error
        if error.status != _CONFLICT:
            message = f"the API server answered {error.status} for {what}"
            raise UnavailableError(message, field=field) from error
        answer.is_conflict = True
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        message = f"the API server cannot be reached for {what}: {type(error).__name__}"
        raise UnavailableError(message, field=field) from error


def _configuration(url: str | None) -> Any:
    made = client.Configuration(host=url)
    made.client_side_validation = False  # an EndpointSlice without endpoints is valid
    if url is None:
        try:
            config.load_incluster_config(client_configuration=made)
        except config.ConfigException as error:
            message = f"this process runs in no pod, and no API server is named: {error}"
            raise InvalidRequest(message, field="cluster_url") from error
    return made


def _own_namespace() -> str:
    try:
        return _NAMESPACE_FILE.read_text(encoding="utf-8").strip()
    except OSError as error:
        message = "this process runs in no pod, and no namespace is named"
        raise InvalidRequest(message, field="cluster_namespace") from error


def _addresses(piece: Any) -> Iterator[str]:
    ports = [port.port for port in piece.ports or () if port.name == _PORT_NAME and port.port]
    for endpoint in piece.endpoints or ():
        # More addresses of one endpoint are the same pod again.
        for address, port in zip(endpoint.addresses[:1], ports[:1], strict=False):
            yield f"[{address}]:{port}" if piece.address_type == "IPv6" else f"{address}:{port}"


def _stored_epoch(annotations: Mapping[str, str], name: str) -> int:
    text = annotations.get(EPOCH_ANNOTATION, "0")
    if not (text.isascii() and text.isdecimal()):
        message = f"annotation {EPOCH_ANNOTATION} of ConfigMap {name} is no decimal number"
        raise InvalidRequest(message, field="epoch_object")
    return int(text)
