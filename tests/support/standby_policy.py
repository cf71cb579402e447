"""What must hold where a standby waits for the Lease; nothing to say where there is none."""

from copy import deepcopy

from tests.support.manifest_policy import CELL, NAME, RULES, SCHEDULER, STANDBY, rule

__all__ = ["RULES"]


def standby(manifest):
    """Its Deployment's content; None: there is no standby."""
    return manifest.one("Deployment", STANDBY)["spec"] if manifest.has("Deployment", STANDBY) else None


@rule
def a_standby_is_a_scheduler_that_waits(manifest):
    spec = standby(manifest)
    if spec is None:
        return
    pod, expected = deepcopy(spec["template"]["spec"]), deepcopy(manifest.pod(SCHEDULER))
    (container,), (wanted,) = pod["containers"], expected["containers"]
    if {"name": "FORWARDPLANE_LEASE_ROLE", "value": "standby"} not in container["env"]:
        yield "both are primaries: plain callers reach nobody while this one serves"
    container["env"] = [item for item in container["env"] if item["name"] != "FORWARDPLANE_LEASE_ROLE"]
    if container["readinessProbe"]["grpc"].pop("service", None) is not None:
        yield "its readiness does not mean warm: no rollout of it ends"
    wanted["readinessProbe"]["grpc"].pop("service")
    if "podAntiAffinity" not in pod.pop("affinity", {}):
        yield "it goes with the node of the other"
    expected.pop("affinity", None)
    if pod != expected:
        yield "its pods are not the scheduler's"
    if spec["replicas"] != 1 or spec["strategy"] != {"type": "Recreate"}:
        yield "there is more than one standby"


@rule
def only_who_asks_for_health_reaches_a_standby(manifest):
    spec = standby(manifest)
    if spec is None:
        return
    labels = spec["template"]["metadata"]["labels"]
    for service in manifest.all("Service"):
        name, selector = service["metadata"]["name"], service["spec"]["selector"]
        if name == "forwardplane-cell":
            of_all = [manifest.one("Deployment", each)["spec"]["template"] for each in (SCHEDULER, STANDBY)]
            if selector != CELL or not all(CELL.items() <= each["metadata"]["labels"].items() for each in of_all):
                yield "the cell's Service does not select both"
            if service["spec"].get("clusterIP") != "None":
                yield "a cluster address hides which scheduler serves"
        elif selector.items() <= labels.items():
            yield f"{name}: callers get to a standby that does not serve"
    if not manifest.has("Service", "forwardplane-cell"):
        yield "nobody reaches the standby when it serves"


@rule
def a_lease_elects_where_there_are_two(manifest):
    named = manifest.settings(SCHEDULER).get("FORWARDPLANE_LEASE_OBJECT")
    if standby(manifest) is None:
        if named is not None or manifest.all("Lease"):
            yield "one scheduler waits for a Lease that nobody else wants"
        return
    leases = {item["metadata"]["name"]: item for item in manifest.all("Lease")}
    if named not in leases:
        yield "the Lease that schedulers wait for is missing"
        return
    if "spec" in leases[named]:
        yield "applying the manifest again takes the Lease from its holder"
    if "Prune=false" not in leases[named]["metadata"].get("annotations", {}).get("argocd.argoproj.io/sync-options", ""):
        yield "a pruning deployer deletes the Lease"
    if "FORWARDPLANE_RESUME_KEY_FILE" not in manifest.settings(SCHEDULER):
        yield "streams end when the other takes over"


@rule
def a_standby_may_be_disrupted_by_itself(manifest):
    if standby(manifest) is None:
        return
    budgets = {item["metadata"]["name"]: item["spec"] for item in manifest.all("PodDisruptionBudget")}
    if budgets.get(STANDBY, {}).get("selector", {}).get("matchLabels") != {NAME: STANDBY}:
        yield "both may go at once"
