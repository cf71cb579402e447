"""Runs inside the peer's own environment: llama.cpp's batched decode and prefill on the same GGUF, one round a line.

Reads `{"kind": "decode", "rows": r, "context": c, "steps": n}` or `{"kind": "prefill", "tokens": n}`, answers
`{"seconds": [...]}`.
"""

import ctypes
import json
import random
import sys
import time

from llama_cpp import llama_cpp as llama

BATCH = 2048


@llama.llama_log_callback
def _quiet(level, text, data):
    """llama.cpp writes pages of text to stderr."""


class Peer:
    def __init__(self, path, threads):
        llama.llama_backend_init()
        llama.llama_log_set(_quiet, ctypes.c_void_p(0))
        self.model = llama.llama_model_load_from_file(path.encode(), llama.llama_model_default_params())
        self.vocab_size = llama.llama_vocab_n_tokens(llama.llama_model_get_vocab(self.model))
        self.threads = threads
        self.batch = llama.llama_batch_init(BATCH, 0, 1)

    def context(self, num_slots, num_rows):
        params = llama.llama_context_default_params()
        params.n_ctx, params.n_seq_max = num_slots, num_rows
        params.n_batch, params.n_ubatch = BATCH, 512
        params.n_threads = params.n_threads_batch = self.threads
        params.kv_unified = False
        return llama.llama_init_from_model(self.model, params)

    def run(self, context, tokens):
        """Seconds for [(id, position, sequence, wants logits)]."""
        self.batch.n_tokens = len(tokens)
        for index, (token, position, sequence, wants) in enumerate(tokens):
            self.batch.token[index], self.batch.pos[index] = token, position
            self.batch.n_seq_id[index], self.batch.seq_id[index][0] = 1, sequence
            self.batch.logits[index] = wants
        begin = time.perf_counter()
        assert llama.llama_decode(context, self.batch) == 0
        llama.llama_synchronize(context)
        return time.perf_counter() - begin

    def ids(self, count):
        return [random.randrange(self.vocab_size) for _ in range(count)]

    def decode(self, rows, length, steps):
        context = self.context(rows * (length + steps + 32), rows)
        for row in range(rows):
            ids = list(enumerate(self.ids(length)))
            for at in range(0, length, 512):
                self.run(context, [(token, position, row, False) for position, token in ids[at : at + 512]])
        seconds = [self.run(context, [(7, length + step, row, True) for row in range(rows)]) for step in range(steps)]
        llama.llama_free(context)
        return seconds

    def prefill(self, length):
        context = self.context(length + 32, 1)
        ids = enumerate(self.ids(length))
        seconds = self.run(context, [(token, position, 0, position == length - 1) for position, token in ids])
        llama.llama_free(context)
        return [seconds]


def main():
    peer = Peer(sys.argv[1], int(sys.argv[2]))
    print(json.dumps({"ready": llama.llama_print_system_info().decode()}), flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        if order["kind"] == "decode":
            seconds = peer.decode(order["rows"], order["context"], order["steps"])
        else:
            seconds = peer.prefill(order["tokens"])
        print(json.dumps({"seconds": seconds}), flush=True)


main()
