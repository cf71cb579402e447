"""The bare step of the native kernels against llama.cpp on the same file, alternating in one run.

Prints figures, asserts none. Builds llama.cpp in its own environment on first use (ten minutes). Ratios are of medians;
"best" compares the fastest steps, which neighbours disturb least.
"""

import statistics
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from kernels.native import ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits, RawTensor, spec_from_metadata
from protos.service.gguf_header import read_gguf_header
from protos.service.gguf_types import TENSOR_TYPES
from tests.bench.peers import LinePeer, environment
from tests.support.model import model_folder
from tests.support.native_cases import Sequence, step_input

pytestmark = [pytest.mark.bench, pytest.mark.model, pytest.mark.timeout(3600)]

THREADS = 2
ROUNDS = 3
LLAMA = ("llama-cpp-python==0.3.36",)
DECODE = [(1, 64), (4, 64), (16, 64), (64, 64), (1, 1024), (16, 1024)]
PREFILL = [256, 512]
NUM_PAGES = 16 * 72 + 1
NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}


@pytest.fixture(scope="module")
def peer():
    started = LinePeer(environment("llama", LLAMA), Path(__file__).parent / "llama_peer.py", *peer_arguments())
    yield started
    started.close()


def peer_arguments():
    return str(model_folder().weights), str(THREADS)


@pytest.fixture(scope="module")
def model():
    native = load_native()
    path = model_folder().weights
    header, file = read_gguf_header(path), np.memmap(path, np.uint8, "r")
    weights = {
        name: RawTensor(type=NUMBERS[info.type.name], data=file[info.offset : info.offset + info.num_bytes])
        for name, info in header.tensors.items()
    }
    spec = spec_from_metadata(header.metadata, vocab_size=header.tensors["token_embd.weight"].shape[0])
    limits = NativeLimits(num_pages=(NUM_PAGES,), max_context=1200, max_tokens=1024, max_rows=64)
    with ThreadPool(native, threads=THREADS) as pool, NativeModel(spec, weights, limits=limits, pool=pool) as made:
        yield made


def timed(model, step):
    step.wants_logits[:] = False
    begin = time.perf_counter()
    model.step(step)
    return time.perf_counter() - begin


def decode(model, rows, context, steps):
    each = -(-(context + steps) // 16)
    sequences = [Sequence(range(1 + row * each, 1 + (row + 1) * each)) for row in range(rows)]
    for sequence in sequences:
        timed(model, step_input([(sequence, np.arange(context))]))
    model.take_times()
    return [timed(model, step_input([(sequence, [7]) for sequence in sequences])) for _ in range(steps)]


def compare(capsys, label, peer_round, own_round, tokens):
    """Alternate, then print one row of the table."""
    theirs, ours = [], []
    psutil.cpu_percent()
    for _ in range(ROUNDS):
        theirs += peer_round()
        ours += own_round()
    ratio = statistics.median(theirs) / statistics.median(ours)
    best = min(theirs) / min(ours)
    rate = tokens / statistics.median(ours)
    with capsys.disabled():
        print(
            f"\n{label}: {rate:.0f} tokens/s, llama.cpp {tokens / statistics.median(theirs):.0f}, "
            f"ratio {ratio:.2f} (best {best:.2f}); CPU {psutil.cpu_percent():.0f} %"
        )


@pytest.mark.parametrize(("rows", "context"), DECODE)
def test_decode(model, peer, capsys, rows, context):
    steps = 24 if rows <= 4 else 10
    order = {"kind": "decode", "rows": rows, "context": context, "steps": steps}
    compare(
        capsys,
        f"{model.describe()}, decode {rows} rows at {context}",
        lambda: peer.ask(order)["seconds"],
        lambda: decode(model, rows, context, steps),
        rows,
    )
    times = {name: f"{1e3 * seconds / steps:.2f}" for name, seconds in model.take_times().items()}
    with capsys.disabled():
        print(f"    ms by phase, last round: {times}")


@pytest.mark.parametrize("tokens", PREFILL)
def test_prefill(model, peer, capsys, tokens):
    compare(
        capsys,
        f"{model.describe()}, prefill {tokens}",
        lambda: peer.ask({"kind": "prefill", "tokens": tokens})["seconds"],
        lambda: [timed(model, step_input([(Sequence(range(1, 40)), np.arange(tokens))]))],
        tokens,
    )
