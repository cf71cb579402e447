"""Every object of every overlay is one that a cluster would take, as far as schemas can say."""

import pytest

from tests.support.manifests import (
    ADDED,
    CRDS,
    JOB,
    K8S,
    OVERLAYS,
    VERSIONS,
    Manifest,
    crd_problems,
    is_custom,
    objects,
    schema_problems,
)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("overlay", [*OVERLAYS, *ADDED])
def test_built_in_objects_fit_the_api(overlay, version):
    built_in = [item for item in objects(overlay) if not is_custom(item)]

    assert len(built_in) >= 15
    assert not [problem for item in built_in for problem in schema_problems(item, version)]


@pytest.mark.skipif(not CRDS.is_dir(), reason="CRD check not run: no folder of definitions beside the checkout")
@pytest.mark.parametrize("overlay", OVERLAYS)
def test_custom_objects_fit_their_definitions(overlay):
    custom = [item for item in objects(overlay) if is_custom(item)]

    assert bool(custom) == (overlay != "local")
    assert not [problem for item in custom for problem in crd_problems(item)]


def test_an_unknown_field_and_a_wrong_type_are_found():
    (deployment, *_) = [item for item in objects("local") if item["kind"] == "Deployment"]
    deployment["spec"]["replicaz"] = 1
    assert schema_problems(deployment, VERSIONS[0])

    (deployment, *_) = [item for item in objects("local") if item["kind"] == "Deployment"]
    deployment["spec"]["template"]["spec"]["containers"][0]["ports"][0]["containerPort"] = "nine"
    assert schema_problems(deployment, VERSIONS[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_the_job_that_fills_the_models_volume_fits_the_overlay_whose_volume_it_is(version):
    (job,) = objects(JOB)
    assert schema_problems(job, version) == []
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    local = Manifest(objects("local"))
    settings = local.settings("forwardplane-scheduler")
    assert container["command"][2:] == [
        settings["FORWARDPLANE_MODEL"],
        "--model-cache",
        settings["FORWARDPLANE_MODEL_CACHE"],
    ]
    assert container["image"] == local.container("forwardplane-scheduler")["image"]
    claimed = local.one("PersistentVolumeClaim", pod["volumes"][0]["persistentVolumeClaim"]["claimName"])
    assert claimed["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert pod["securityContext"] == local.pod("forwardplane-scheduler")["securityContext"]


def test_an_unknown_kind_is_found():
    assert schema_problems({"apiVersion": "v1", "kind": "Poddle", "metadata": {"name": "x"}}, VERSIONS[0])


@pytest.mark.skipif(not CRDS.is_dir(), reason="CRD check not run: no folder of definitions beside the checkout")
@pytest.mark.parametrize("kind", ["ScaledObject", "Certificate", "InferencePool", "PodMonitor", "PrometheusRule"])
def test_an_unknown_field_of_a_custom_object_is_found(kind):
    (item, *_) = [found for found in objects("production") if found["kind"] == kind]
    item["spec"]["mistake"] = 1

    assert crd_problems(item)


def test_every_component_is_used_by_an_overlay_or_tested_beside_them():
    tested = {component for _, component in ADDED.values()}
    used = "".join((K8S / "overlays" / overlay / "kustomization.yaml").read_text() for overlay in OVERLAYS)

    for path in (K8S / "components").iterdir():
        assert f"components/{path.name}" in used or path.name in tested, path
