"""Environments of the engines we compare with, each apart from the project's, built once under build/peers."""

import json
import os
import subprocess
import sys
import venv
from pathlib import Path

from protos.service.model_files import ModelFolder

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / "build" / "peers"
TRANSFORMERS = ("torch==2.13.0", "transformers>=4.57,<6", "accelerate>=1", "gguf>=0.17", "sentencepiece", "protobuf")


BUILD_VARIABLES = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF"}
"""llama.cpp without what reads pictures, which is a third of its compilation."""


UNWANTED = {"vllm": ("torchvision", "torchaudio", "torchcodec")}
"""Come along, built for another torch than its own, and break the import of every text model."""


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The Python of the peer's environment, installed on first use."""
    home = PEERS / name
    python = home / "bin" / "python"
    done = home / ".packages.json"
    if done.exists() and json.loads(done.read_text()) == list(packages):
        return python
    print(f"building the environment of {name} (minutes the first time)", file=sys.stderr)
    venv.create(home, with_pip=True, clear=True)
    command = [python, "-m", "pip", "install", "--quiet", *packages]
    subprocess.run(command, check=True, env={**os.environ, **BUILD_VARIABLES})
    if name in UNWANTED:
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNWANTED[name]], check=True)
    done.write_text(json.dumps(list(packages)))
    return python


def hub_form(folder: ModelFolder, *, python: Path) -> Path:
    """The model in Hugging Face's form, float32, written on first use by a peer's own transformers."""
    home = PEERS / f"{folder.card.name}-hub"
    done = home / ".fingerprint"
    if not done.exists() or done.read_text() != folder.card.weights_fingerprint:
        script = Path(__file__).parent / "hub_form.py"
        subprocess.run([python, script, folder.weights, folder.tokenizer, home], check=True, stdout=sys.stderr)
        done.write_text(folder.card.weights_fingerprint)
    return home


class LinePeer:
    """A peer process that answers one JSON line to each JSON line."""

    def __init__(self, python: Path, script: Path, *arguments: str) -> None:
        self._process = subprocess.Popen(
            [python, script, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def ask(self, order: dict[str, object]) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(30)
        self._process.stdout.close()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the peer ended with {self._process.wait(30)}"
        return json.loads(line)
