"""A real core process: its model folder, its flags, and what it exports."""

import asyncio
import os
import socket
import sys
import urllib.request
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from protos.service.model_files import CARD_FILE, TOKENIZER_FILE, WEIGHTS_FILE, ModelCard, encode_card
from protos.wire.worker_info import WorkerInfo

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 30.0


def write_model_folder(path: Path, info: WorkerInfo) -> Path:
    """A folder of files that the core never opens, with the card of what the worker serves."""
    path.mkdir()
    card = ModelCard(
        name="fake",
        architecture="llama",
        context_tokens=info.limits.context_tokens,
        vocab_size=info.logits_width,
        eos_token_ids=(2,),
        weights_fingerprint=info.fingerprints.weights,
        tokenizer_fingerprint=info.fingerprints.tokenizer,
    )
    (path / CARD_FILE).write_bytes(encode_card(card))
    for name in (TOKENIZER_FILE, WEIGHTS_FILE):
        (path / name).write_bytes(b"")
    return path


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class CoreProcess:
    """`python -m scheduler_svc --role core`, killed at the end if it still runs."""

    def __init__(self, folder: Path, *, model: Path, workers: str, flags: tuple[str, ...] = ()) -> None:
        self.socket_path = folder / "core.sock"
        self.metrics_port = free_port()
        self._flags = (
            *("--role", "core", "--socket-dir", str(folder), "--model", str(model), "--workers", workers),
            *("--metrics-port", str(self.metrics_port), "--drain-timeout-s", "30", "--report-interval-ms", "50"),
            *flags,
        )
        self.lifeline = -1
        self.process: asyncio.subprocess.Process | None = None
        self.log = b""

    async def __aenter__(self) -> "CoreProcess":
        read_end, self.lifeline = os.pipe()
        self.process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scheduler_svc", "--parent-fd", str(read_end), *self._flags),
            cwd=ROOT,
            pass_fds=(read_end,),
            stderr=asyncio.subprocess.PIPE,
        )
        os.close(read_end)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
            await self.process.wait()
        self.cut_lifeline()

    def cut_lifeline(self) -> None:
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1

    async def ended(self) -> int:
        """The exit code, once the process ends by itself; its log is then in `log`."""
        async with asyncio.timeout(LIMIT_S):
            _, self.log = await self.process.communicate()
        return self.process.returncode

    async def metric(self, name: str, **labels: str) -> float | None:
        """A sample as a scraper sees it."""
        url = f"http://127.0.0.1:{self.metrics_port}/metrics"

        def scrape() -> str:
            with urllib.request.urlopen(url, timeout=30) as reply:
                return reply.read().decode()

        for family in text_string_to_metric_families(await asyncio.to_thread(scrape)):
            for sample in family.samples:
                if sample.name == "forwardplane_scheduler_" + name and sample.labels == labels:
                    return sample.value
        return None
