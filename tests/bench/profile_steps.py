"""Writes tests/bench/PROFILE.md: where a step's time goes, against what the machine can do at most.

python -m tests.bench.profile_steps
"""

import statistics
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from rich.console import Console

from kernels.native import Ceilings, ThreadPool
from kernels.native_model import PHASE_NAMES, NativeModel
from kernels.native_types import PAGE_SIZE
from protos.client.serve_command import ServeOptions, resolve_model
from tests.bench.bare_model import bare_model, native_library, timed
from tests.support.native_cases import Sequence

PAGE = Path(__file__).parent / "PROFILE.md"
DECODE = [(rows, context) for context in (64, 1024) for rows in (1, 16, 64)]
PREFILL = [(256, 0), (512, 0), (256, 1024)]
STEPS, ROUNDS = 8, 3


@dataclass(frozen=True)
class Profile:
    name: str
    step_ms: float
    phases_ms: dict[str, float]
    memory_ms: float
    """What reading weights and KV once takes at the ceiling."""
    products_ms: float
    """What the products take at the ceiling."""


def costs(model: NativeModel, *, tokens: int, out_rows: int, kv_tokens: int, ceilings: Ceilings) -> tuple[float, float]:
    """(ms to read, ms to multiply) of a step at the ceilings. `kv_tokens`: positions that its rows read, in all."""
    spec = model.spec
    per_layer = spec.hidden_size * spec.head_dim * (2 * spec.num_q_heads + 2 * spec.num_kv_heads)
    per_layer += 3 * spec.hidden_size * spec.ffn_size
    head = spec.hidden_size * spec.vocab_size
    kv_bytes = kv_tokens * sum(spec.bytes_per_page(group, 1) for group in range(spec.num_groups))
    operations = 2 * (tokens * per_layer * len(spec.layers) + out_rows * head)
    return 1e3 * (model.weight_bytes + kv_bytes) / ceilings.read_bytes, 1e3 * operations / ceilings.int8_operations


def written(rows: int, context: int, *, room: int) -> list[Sequence]:
    """Sequences of `context` tokens whose keys and values are whatever the pages hold: time does not depend on them."""
    each = -(-(context + room) // PAGE_SIZE)
    made = [Sequence(range(1 + row * each, 1 + (row + 1) * each)) for row in range(rows)]
    for sequence in made:
        sequence.length = context
    return made


def decode_profile(model: NativeModel, rows: int, context: int, ceilings: Ceilings) -> Profile:
    sequences = written(rows, context, room=ROUNDS * STEPS)
    seconds, phases = [], []
    for _ in range(ROUNDS):
        model.take_times()
        seconds += [timed(model, [(sequence, [7]) for sequence in sequences]) for _ in range(STEPS)]
        phases.append(model.take_times())
    memory, products = costs(model, tokens=rows, out_rows=rows, kv_tokens=rows * context, ceilings=ceilings)
    medians = {name: 1e3 * statistics.median(times[name] for times in phases) / STEPS for name in PHASE_NAMES}
    name = f"decode, {rows} rows at {context}"
    return Profile(name, 1e3 * statistics.median(seconds), medians, memory, products)


def prefill_profile(model: NativeModel, tokens: int, prefix: int, ceilings: Ceilings) -> Profile:
    (sequence,) = written(1, prefix, room=tokens)
    seconds, phases = [], []
    for _ in range(ROUNDS):
        sequence.length = prefix
        model.take_times()
        seconds.append(timed(model, [(sequence, np.arange(tokens))]))
        phases.append(model.take_times())
    memory, products = costs(model, tokens=tokens, out_rows=1, kv_tokens=prefix + tokens, ceilings=ceilings)
    medians = {name: 1e3 * statistics.median(times[name] for times in phases) for name in PHASE_NAMES}
    name = f"prefill of {tokens} after {prefix}"
    return Profile(name, 1e3 * statistics.median(seconds), medians, memory, products)


def page(profiles: list[Profile], *, kernels: str, ceilings: Ceilings, busy: float) -> str:
    lines = [
        "# Where a step's time goes",
        "",
        "Made by `python -m tests.bench.profile_steps`: SmolLM2-135M (Q4_1), medians of the kernels' bare steps.",
        f"Kernels: {kernels}. Other work had the machine {busy:.0f} % busy beforehand: trust shares over milliseconds.",
        "",
        f"Ceilings of these threads: {ceilings.read_bytes / 1e9:.1f} GB/s read from memory, "
        f"{ceilings.int8_operations / 1e9:.0f} G int8 multiplications and additions a second (maddubs).",
        "",
        f"| ms | step | {' | '.join(PHASE_NAMES)} | least to read | least to multiply | step / larger least |",
        "| --- | " + "--- | " * (len(PHASE_NAMES) + 4),
    ]
    for profile in profiles:
        phases = " | ".join(f"{profile.phases_ms[name]:.1f}" for name in PHASE_NAMES)
        ratio = profile.step_ms / max(profile.memory_ms, profile.products_ms)
        lines.append(
            f"| {profile.name} | {profile.step_ms:.1f} | {phases} "
            f"| {profile.memory_ms:.1f} | {profile.products_ms:.1f} | {ratio:.1f} |"
        )
    lines += [
        "",
        "Least to read, at the ceiling: packed weights once, and the KV that the rows attend to. Least to multiply:",
        "products of the layers, and of the output layer for rows that sample; attention's own float32 is in neither.",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    weights = resolve_model(ServeOptions(), Console(quiet=True)).weights
    busy, threads = psutil.cpu_percent(2.0), psutil.cpu_count(logical=False) or 1
    with ThreadPool(native_library(), threads=threads) as pool, bare_model(weights, pool) as model:
        ceilings = pool.ceilings()
        model.kv_pages()[:] = 0.01
        profiles = [decode_profile(model, *shape, ceilings) for shape in DECODE]
        profiles += [prefill_profile(model, *shape, ceilings) for shape in PREFILL]
        text = page(profiles, kernels=model.describe(), ceilings=ceilings, busy=busy)
    PAGE.write_text(text)
    Console().print(text, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
