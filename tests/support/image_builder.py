"""Builds and runs our images without a Docker engine: mmdebstrap makes the base, buildah builds, podman with runc runs.

Public image registries may be out of reach, so the recipes' BASE_IMAGE is a Debian made here with the same Python
version's minor number. Everything lies in one folder; nothing of the machine's own container storage is touched.
"""

import html
import shutil
import subprocess
import sys
import urllib.parse
from dataclasses import dataclass
from pathlib import Path

from tests.support.manifests import K8S, ROOT

PROGRAMS = ("mmdebstrap", "buildah", "podman", "runc")
BASE = "localhost/debian-python:3.11.2"
_PACKAGES = "python3,python3-venv,ca-certificates"
_CERTIFICATES = "/etc/ssl/certs"
_CONTAINERS = """\
[containers]
default_ulimits = ["nofile=1024:1024", "nproc=4096:4096"]
[engine]
cgroup_manager = "cgroupfs"
runtime = "runc"
"""


def missing_programs() -> list[str]:
    return [name for name in PROGRAMS if shutil.which(name) is None]


@dataclass(frozen=True)
class ImageBuilder:
    """One storage of images below `folder`."""

    folder: Path

    def make_base(self) -> None:
        """The base image, from Debian's packages."""
        context = self.folder / "base"
        context.mkdir()
        archive = str(context / "rootfs.tar")
        _run(["mmdebstrap", "--quiet", "--variant=minbase", f"--include={_PACKAGES}", "bookworm", archive])
        (context / "Dockerfile").write_text("FROM scratch\nADD rootfs.tar /\n")
        self._buildah("bud", "--isolation", "chroot", "--pull-never", "-t", BASE, str(context))

    def build(self, recipe: str, *, torch_index: Path | None = None) -> str:
        """The image of `k8s/images/RECIPE.Dockerfile`; its name. `torch_index`: where torch comes from."""
        name = f"localhost/{recipe}:test"
        index: tuple[str, ...] = ()
        if torch_index is not None:
            index = ("--volume", f"{torch_index}:/torch:ro", "--build-arg", "TORCH_INDEX_URL=file:///torch")
        self._buildah(
            *("bud", "--isolation", "chroot", "--pull-never", "--build-arg", f"BASE_IMAGE={BASE}", *index),
            *("--volume", f"{_CERTIFICATES}:{_CERTIFICATES}:ro", "-f", str(K8S / "images" / f"{recipe}.Dockerfile")),
            *("-t", name, str(ROOT)),
        )
        return name

    def torch_index(self) -> Path:
        """A package index of the torch that this environment's pip finds, and what it needs."""
        folder = self.folder / "torch"
        constraints = ("--constraint", str(ROOT / "constraints.txt"))
        _run([sys.executable, "-m", "pip", "download", "-q", "-d", str(folder / "files"), *constraints, "torch"])
        for file in sorted((folder / "files").iterdir()):
            project = folder / file.name.partition("-")[0].lower().replace("_", "-")
            project.mkdir()
            link = urllib.parse.quote(file.name)
            (project / "index.html").write_text(f'<a href="../files/{link}">{html.escape(file.name)}</a>')
        return folder

    def added_bytes(self, image: str) -> int:
        """Size of what an image has beyond the base."""
        asked = (*self._podman(), "image", "inspect", "--format", "{{.Size}}")
        whole, base = (int(_run([*asked, name])) for name in (image, BASE))
        return whole - base

    def run(self, image: str, *arguments: str, options: tuple[str, ...] = ()) -> "subprocess.CompletedProcess[str]":
        """A container as a pod would run it, to its end: read-only, without capabilities, on the host's network."""
        command = [
            *self._podman(),
            *("run", "--rm", "--network", "host", "--read-only", "--cap-drop", "all"),
            *("--security-opt", "no-new-privileges", *options, image, *arguments),
        ]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=400)

    def _podman(self) -> tuple[str, ...]:
        settings = self.folder / "containers.conf"
        settings.write_text(_CONTAINERS)
        return "env", f"CONTAINERS_CONF={settings}", "podman", *self._storage()

    def _buildah(self, *arguments: str) -> str:
        return _run(["buildah", *self._storage(), *arguments])

    def _storage(self) -> tuple[str, ...]:
        root, runs = self.folder / "storage", self.folder / "runs"
        return "--storage-driver", "vfs", "--root", str(root), "--runroot", str(runs)


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=900)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout
