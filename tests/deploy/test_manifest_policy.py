"""Each rule holds for each overlay, and catches the mistake that it is there for."""

import pytest

from protos.service.config import ConfigError, load_config
from scheduler_svc.config import SchedulerConfig
from tests.support.manifest_policy import CELL, LEASE, NAME, SCHEDULER, STANDBY, WORKER
from tests.support.manifests import ADDED, OVERLAYS, Manifest, objects
from tests.support.standby_policy import RULES
from worker_svc.config import WorkerConfig

EVERY_OVERLAY = (*OVERLAYS, *ADDED)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("overlay", EVERY_OVERLAY)
def test_the_rule_holds(overlay, name):
    assert list(RULES[name](Manifest(objects(overlay)))) == []


def deployment(name):
    return lambda m: m.one("Deployment", name)["spec"]


def pod(name):
    return lambda m: m.pod(name)


def container(name):
    return lambda m: m.container(name)


def spec(kind, name):
    return lambda m: m.one(kind, name)["spec"]


def settings(name):
    return lambda m: m.settings(name)


REMOVE = object()
# (rule, where, path below it, what is put there): numbers are those of the list of known mistakes.
MISTAKES = [
    ("one_scheduler_is_replaced_and_never_doubled", deployment(SCHEDULER), "replicas", 2),
    ("one_scheduler_is_replaced_and_never_doubled", deployment(SCHEDULER), "strategy.type", "RollingUpdate"),
    ("probes_ask_health_on_a_plaintext_port_by_number", container(WORKER), "startupProbe", REMOVE),  # 1
    ("probes_ask_health_on_a_plaintext_port_by_number", container(WORKER), "livenessProbe.initialDelaySeconds", 600),
    ("probes_ask_health_on_a_plaintext_port_by_number", container(SCHEDULER), "readinessProbe.grpc.service", ""),  # 2
    ("liveness_is_patient_and_of_the_process_alone", container(WORKER), "livenessProbe.failureThreshold", 1),  # 3
    ("liveness_is_patient_and_of_the_process_alone", container(SCHEDULER), "livenessProbe.grpc.service", "x"),
    ("a_dead_process_is_started_again", pod(WORKER), "restartPolicy", "OnFailure"),  # 5
    ("a_stop_has_time_for_endpoints_and_the_drain", pod(SCHEDULER), "terminationGracePeriodSeconds", 25),  # 6
    ("a_stop_has_time_for_endpoints_and_the_drain", settings(WORKER), "FORWARDPLANE_DRAIN_TIMEOUT_S", "60"),
    ("a_stop_has_time_for_endpoints_and_the_drain", container(SCHEDULER), "lifecycle", REMOVE),  # 7
    ("a_rollout_waits_for_slow_starts_and_for_the_scheduler", deployment(WORKER), "minReadySeconds", 0),  # 8
    ("workers_do_not_surge", deployment(WORKER), "strategy.rollingUpdate.maxSurge", "25%"),  # 9
    ("services_reach_the_right_pods", spec("Service", SCHEDULER), "clusterIP", ""),  # 10
    ("services_reach_the_right_pods", spec("Service", WORKER), "ports.0.targetPort", "grcp"),
    ("probes_ask_health_on_a_plaintext_port_by_number", container(SCHEDULER), "livenessProbe.grpc.port", 50051),  # 11
    (
        "probes_ask_health_on_a_plaintext_port_by_number",
        container(WORKER),
        "readinessProbe",
        {"tcpSocket": {"port": 1}},
    ),
    ("a_rollout_waits_for_slow_starts_and_for_the_scheduler", deployment(WORKER), "progressDeadlineSeconds", 600),  # 12
    ("one_hand_scales", deployment(WORKER), "replicas", 2),  # 13
    ("disruptions_are_bounded_and_possible", spec("PodDisruptionBudget", SCHEDULER), "minAvailable", 1),  # 14
    ("disruptions_are_bounded_and_possible", spec("PodDisruptionBudget", WORKER), "maxUnavailable", REMOVE),
    ("one_hand_scales", spec("ScaledObject", WORKER), "triggers.0.type", "cpu"),  # 15
    ("one_hand_scales", spec("ScaledObject", WORKER), "triggers.0.metadata.query", "forwardplane_scheduler_epoch"),
    ("one_hand_scales", spec("ScaledObject", WORKER), "fallback", REMOVE),
    ("one_hand_scales", spec("ScaledObject", WORKER), "triggers.0.metadata.activationThreshold", REMOVE),
    ("one_hand_scales", spec("ScaledObject", WORKER), "minReplicaCount", 0),
    ("one_hand_scales", spec("ScaledObject", WORKER), "cooldownPeriod", 300),
    ("volumes_are_what_they_must_be", pod(WORKER), "volumes.1", {"name": "cache", "persistentVolumeClaim": {}}),  # 18
    ("volumes_are_what_they_must_be", container(WORKER), "volumeMounts.3.mountPath", "/shm"),  # 19
    ("volumes_are_what_they_must_be", container(SCHEDULER), "volumeMounts.0.readOnly", REMOVE),
    ("files_of_settings_are_where_they_say", container(SCHEDULER), "volumeMounts.1.mountPath", "/run"),
    ("files_of_settings_are_where_they_say", container(SCHEDULER), "volumeMounts.5.readOnly", REMOVE),
    ("files_of_settings_are_where_they_say", settings(SCHEDULER), "FORWARDPLANE_RESUME_KEY_FILE", "/keys"),
    ("files_of_settings_are_where_they_say", settings(WORKER), "FORWARDPLANE_TLS_DIR", "/tls"),
    ("callers_outlive_a_scheduler_in_production", settings(SCHEDULER), "FORWARDPLANE_RESUME_KEY_FILE", REMOVE),
    ("workers_are_near_the_scheduler", pod(WORKER), "affinity", REMOVE),  # 20
    ("quality_of_service_is_guaranteed", container(SCHEDULER), "resources.limits.cpu", "8"),  # 21
    ("quality_of_service_is_guaranteed", container(WORKER), "resources.requests.cpu", "500m"),
    ("a_start_may_take_as_long_as_the_settings_say", container(WORKER), "startupProbe.failureThreshold", 30),
    ("pods_are_unprivileged", pod(WORKER), "hostIPC", True),
    ("pods_are_unprivileged", pod(SCHEDULER), "enableServiceLinks", REMOVE),
    ("pods_are_unprivileged", pod(SCHEDULER), "securityContext.runAsUser", 0),
    ("pods_are_unprivileged", container(WORKER), "securityContext.readOnlyRootFilesystem", False),
    ("pods_are_unprivileged", container(WORKER), "securityContext.capabilities", REMOVE),
    ("pods_are_unprivileged", pod(WORKER), "securityContext.seccompProfile", REMOVE),
    ("only_the_scheduler_has_a_token", pod(WORKER), "automountServiceAccountToken", REMOVE),
    (
        "rights_are_the_least",
        lambda m: m.all("Role")[0],
        "rules.1.resourceNames",
        REMOVE,
    ),
    ("rights_are_the_least", lambda m: m.all("Role")[0], "rules.0.verbs", ["*"]),
    ("the_epoch_object_survives", lambda m: m.one("ConfigMap", "forwardplane-epoch"), "metadata.annotations", REMOVE),
    ("the_network_is_closed", spec("NetworkPolicy", WORKER), "egress", [{}]),
    ("the_network_is_closed", spec("NetworkPolicy", WORKER), "ingress.0.from", REMOVE),
    ("the_network_is_closed", spec("NetworkPolicy", WORKER), "ingress.0.from.0.podSelector", {}),
    ("the_network_is_closed", spec("NetworkPolicy", SCHEDULER), "ingress.0.ports.0.port", "grcp"),
    ("settings_travel_with_a_hash", container(WORKER), "envFrom.0.configMapRef.name", WORKER),
    ("ports_of_settings_are_the_containers", container(SCHEDULER), "ports.0.containerPort", 50061),
    ("ports_of_settings_are_the_containers", settings(SCHEDULER), "FORWARDPLANE_EDGES", "3"),
    ("devices_are_whole_tolerated_and_not_shared", pod(WORKER), "tolerations", REMOVE),
    ("devices_are_whole_tolerated_and_not_shared", container(WORKER), "resources.requests.nvidia\0com/gpu", REMOVE),
    ("images_have_a_version", container(SCHEDULER), "image", "registry.example.com/forwardplane/scheduler:latest"),
    ("what_is_watched_exists", spec("PodMonitor", SCHEDULER), "podMetricsEndpoints.2", REMOVE),
    ("certificates_are_renewed_and_mounted", container(WORKER), "volumeMounts.4", REMOVE),
    ("certificates_are_renewed_and_mounted", spec("Certificate", WORKER), "privateKey.rotationPolicy", REMOVE),
    (
        "links_are_mutual_tls_where_there_are_certificates",
        spec("Certificate", SCHEDULER),
        "uris",
        ["spiffe://x/scheduler"],
    ),
    ("links_are_mutual_tls_where_there_are_certificates", spec("Certificate", WORKER), "dnsNames", ["w"]),
    ("links_are_mutual_tls_where_there_are_certificates", settings(SCHEDULER), "FORWARDPLANE_TLS_DIR", REMOVE),
    ("links_are_mutual_tls_where_there_are_certificates", settings(WORKER), "FORWARDPLANE_INSECURE", "true"),
]


WITH_STANDBY = [
    ("a_standby_is_a_scheduler_that_waits", container(STANDBY), "readinessProbe.grpc.service", "x"),
    ("a_standby_is_a_scheduler_that_waits", container(STANDBY), "env.1.value", "primary"),
    ("a_standby_is_a_scheduler_that_waits", container(STANDBY), "ports.5", REMOVE),
    ("a_standby_is_a_scheduler_that_waits", pod(STANDBY), "affinity", REMOVE),
    ("a_standby_is_a_scheduler_that_waits", deployment(STANDBY), "replicas", 2),
    ("only_who_asks_for_health_reaches_a_standby", spec("Service", SCHEDULER), "selector", CELL),
    ("only_who_asks_for_health_reaches_a_standby", spec("Service", "forwardplane-http"), "selector", {NAME: STANDBY}),
    ("only_who_asks_for_health_reaches_a_standby", spec("Service", "forwardplane-cell"), "clusterIP", REMOVE),
    ("only_who_asks_for_health_reaches_a_standby", spec("Service", "forwardplane-cell"), "selector", {NAME: SCHEDULER}),
    ("a_lease_elects_where_there_are_two", settings(SCHEDULER), "FORWARDPLANE_LEASE_OBJECT", REMOVE),
    ("a_lease_elects_where_there_are_two", settings(SCHEDULER), "FORWARDPLANE_RESUME_KEY_FILE", REMOVE),
    ("a_lease_elects_where_there_are_two", lambda m: m.one("Lease", LEASE), "spec", {"holderIdentity": ""}),
    ("a_lease_elects_where_there_are_two", lambda m: m.one("Lease", LEASE), "metadata.annotations", REMOVE),
    ("a_standby_may_be_disrupted_by_itself", spec("PodDisruptionBudget", STANDBY), "selector", REMOVE),
    ("rights_are_the_least", lambda m: m.all("Role")[0], "rules.2.verbs", ["*"]),
    ("the_network_is_closed", spec("NetworkPolicy", WORKER), "ingress.0.from.0.podSelector", {"matchLabels": {}}),
    ("the_network_is_closed", spec("NetworkPolicy", SCHEDULER), "podSelector.matchLabels", {NAME: SCHEDULER}),
]


def change(place, path, value):
    *parents, last = [part.replace("\0", ".") for part in path.split(".")]
    for part in parents:
        place = place[int(part) if isinstance(place, list) else part]
    key = int(last) if isinstance(place, list) else last
    if value is REMOVE:
        del place[key]
    else:
        place[key] = value


@pytest.mark.parametrize(("name", "where", "path", "value"), MISTAKES)
def test_the_rule_finds_the_mistake(name, where, path, value):
    manifest = Manifest(objects("production"))
    change(where(manifest), path, value)

    assert list(RULES[name](manifest))


@pytest.mark.parametrize(("name", "where", "path", "value"), WITH_STANDBY)
def test_the_rule_finds_the_mistake_beside_a_standby(name, where, path, value):
    manifest = Manifest(objects("standby"))
    change(where(manifest), path, value)

    assert list(RULES[name](manifest))


def test_a_lease_without_a_standby_is_found():
    manifest = Manifest(objects("production"))
    manifest.settings(SCHEDULER)["FORWARDPLANE_LEASE_OBJECT"] = "lease"

    assert list(RULES["a_lease_elects_where_there_are_two"](manifest))


def test_every_rule_has_a_mistake():
    assert set(RULES) == {name for name, *_ in (*MISTAKES, *WITH_STANDBY)}


SCHEMAS = {SCHEDULER: SchedulerConfig, WORKER: WorkerConfig}
OF_THE_POD = {SCHEDULER: {"FORWARDPLANE_CLUSTER_NAMESPACE": "forwardplane"}, WORKER: {}}


def loaded(manifest, name, *, without=()):
    """The settings as the process itself reads them."""
    given = {**manifest.settings(name), **OF_THE_POD[name]}
    environment = {variable: value for variable, value in given.items() if variable not in without}
    return load_config(SCHEMAS[name], environment=environment)


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("overlay", EVERY_OVERLAY)
def test_the_services_start_with_their_settings(overlay, name):
    config = loaded(Manifest(objects(overlay)), name)
    assert config.warnings == config.notes == ()


PROTECTIONS = [
    ("local", SCHEDULER, "FORWARDPLANE_INSECURE", ["caller_tls_dir", "tls_dir"]),
    ("single-gpu", WORKER, "FORWARDPLANE_INSECURE", ["tls_dir"]),
    ("production", WORKER, "FORWARDPLANE_TLS_DIR", ["tls_dir"]),
    ("production", SCHEDULER, "FORWARDPLANE_INSECURE", ["caller_tls_dir"]),
]


@pytest.mark.parametrize(("overlay", "name", "variable", "named"), PROTECTIONS)
def test_without_what_protects_it_or_says_that_nothing_does_no_service_starts(overlay, name, variable, named):
    with pytest.raises(ConfigError, match="insecure") as raised:
        loaded(Manifest(objects(overlay)), name, without=[variable])

    assert all(setting in str(raised.value) for setting in named)


@pytest.mark.parametrize("name", SCHEMAS)
def test_traces_go_where_the_network_lets_them(name):
    settings = Manifest(objects("traced")).settings(name)

    assert settings["FORWARDPLANE_TRACE_ENDPOINT"].endswith(".observability.svc:4317")
    assert "FORWARDPLANE_TRACE_ENDPOINT" not in Manifest(objects("production")).settings(name), "off by default"


def test_a_policy_that_leads_elsewhere_than_to_the_collector_is_found():
    for entry in ({"ports": [{"port": 4317}]}, {"to": [{"podSelector": {}}]}):
        manifest = Manifest(objects("traced"))
        manifest.one("NetworkPolicy", "forwardplane-traces")["spec"]["egress"].append(entry)
        assert list(RULES["the_network_is_closed"](manifest))
