"""flashinfer's paged wrappers on the CPU: every call must bind to the real signature, and is then computed densely.

In CUDA graph mode they compute with torch's operators from their buffers alone, as the real ones do with kernels: so a
tape holds them as a GPU's graph would.
"""

import inspect
import json
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch

from worker_svc.attention.flashinfer_wrappers import FlashInfer

SIGNATURES = json.loads((Path(__file__).parents[1] / "contract" / "signatures" / "flashinfer.json").read_text())


def real_signature(call: str) -> inspect.Signature:
    """Of the library's method, without `self`."""
    parameters = []
    for line in SIGNATURES["calls"][call]:
        name, kind, need = line.split()
        default = None if need == "optional" and kind != "VAR_POSITIONAL" else inspect.Parameter.empty
        parameters.append(inspect.Parameter(name, getattr(inspect.Parameter, kind), default=default))
    return inspect.Signature(parameters)


class _Wrapper:
    """Knows one plan, like the real ones, and checks what they check."""

    name = ""
    names: MappingProxyType
    """Ours for the parameters that both have, to the library's."""

    def __init__(self, *arguments, **options):
        given = self._bind("__init__", arguments, options)
        workspace = given["float_workspace_buffer"]
        assert workspace.dtype == torch.uint8
        assert workspace.data_ptr() % 16 == 0
        assert given["kv_layout"] in {"NHD", "HND"}
        self.made = given
        self.planned = None
        self.buffers = None
        if given.get("use_cuda_graph"):
            self.buffers = {name: given[buffer] for name, buffer in self.buffer_names.items()}
            assert {buffer.dtype for buffer in self.buffers.values()} == {torch.int32}
            self.num_rows = len(self.buffers["last_page_len"])
            assert len(self.buffers["indptr"]) == self.num_rows + 1
            self.most_tokens = None

    def reset_workspace_buffer(self, *arguments, **options):
        given = self._bind("reset_workspace_buffer", arguments, options)
        for workspace in given.values():
            assert workspace.dtype == torch.uint8
            assert workspace.data_ptr() % 16 == 0
        assert self.planned is None, "what was planned lay in the old one"

    def plan(self, *arguments, **options):
        given = self._bind("plan", arguments, options)
        for name in ("indptr", "indices", "last_page_len"):
            table = given[self.names[name]]
            assert table.dtype == torch.int32, name
            assert table.device.type == "cpu", "a table on the device would be waited for"
        lens = given[self.names["last_page_len"]]
        pages = given[self.names["indptr"]].diff()
        assert (((lens >= 1) & (lens <= given["page_size"])) | ((lens == 0) & (pages == 0))).all()
        if self.buffers is None:
            assert (lens > 0).all()
        else:
            self._fill(given)
        self.planned = given

    def _fill(self, given):
        lens, indices = given[self.names["last_page_len"]], given[self.names["indices"]]
        assert len(lens) == self.num_rows, "the number of rows is fixed"
        assert len(indices) <= len(self.buffers["indices"]), "there is no room for so many pages"
        self.num_tokens = self.tokens_of(given)
        self.most_tokens = self.most_tokens or self.num_tokens
        assert self.num_tokens <= self.most_tokens, "the first plan said how many tokens there may be"
        for name in ("indptr", "last_page_len"):
            self.buffers[name].copy_(given[self.names[name]])
        self.buffers["indices"][: len(indices)].copy_(indices)
        if "qo_indptr" in self.buffers:
            self.buffers["qo_indptr"].copy_(given["qo_indptr"])

    def run(self, *arguments, **options):
        given = self._bind("run", arguments, options)
        plan, queries, cache = self.planned, given["q"], given["paged_kv_cache"]
        assert queries.is_contiguous()
        assert (queries.dtype, cache.dtype) == (plan["q_data_type"], plan["kv_data_type"])
        assert cache.ndim == 5
        assert cache.shape[1] == 2
        if self.made["kv_layout"] == "HND":
            cache = cache.transpose(2, 3)
        assert cache.shape[2:] == (plan["page_size"], plan["num_kv_heads"], plan[self.names["head_dim"]])
        if self.buffers is not None:
            assert len(queries) == self.num_tokens
            return self._run_on_buffers(queries, cache)
        indptr = plan[self.names["indptr"]].tolist()
        starts = self.query_starts(plan)
        assert starts[-1] == len(queries)
        output = torch.empty_like(queries)
        for row in range(len(indptr) - 1):
            pages = plan[self.names["indices"]][indptr[row] : indptr[row + 1]].long()
            used = (len(pages) - 1) * plan["page_size"] + int(plan[self.names["last_page_len"]][row])
            keys, values = (cache[pages, side].flatten(0, 1)[:used] for side in range(2))
            mine = slice(starts[row], starts[row + 1])
            output[mine] = _attend(queries[mine], keys, values, plan)
        return output

    def _run_on_buffers(self, queries, cache):
        """No value leaves for the host, and nothing but the buffers says which tokens and pages there are."""
        starts, share = self.buffers["indptr"].long(), self.planned["num_qo_heads"] // self.planned["num_kv_heads"]
        most, page_size = len(self.buffers["indices"]) // self.num_rows, self.planned["page_size"]
        counts = starts[1:] - starts[:-1]
        places = starts[:-1, None] + torch.arange(most)
        is_own = torch.arange(most) < counts[:, None]
        pages = self.buffers["indices"][places.clamp(max=len(self.buffers["indices"]) - 1)].long() * is_own
        lens = (counts - 1).clamp(min=0) * page_size + self.buffers["last_page_len"]
        slots = torch.arange(most * page_size)
        kv = cache.index_select(0, pages.flatten()).unflatten(0, pages.shape).double()
        kv = kv.permute(2, 0, 1, 3, 4, 5).flatten(2, 3)  # [2, rows, slots, heads, dim]
        kv = kv.masked_fill((slots >= lens[:, None])[None, :, :, None, None], 0).repeat_interleave(share, 3)
        rows, positions, is_real = self.tokens(len(queries), lens)
        hidden = slots > positions[:, None]
        if self.planned["window_left"] >= 0:
            hidden = hidden | (slots < positions[:, None] - self.planned["window_left"])
        keys, values = kv[0].index_select(0, rows), kv[1].index_select(0, rows)
        scores = torch.einsum("thd,tshd->ths", queries.double(), keys) * self.planned["sm_scale"]
        weights = scores.masked_fill(hidden[:, None], -torch.inf).softmax(-1)
        output = torch.einsum("ths,tshd->thd", weights, values)
        return output.masked_fill(~is_real[:, None, None], 0).to(queries.dtype)

    def _bind(self, method, arguments, options):
        bound = real_signature(f"{self.name}.{method}").bind(*arguments, **options)
        return dict(bound.arguments)


class PrefillWrapper(_Wrapper):
    name = "BatchPrefillWithPagedKVCacheWrapper"
    names = MappingProxyType(
        {
            "indptr": "paged_kv_indptr",
            "indices": "paged_kv_indices",
            "last_page_len": "paged_kv_last_page_len",
            "head_dim": "head_dim_qk",
        }
    )
    buffer_names = MappingProxyType(
        {
            "qo_indptr": "qo_indptr_buf",
            "indptr": "paged_kv_indptr_buf",
            "indices": "paged_kv_indices_buf",
            "last_page_len": "paged_kv_last_page_len_buf",
        }
    )

    def tokens_of(self, plan):
        return int(plan["qo_indptr"][-1])

    def tokens(self, count, lens):
        starts, tokens = self.buffers["qo_indptr"].long(), torch.arange(count)
        rows = (tokens[:, None] >= starts[1:]).sum(1)
        is_real = rows < self.num_rows
        rows = rows.clamp(max=self.num_rows - 1)
        query_lens = starts[1:] - starts[:-1]
        return rows, (lens - query_lens - starts[:-1]).index_select(0, rows) + tokens, is_real

    def query_starts(self, plan):
        assert plan["causal"] is True
        starts = plan["qo_indptr"].tolist()
        assert all(a < b for a, b in pairwise(starts)), "a row without tokens"
        return starts


class DecodeWrapper(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    names = MappingProxyType({name: name for name in ("indptr", "indices", "last_page_len", "head_dim")})
    buffer_names = MappingProxyType(
        {name: f"paged_kv_{name}_buffer" for name in ("indptr", "indices", "last_page_len")}
    )

    def tokens_of(self, plan):
        return len(plan["indptr"]) - 1

    def tokens(self, count, lens):
        rows = torch.arange(count)
        return rows, lens - 1, rows >= 0

    def query_starts(self, plan):
        share = plan["num_qo_heads"] // plan["num_kv_heads"]
        assert self.made["use_tensor_cores"] or share in {1, 2, 3, 4, 8}, "there is no kernel for it"
        return list(range(len(plan["indptr"])))


def _attend(queries, keys, values, plan):
    share = plan["num_qo_heads"] // plan["num_kv_heads"]
    keys, values = (part.double().repeat_interleave(share, 1) for part in (keys, values))
    scores = torch.einsum("qhd,khd->hqk", queries.double(), keys) * plan["sm_scale"]
    positions = len(keys) - len(queries) + torch.arange(len(queries))[:, None]
    slots = torch.arange(len(keys))
    hidden = slots > positions
    if plan["window_left"] >= 0:
        hidden |= slots < positions - plan["window_left"]
    weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(queries.dtype)


FAKE_FLASHINFER = FlashInfer(prefill_wrapper=PrefillWrapper, decode_wrapper=DecodeWrapper)
