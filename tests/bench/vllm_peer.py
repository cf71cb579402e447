"""Runs inside the peer's own environment: vLLM's offline engine in float32, one batch a line.

Reads `{"prompts": [[ids…]…], "new_tokens": n}` lines on stdin, answers `{"seconds": s, "tokens": n}` lines on stdout.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{int(sys.argv[2]) - 1}")

from vllm import LLM, SamplingParams


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever is printed on the way must not stand between answers
    engine = LLM(
        model=sys.argv[1], dtype="float32", max_model_len=2048, max_num_seqs=64, enable_prefix_caching=False, seed=0
    )
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        params = SamplingParams(temperature=0.0, max_tokens=order["new_tokens"], ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": ids} for ids in order["prompts"]]
        begin = time.monotonic()
        done = engine.generate(prompts, params, use_tqdm=False)
        seconds = time.monotonic() - begin
        tokens = sum(len(each.outputs[0].token_ids) for each in done)
        print(json.dumps({"seconds": seconds, "tokens": tokens}), file=answers, flush=True)


main()
