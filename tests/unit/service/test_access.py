"""S2: one table of who may call what, complete, and nothing outside it is reachable."""

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from protos.forwardplane.v1 import generate_pb2, worker_pb2
from protos.service.access import METHOD_ROLES, PeerRoles, Role, check_method
from protos.service.config import EX_CONFIG, load_or_exit
from protos.service.security_config import is_loopback
from protos.wire.errors import PermissionDenied
from scheduler_svc.config import SchedulerConfig
from worker_svc.config import WorkerConfig

FILES = (generate_pb2, worker_pb2, health_pb2, reflection_pb2)


def served_methods():
    for file in FILES:
        for service in file.DESCRIPTOR.services_by_name.values():
            yield from (f"/{service.full_name}/{method.name}" for method in service.methods)


def test_s2_the_table_is_the_list_of_methods_of_all_ports():
    assert sorted(METHOD_ROLES) == sorted(served_methods())


def test_s2_a_method_without_a_row_is_for_nobody():
    with pytest.raises(PermissionDenied):
        check_method("/forwardplane.v1.WorkerService/Explode", frozenset(Role))


@pytest.mark.parametrize("method", sorted(METHOD_ROLES))
def test_s2_no_method_of_workers_is_for_callers_and_none_of_callers_for_schedulers(method):
    allowed = METHOD_ROLES[method]
    assert Role.WORKER not in allowed
    if "WorkerService" in method:
        assert allowed == {Role.SCHEDULER}
    if "GenerationService" in method:
        assert Role.SCHEDULER not in allowed


class Context:
    def __init__(self, *names):
        self._names = [name.encode() for name in names]

    def auth_context(self):
        return {"peer_uri": self._names} if self._names else {}


ATTACH = "/forwardplane.v1.WorkerService/Attach"


def test_a_role_is_exactly_one_name_of_the_domain():
    PeerRoles("forwardplane")(ATTACH, Context("spiffe://forwardplane/scheduler"))


@pytest.mark.parametrize(
    "names",
    [
        (),
        ("spiffe://forwardplane/worker",),
        ("spiffe://forwardplane/caller",),
        ("spiffe://forwardplane/scheduler/",),
        ("spiffe://forwardplane/Scheduler",),
        ("spiffe://forwardplane/schedulers",),
        ("spiffe://other/scheduler",),
        ("spiffe://forwardplane.example/scheduler",),
        ("https://forwardplane/scheduler",),
        ("spiffe://forwardplane/scheduler", "spiffe://forwardplane/worker"),
        ("spiffe://forwardplane/scheduler", "spiffe://forwardplane/scheduler"),
    ],
)
def test_every_other_name_is_refused(names):
    with pytest.raises(PermissionDenied):
        PeerRoles("forwardplane")(ATTACH, Context(*names))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "localhost", "::1", "[::1]"])
def test_loopback(host):
    assert is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "localhost.example", "127.0.0.1.example", "", "my-host"])
def test_not_loopback(host):
    assert not is_loopback(host)


@pytest.mark.parametrize(
    ("schema", "flags", "says"),
    [
        (WorkerConfig, ["--host", "0.0.0.0"], "tls_dir"),
        (SchedulerConfig, ["--host", "::"], "caller_tls_dir"),
        (SchedulerConfig, ["--workers", "127.0.0.1:1,10.0.0.9:1"], "tls_dir"),
        (SchedulerConfig, ["--worker-service", "workers"], "tls_dir"),
        (SchedulerConfig, ["--host", "10.0.0.1", "--tls-dir", "/x"], "caller_tls_dir"),
        (SchedulerConfig, ["--caller-certificates", "required"], "caller_tls_dir"),
    ],
)
def test_plain_text_to_other_machines_has_to_be_asked_for(schema, flags, says, capsys, monkeypatch):
    monkeypatch.delenv("FORWARDPLANE_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        load_or_exit(schema, flags, program="x")

    assert ended.value.code == EX_CONFIG
    said = capsys.readouterr().err
    assert says in said
    if flags[0] != "--caller-certificates":
        assert "insecure" in said
        assert load_or_exit(schema, [*flags, "--insecure"], program="x").value.tls.insecure


def test_codes_of_refusals():
    assert PermissionDenied.status == grpc.StatusCode.PERMISSION_DENIED.name
