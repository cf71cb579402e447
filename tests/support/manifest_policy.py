"""What our manifests must hold beyond their schemas: each rule yields the breaches it finds."""

import re
from collections.abc import Callable, Iterator

from tests.support.manifests import Manifest

SCHEDULER, WORKER = "forwardplane-scheduler", "forwardplane-worker"
STANDBY = "forwardplane-scheduler-standby"
LEASE = "forwardplane-lease"
CELL = {"forwardplane.dev/cell": "forwardplane"}
SERVICES = {SCHEDULER: "forwardplane.v1.GenerationService", WORKER: "forwardplane.v1.WorkerService"}
STOP_MARGIN_S = 10
"""What a stop takes beside preStop and drain: the core's flush, closing ports, the parent's patience."""
NAME = "app.kubernetes.io/name"

FILES = {
    "MODEL_CACHE": {"persistentVolumeClaim"},
    "SOCKET_DIR": {"emptyDir"},
    "GRAPH_MEMORY_FILE": {"emptyDir"},
    "RESUME_KEY_FILE": {"secret"},
    "CALLERS": {"secret"},
    "TLS_DIR": {"secret"},
    "CALLER_TLS_DIR": {"secret"},
}
"""Settings that name a file or folder, and the volumes it may lie in."""
FOLDERS = {"MODEL_CACHE", "SOCKET_DIR", "TLS_DIR", "CALLER_TLS_DIR"}

Rule = Callable[[Manifest], Iterator[str]]
RULES: dict[str, Rule] = {}


def rule(check: Rule) -> Rule:
    RULES[check.__name__] = check
    return check


def deployments(manifest):
    return [(name, manifest.one("Deployment", name)["spec"]) for name in (SCHEDULER, WORKER)]


def of_schedulers(manifest):
    """The labels by which policies know schedulers: of both, where there is a standby."""
    return CELL if manifest.has("Deployment", STANDBY) else {NAME: SCHEDULER}


def budget_s(probe):
    """How long a probe may fail before it counts."""
    return probe.get("periodSeconds", 10) * probe.get("failureThreshold", 3)


@rule
def one_scheduler_is_replaced_and_never_doubled(manifest):
    spec = manifest.one("Deployment", SCHEDULER)["spec"]
    if spec["replicas"] != 1 or spec["strategy"] != {"type": "Recreate"}:
        yield "two schedulers would fence each other"


@rule
def workers_do_not_surge(manifest):
    rolling = manifest.one("Deployment", WORKER)["spec"]["strategy"].get("rollingUpdate", {})
    if rolling.get("maxSurge") != 0 or rolling.get("maxUnavailable") != 1:
        yield "a surge waits for a device that nobody can free"


@rule
def a_rollout_waits_for_slow_starts_and_for_the_scheduler(manifest):
    spec = manifest.one("Deployment", WORKER)["spec"]
    if spec.get("progressDeadlineSeconds", 600) <= budget_s(manifest.container(WORKER)["startupProbe"]):
        yield "a slow load is called a failed rollout"
    if spec.get("minReadySeconds", 0) < 5:
        yield "the next worker goes before the scheduler has this one"


@rule
def probes_ask_health_on_a_plaintext_port_by_number(manifest):
    for name, service in SERVICES.items():
        container = manifest.container(name)
        health = [port["containerPort"] for port in container["ports"] if port["name"] == "health"]
        for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
            probe = container.get(kind, {})
            if [probe.get("grpc", {}).get("port")] != health:
                yield f"{name}: {kind} is no gRPC probe of the health port"
            if "initialDelaySeconds" in probe:
                yield f"{name}: {kind} guesses a delay in place of a startup probe"
        if container.get("readinessProbe", {}).get("grpc", {}).get("service") != service:
            yield f"{name}: ready before it serves"


@rule
def liveness_is_patient_and_of_the_process_alone(manifest):
    for name in SERVICES:
        probe = manifest.container(name).get("livenessProbe", {})
        if probe.get("grpc", {}).get("service", "") != "":
            yield f"{name}: liveness depends on what the process serves"
        if budget_s(probe) < 60 or probe.get("failureThreshold", 3) < 5:
            yield f"{name}: liveness is too eager"
        if manifest.container(name).get("readinessProbe", {}).get("periodSeconds", 10) > 2:
            yield f"{name}: readiness is seen late"


@rule
def a_start_may_take_as_long_as_the_settings_say(manifest):
    allowed = float(manifest.settings(WORKER)["FORWARDPLANE_LOAD_TIMEOUT_S"])
    if budget_s(manifest.container(WORKER)["startupProbe"]) <= allowed:
        yield "the startup probe kills a worker that still may load"


@rule
def a_stop_has_time_for_endpoints_and_the_drain(manifest):
    for name, spec in deployments(manifest):
        pause = manifest.container(name).get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        drain = float(manifest.settings(name)["FORWARDPLANE_DRAIN_TIMEOUT_S"])
        grace = spec["template"]["spec"].get("terminationGracePeriodSeconds", 30)
        if pause < 1:
            yield f"{name}: SIGTERM comes before endpoints are updated"
        if grace < pause + drain + STOP_MARGIN_S:
            yield f"{name}: killed before its drain is over"


@rule
def a_dead_process_is_started_again(manifest):
    for name, spec in deployments(manifest):
        if spec["template"]["spec"].get("restartPolicy", "Always") != "Always":
            yield f"{name}: stays dead"


@rule
def services_reach_the_right_pods(manifest):
    for name in SERVICES:
        service = manifest.one("Service", name)["spec"]
        if service.get("clusterIP") != "None":
            yield f"{name}: one connection would pin every call to one pod"
        if service["selector"] != {NAME: name}:
            yield f"{name}: the Service selects other pods"
    web = manifest.one("Service", "forwardplane-http")["spec"]
    if web.get("clusterIP") == "None" or web["selector"] != {NAME: SCHEDULER}:
        yield "HTTP callers need a cluster address of the scheduler"
    for service in manifest.all("Service"):
        name = service["spec"]["selector"].get(NAME, SCHEDULER)
        ports = {port["name"] for port in manifest.container(name)["ports"]}
        for port in service["spec"]["ports"]:
            if port["targetPort"] not in ports:
                yield f"{service['metadata']['name']}: port {port['name']} leads nowhere"
            if port["name"] != "http" and port.get("appProtocol") != "kubernetes.io/h2c":
                yield f"{service['metadata']['name']}: port {port['name']} is not called HTTP/2"


@rule
def disruptions_are_bounded_and_possible(manifest):
    for name in SERVICES:
        spec = manifest.one("PodDisruptionBudget", name)["spec"]
        if spec.get("maxUnavailable") != 1 or "minAvailable" in spec:
            yield f"{name}: a budget blocks every drain or protects nothing"
        if spec["selector"]["matchLabels"] != {NAME: name}:
            yield f"{name}: the budget is of other pods"


@rule
def pods_are_unprivileged(manifest):
    for name, spec in deployments(manifest):
        pod, container = spec["template"]["spec"], manifest.container(name)
        outer, inner = pod.get("securityContext", {}), container.get("securityContext", {})
        wanted = {
            "non-root": outer.get("runAsNonRoot") is True and outer.get("runAsUser", 0) > 0,
            "seccomp": outer.get("seccompProfile") == {"type": "RuntimeDefault"},
            "read-only root": inner.get("readOnlyRootFilesystem") is True,
            "no escalation": inner.get("allowPrivilegeEscalation") is False,
            "dropped capabilities": inner.get("capabilities") == {"drop": ["ALL"]},
            "no host namespaces": not any(pod.get(key) for key in ("hostIPC", "hostPID", "hostNetwork")),
            "no host folders": not any("hostPath" in volume for volume in pod["volumes"]),
            "no service links": pod.get("enableServiceLinks") is False,
        }
        yield from (f"{name}: {what}" for what, holds in wanted.items() if not holds)


@rule
def only_the_scheduler_has_a_token(manifest):
    if manifest.pod(WORKER).get("automountServiceAccountToken") is not False:
        yield "workers get a token"
    for account in manifest.all("ServiceAccount"):
        if account.get("automountServiceAccountToken") is not False:
            yield f"{account['metadata']['name']}: every pod of the account gets a token"
    if manifest.pod(SCHEDULER).get("automountServiceAccountToken") is not True:
        yield "the scheduler cannot find workers"


@rule
def rights_are_the_least(manifest):
    (role,) = manifest.all("Role")
    allowed = {
        ("discovery.k8s.io", "endpointslices", None): {"list"},
        ("", "configmaps", "forwardplane-epoch"): {"get", "update"},
    }
    if manifest.all("Lease"):
        allowed["coordination.k8s.io", "leases", LEASE] = {"get", "update"}
    given = {
        (group, resource, name): set(entry["verbs"])
        for entry in role["rules"]
        for group in entry["apiGroups"]
        for resource in entry["resources"]
        for name in entry.get("resourceNames", [None])
    }
    if given != allowed:
        yield f"rights differ: {given}"
    (binding,) = manifest.all("RoleBinding")
    if [subject["name"] for subject in binding["subjects"]] != [SCHEDULER]:
        yield "others than the scheduler have rights"
    if manifest.all("ClusterRole") or manifest.all("ClusterRoleBinding"):
        yield "rights beyond the namespace"


@rule
def the_epoch_object_survives(manifest):
    name = manifest.settings(SCHEDULER)["FORWARDPLANE_EPOCH_OBJECT"]
    annotations = manifest.one("ConfigMap", name)["metadata"].get("annotations", {})
    if "forwardplane.dev/epoch" in annotations:
        yield "applying the manifest again resets the epoch"
    if "Prune=false" not in annotations.get("argocd.argoproj.io/sync-options", ""):
        yield "a pruning deployer deletes the epoch"


@rule
def the_network_is_closed(manifest):
    policies = {item["metadata"]["name"]: item["spec"] for item in manifest.all("NetworkPolicy")}
    closed = policies.get("forwardplane-closed", {})
    if closed.get("policyTypes") != ["Ingress", "Egress"] or closed.get("ingress") or closed.get("egress"):
        yield "what no policy names is open"
    worker = policies.get(WORKER, {})
    sources = [source for entry in worker.get("ingress", ()) for source in entry.get("from", [{}])]
    wanted = [{"podSelector": {"matchLabels": of_schedulers(manifest)}}]
    if [source for source in sources if "namespaceSelector" not in source] != wanted:
        yield "workers are reachable from others than schedulers"
    for source in sources:
        outside = source.get("namespaceSelector")
        if outside is not None and "prometheus" not in str(source.get("podSelector")):
            yield "workers are reachable from other namespaces"
    if worker.get("egress") != [] or "Egress" not in worker.get("policyTypes", ()):
        yield "workers reach out"
    for name, policy in policies.items():
        if name not in ("forwardplane-closed", *SERVICES):
            yield from _beyond_the_collector(name, policy)
    for name in SERVICES:
        own = of_schedulers(manifest) if name == SCHEDULER else {NAME: name}
        if policies.get(name, {}).get("podSelector") != {"matchLabels": own}:
            yield f"{name}: the policy is of other pods"
        named = {port["name"] for port in manifest.container(name)["ports"]}
        for entry in policies.get(name, {}).get("ingress", ()):
            if not entry.get("from") or not entry.get("ports"):
                yield f"{name}: anyone, or any port"
            yield from (
                f"{name}: no port {port['port']}" for port in entry.get("ports", ()) if port["port"] not in named
            )


def _beyond_the_collector(name, policy):
    """What a further policy opens beside the way to the collector of traces."""
    if policy.get("ingress") or policy["policyTypes"] != ["Egress"]:
        yield f"{name}: opens a way in"
    ports = sorted(port["port"] for entry in policy["egress"] for port in entry.get("ports", [{"port": 0}]))
    if ports != [53, 53, 4317] or not all(
        {"namespaceSelector", "podSelector"} == set(peer)
        for entry in policy["egress"]
        for peer in entry.get("to", [{}])
    ):
        yield f"{name}: leads elsewhere than to the collector of traces"


@rule
def settings_travel_with_a_hash(manifest):
    for name in SERVICES:
        (source,) = manifest.container(name)["envFrom"]
        if not re.fullmatch(rf"{name}-[a-z0-9]{{10}}", source["configMapRef"]["name"]):
            yield f"{name}: new settings do not reach pods"


@rule
def ports_of_settings_are_the_containers(manifest):
    ports = {"PORT": "grpc", "HEALTH_PORT": "health", "METRICS_PORT": "metrics", "HTTP_PORT": "http"}
    for name in SERVICES:
        named = {port["name"]: str(port["containerPort"]) for port in manifest.container(name)["ports"]}
        settings = manifest.settings(name)
        for variable, port in ports.items():
            if settings.get(f"FORWARDPLANE_{variable}") != named.get(port):
                yield f"{name}: {variable} differs from the port {port}"
        for address in ("HOST", "METRICS_HOST"):
            if settings.get(f"FORWARDPLANE_{address}") != "0.0.0.0":
                yield f"{name}: {address} is not reachable"
    settings = manifest.settings(SCHEDULER)
    for edge in range(int(settings["FORWARDPLANE_EDGES"])):
        port = int(settings["FORWARDPLANE_EDGE_METRICS_PORT"]) + edge
        if port not in [item["containerPort"] for item in manifest.container(SCHEDULER)["ports"]]:
            yield f"metrics of edge {edge} cannot be scraped"


@rule
def volumes_are_what_they_must_be(manifest):
    for name in SERVICES:
        mounts = {mount["mountPath"]: mount for mount in manifest.container(name)["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in manifest.pod(name)["volumes"]}
        models = mounts.get(manifest.settings(name)["FORWARDPLANE_MODEL_CACHE"], {})
        if models.get("readOnly") is not True or "persistentVolumeClaim" not in volumes.get(models.get("name"), {}):
            yield f"{name}: the models are no read-only volume"
        shm = volumes.get(mounts.get("/dev/shm", {}).get("name"), {}).get("emptyDir", {})
        if shm.get("medium") != "Memory" or "sizeLimit" not in shm:
            yield f"{name}: shared memory is 64 MiB"
        for volume in volumes.values():
            if "emptyDir" in volume and "sizeLimit" not in volume["emptyDir"]:
                yield f"{name}: volume {volume['name']} may fill the node"
    cache = manifest.settings(WORKER)["FORWARDPLANE_GRAPH_MEMORY_FILE"].rpartition("/")[0]
    mount = {item["mountPath"]: item["name"] for item in manifest.container(WORKER)["volumeMounts"]}.get(cache)
    if "emptyDir" not in {item["name"]: item for item in manifest.pod(WORKER)["volumes"]}.get(mount, {}):
        yield "workers share a cache of compiled code"


@rule
def files_of_settings_are_where_they_say(manifest):
    for name in SERVICES:
        volumes = {volume["name"]: volume for volume in manifest.pod(name)["volumes"]}
        mounts = {item["mountPath"]: item for item in manifest.container(name)["volumeMounts"]}
        for variable, kinds in FILES.items():
            value = manifest.settings(name).get(f"FORWARDPLANE_{variable}")
            if value is None:
                continue
            place = value if variable in FOLDERS else value.rpartition("/")[0]
            mount = mounts.get(place, {})
            volume = volumes.get(mount.get("name"), {})
            if not kinds & set(volume):
                yield f"{name}: nothing is mounted where {variable} is looked for"
            if "secret" in volume and not (mount.get("readOnly") and volume["secret"].get("defaultMode") == 0o440):
                yield f"{name}: a secret is writable, or others read it"
            if "emptyDir" in volume and mount.get("readOnly"):
                yield f"{name}: {variable} cannot be written"


@rule
def callers_outlive_a_scheduler_in_production(manifest):
    if manifest.all("Certificate") and "FORWARDPLANE_RESUME_KEY_FILE" not in manifest.settings(SCHEDULER):
        yield "streams end with their scheduler"


@rule
def quality_of_service_is_guaranteed(manifest):
    for name in SERVICES:
        resources = manifest.container(name)["resources"]
        if resources.get("requests") != resources.get("limits"):
            yield f"{name}: throttled or evicted"
        if not str(resources.get("requests", {}).get("cpu", "")).isdecimal():
            yield f"{name}: no whole processors"


@rule
def workers_are_near_the_scheduler(manifest):
    terms = manifest.pod(WORKER).get("affinity", {}).get("podAffinity", {})
    near = [
        term["podAffinityTerm"]
        for term in terms.get("preferredDuringSchedulingIgnoredDuringExecution", ())
        if term["podAffinityTerm"]["topologyKey"] == "topology.kubernetes.io/zone"
    ]
    if [term["labelSelector"]["matchLabels"] for term in near] != [{NAME: SCHEDULER}]:
        yield "another zone adds a millisecond to every step"


@rule
def devices_are_whole_tolerated_and_not_shared(manifest):
    if manifest.settings(WORKER)["FORWARDPLANE_DEVICE"] != "cuda":
        return
    resources = manifest.container(WORKER)["resources"]
    counts = [resources[kind].get("nvidia.com/gpu") for kind in ("requests", "limits")]
    if counts[0] != counts[1] or not str(counts[0]).isdecimal():
        yield "devices are requested and limited alike, in whole numbers"
    if "nvidia.com/gpu" not in [item.get("key") for item in manifest.pod(WORKER).get("tolerations", ())]:
        yield "the device's nodes refuse the pod"
    if "nvidia.com/gpu" in str(manifest.container(SCHEDULER)["resources"]):
        yield "the scheduler holds a device"


@rule
def one_hand_scales(manifest):
    replicas = manifest.one("Deployment", WORKER)["spec"].get("replicas")
    scaled = manifest.all("ScaledObject")
    if (replicas is None) != bool(scaled):
        yield "replicas and an autoscaler fight, or nobody scales"
    for item in scaled:
        spec = item["spec"]
        (trigger,) = spec["triggers"]
        if trigger["type"] != "prometheus" or "forwardplane_scheduler_" not in trigger["metadata"]["query"]:
            yield "scales on a signal other than the scheduler's"
        if not all(part.strip().startswith("sum(") for part in trigger["metadata"]["query"].split(" + ")):
            yield "KEDA takes one series only"
        if "activationThreshold" not in trigger["metadata"] or spec.get("fallback", {}).get("replicas", 0) < 1:
            yield "without Prometheus nothing serves"
        if spec.get("cooldownPeriod", 300) <= budget_s(manifest.container(WORKER)["startupProbe"]):
            yield "workers go before they have come"
        if spec["minReplicaCount"] < 1:
            yield "scales to nothing"


@rule
def images_have_a_version(manifest):
    for name in SERVICES:
        image = manifest.container(name)["image"]
        if image.rpartition(":")[2] in ("latest", image) and "@sha256:" not in image:
            yield f"{name}: the image has no version"


@rule
def what_is_watched_exists(manifest):
    for monitor in manifest.all("PodMonitor"):
        name = monitor["metadata"]["name"]
        if not set(_monitored(monitor["spec"]["selector"])) >= {name, *([STANDBY] if name == SCHEDULER else [])}:
            yield f"{name}: the monitor looks at other pods"
        asked = {endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]}
        for port in manifest.container(name)["ports"]:
            if "metrics" in port["name"] and port["name"] not in asked:
                yield f"{name}: nobody scrapes {port['name']}"
    if not any("grafana_dashboard" in item["metadata"].get("labels", {}) for item in manifest.all("ConfigMap")):
        yield "no dashboards"


def _monitored(selector):
    """Names of pods that a monitor selects."""
    yield from selector.get("matchLabels", {}).values()
    for expression in selector.get("matchExpressions", ()):
        if expression["key"] == NAME and expression["operator"] == "In":
            yield from expression["values"]


@rule
def certificates_are_renewed_and_mounted(manifest):
    leaves = [item["spec"] for item in manifest.all("Certificate") if not item["spec"].get("isCA")]
    for spec in leaves:
        name = spec["secretName"].removesuffix("-certificate")
        if spec["privateKey"].get("rotationPolicy") != "Always" or "renewBefore" not in spec:
            yield f"{name}: its key is never changed"
        secrets = {item["name"]: item["secret"] for item in manifest.pod(name)["volumes"] if "secret" in item}
        mounted = [item for item in manifest.container(name)["volumeMounts"] if item["name"] in secrets]
        if spec["secretName"] not in [item["secretName"] for item in secrets.values()] or not mounted:
            yield f"{name}: the certificate is not mounted"
        if not all(item.get("readOnly") for item in mounted):
            yield f"{name}: the certificate is writable"


@rule
def links_are_mutual_tls_where_there_are_certificates(manifest):
    leaves = {item["spec"]["secretName"]: item["spec"] for item in manifest.all("Certificate")}
    for name, role in ((SCHEDULER, "scheduler"), (WORKER, "worker")):
        spec = leaves.get(f"{name}-certificate")
        if spec is None:
            continue
        if spec.get("uris") != [f"spiffe://forwardplane/{role}"]:
            yield f"{name}: its certificate does not name its role"
        folder = manifest.settings(name).get("FORWARDPLANE_TLS_DIR")
        if folder not in [item["mountPath"] for item in manifest.container(name)["volumeMounts"]]:
            yield f"{name}: it does not read its certificate"
        if role == "worker" and "worker.forwardplane" not in spec["dnsNames"]:
            yield f"{name}: the scheduler asks for another name"
        if role == "worker" and manifest.settings(name).get("FORWARDPLANE_INSECURE") != "false":
            yield f"{name}: plain text is accepted"
