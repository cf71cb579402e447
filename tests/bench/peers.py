"""Environments of the engines we compare with, each apart from the project's, built once under build/peers."""

import json
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PEERS = ROOT / "build" / "peers"
TRANSFORMERS = ("torch==2.13.0", "transformers>=4.57,<6", "accelerate>=1", "gguf>=0.17", "sentencepiece", "protobuf")


def environment(name: str, packages: tuple[str, ...]) -> Path:
    """The Python of the peer's environment, installed on first use."""
    home = PEERS / name
    python = home / "bin" / "python"
    done = home / ".packages.json"
    if done.exists() and json.loads(done.read_text()) == list(packages):
        return python
    print(f"building the environment of {name} (minutes the first time)", file=sys.stderr)
    venv.create(home, with_pip=True, clear=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    done.write_text(json.dumps(list(packages)))
    return python


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
