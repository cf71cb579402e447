"""The image recipes: linted, and held to what the manifests rely on."""

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.support.manifests import K8S, ROOT

RECIPES = sorted((K8S / "images").glob("*.Dockerfile"))
BUILDERS = {"g++", "gcc", "make", "apt-get"}


def lint(path):
    hadolint = Path(sys.executable).with_name("hadolint")
    return subprocess.run([str(hadolint), str(path)], capture_output=True, text=True, check=False, timeout=60)


def test_there_is_a_recipe_for_each_image():
    assert [path.stem for path in RECIPES] == ["scheduler", "worker-cpu", "worker"]


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_hadolint_has_nothing_to_say(path):
    done = lint(path)

    assert done.returncode == 0, done.stdout


def test_hadolint_finds_a_poor_recipe(tmp_path):
    poor = tmp_path / "Dockerfile"
    poor.write_text("FROM debian:latest\nRUN apt-get install g++\n")

    assert lint(poor).returncode != 0


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_final_stage_is_small_and_unprivileged(path):
    text = path.read_text(encoding="utf-8")
    base = re.search(r"^ARG BASE_IMAGE=(\S+)$", text, flags=re.MULTILINE)[1]
    final = text.rpartition("\nFROM ")[2]

    assert re.fullmatch(r"[\w/.-]+:\d+\.\d+\.\d+[\w.-]*", base), "the base image is pinned"
    assert re.search(r"^USER [1-9]\d*:[1-9]\d*$", final, flags=re.MULTILINE)
    assert "HEALTHCHECK" not in text
    assert not [word for word in BUILDERS if word in final]
    assert "RUN" not in final
    for folder in re.findall(r"^COPY (?!--from)(.+) \S+$", text, flags=re.MULTILINE):
        assert all((ROOT / name).exists() for name in folder.split()), folder


def test_ids_of_images_are_those_of_the_pods():
    for path in RECIPES:
        user = re.search(r"^USER (\d+):(\d+)$", path.read_text(), flags=re.MULTILINE)
        for manifest in ("scheduler.yaml", "worker.yaml"):
            assert f"runAsUser: {user[1]}" in (K8S / "base" / manifest).read_text()


def needed(name, extras, found):
    """Every distribution that comes with that one, in normal form."""
    for text in metadata.requires(name) or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras):
            normal = re.sub(r"[-_.]+", "-", need.name).lower()
            if normal not in found:
                found.add(normal)
                needed(need.name, {"", *need.extras}, found)
    return found


def test_everything_in_an_image_has_a_pinned_version():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pinned = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines if "==" in line}

    assert needed("forwardplane", {"", "worker", "kubernetes", "tracing"}, set()) <= pinned
