"""Runs inside the peer's own environment: transformers' batched greedy `generate` on the same GGUF, one round a line.

Reads `{"prompts": [[ids…]…], "new_tokens": n}` lines on stdin, answers
`{"seconds": s, "tokens": n}` lines on stdout.
"""

import json
import sys
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    torch.set_num_threads(int(sys.argv[2]))
    path = Path(sys.argv[1])
    model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=torch.float32)
    model.eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        ids = torch.tensor(order["prompts"])
        new = order["new_tokens"]
        begin = time.monotonic()
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=new,
                max_new_tokens=new,
                pad_token_id=0,
            )
        seconds = time.monotonic() - begin
        print(json.dumps({"seconds": seconds, "tokens": int((out.shape[1] - ids.shape[1]) * out.shape[0])}), flush=True)


main()
