"""The bare step of the native kernels on a model folder's weights: no plans, no sampling, no services."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kernels.native import Native, ThreadPool, load_native
from kernels.native_model import NativeModel
from kernels.native_spec import NativeLimits, RawTensor, spec_from_metadata
from kernels.native_types import PAGE_SIZE, Variant
from protos.service.gguf_header import read_gguf_header
from protos.service.gguf_types import TENSOR_TYPES
from tests.support.native_cases import Sequence, step_input

NUMBERS = {kind.name: number for number, kind in TENSOR_TYPES.items()}
MAX_ROWS, MAX_CONTEXT = 64, 2304


def native_library() -> Native:
    native = load_native()
    assert isinstance(native, Native), native
    return native


@contextmanager
def bare_model(
    path: Path, pool: ThreadPool, *, num_pages: int = 4700, variant: Variant = Variant.AUTO
) -> Iterator[NativeModel]:
    header, file = read_gguf_header(path), np.memmap(path, np.uint8, "r")
    weights = {
        name: RawTensor(type=NUMBERS[info.type.name], data=file[info.offset : info.offset + info.num_bytes])
        for name, info in header.tensors.items()
    }
    spec = spec_from_metadata(header.metadata, vocab_size=header.tensors["token_embd.weight"].shape[0])
    limits = NativeLimits(
        num_pages=(num_pages,) * spec.num_groups,
        max_context=MAX_CONTEXT,
        max_tokens=1024,
        max_rows=MAX_ROWS,
        variant=variant,
    )
    with NativeModel(spec, weights, limits=limits, pool=pool) as made:
        yield made


def timed(model: NativeModel, rows: list[tuple[Sequence, object]], *, logits: bool = False) -> float:
    """Seconds of one step of [(sequence, ids)]."""
    step = step_input(rows, num_groups=model.spec.num_groups)
    assert step.wants_logits is not None
    step.wants_logits[:] = logits
    begin = time.perf_counter()
    model.step(step)
    return time.perf_counter() - begin


def prefilled(model: NativeModel, rows: int, context: int, *, room: int) -> list[Sequence]:
    """Sequences of `context` tokens, with pages for `room` more."""
    each = -(-(context + room) // PAGE_SIZE)
    made = [Sequence(range(1 + row * each, 1 + (row + 1) * each)) for row in range(rows)]
    for sequence in made:
        for begin in range(0, context, 512):
            timed(model, [(sequence, np.arange(begin, min(begin + 512, context)))])
    return made


def decode(model: NativeModel, rows: int, context: int, steps: int) -> list[float]:
    """Seconds of each of `steps` decode steps."""
    made = prefilled(model, rows, context, room=steps)
    model.take_times()
    return [timed(model, [(sequence, [7]) for sequence in made]) for _ in range(steps)]
