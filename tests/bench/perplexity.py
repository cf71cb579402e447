"""Perplexity with rounded activations beside float ones, on about 20,000 tokens of this repository's documentation.

The text is the project's own and under its licence. Windows of `WINDOW` tokens, each alone; every prediction in a
window counts. Both run on the native kernels: the check variant multiplies floats by dequantised weights. The issue
allows 1 %. Asserts it.

    python -m tests.bench.perplexity [--tokens 20000]
"""

import argparse
import math
from pathlib import Path

import numpy as np
from rich.console import Console
from tokenizers import Tokenizer

from kernels.native import ThreadPool
from kernels.native_model import NativeModel
from kernels.native_types import Variant
from protos.client.serve_command import ServeOptions, resolve_model
from tests.bench.bare_model import bare_model, native_library
from tests.support.native_cases import Sequence, step_input

ROOT = Path(__file__).parents[2]
WINDOW, CHUNK = 512, 128
MOST = 0.01


def text() -> str:
    """Every page of documentation, in a fixed order."""
    pages = sorted(path for path in ROOT.rglob("*.md") if not {".venv", "build", "node_modules"} & {*path.parts})
    return "\n\n".join(path.read_text() for path in pages)


def negative_log_likelihood(model: NativeModel, ids: np.ndarray) -> tuple[float, int]:
    """(sum over predictions in nats, how many) of one window."""
    sequence, total = Sequence(range(1, 2 + WINDOW // 16)), 0.0
    for begin in range(0, len(ids) - 1, CHUNK):
        chunk = ids[begin : min(begin + CHUNK, len(ids) - 1)]
        step = step_input([(sequence, chunk)], num_groups=model.spec.num_groups, out_tokens=range(len(chunk)))
        logits = model.step(step).logits.astype(np.float64)
        best = logits.max(-1)
        normalisers = best + np.log(np.exp(logits - best[:, None]).sum(-1))
        targets = ids[begin + 1 : begin + 1 + len(chunk)]
        total += float((normalisers - logits[np.arange(len(chunk)), targets]).sum())
    return total, len(ids) - 1


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=20_000)
    arguments = parser.parse_args()
    folder = resolve_model(ServeOptions(), Console(quiet=True))
    ids = np.array(Tokenizer.from_file(str(folder.tokenizer)).encode(text()).ids[: arguments.tokens], np.int64)
    windows = [ids[begin : begin + WINDOW] for begin in range(0, len(ids) - 1, WINDOW)]
    found = {}
    with ThreadPool(native_library(), threads=2) as pool:
        for variant in (Variant.AUTO, Variant.CHECK):
            with bare_model(folder.weights, pool, num_pages=2 + WINDOW // 16, variant=variant) as model:
                parts = [negative_log_likelihood(model, window) for window in windows if len(window) > 1]
            found[variant] = math.exp(sum(part for part, _ in parts) / sum(count for _, count in parts))
    change = found[Variant.AUTO] / found[Variant.CHECK] - 1
    line = f"{len(ids)} tokens: perplexity {found[Variant.AUTO]:.4f}, float activations {found[Variant.CHECK]:.4f}"
    Console().print(f"{line}: {100 * change:+.2f} %, at most {100 * MOST:.0f} %")
    assert abs(change) <= MOST


if __name__ == "__main__":
    main()
