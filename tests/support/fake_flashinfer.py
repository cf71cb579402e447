"""flashinfer's paged wrappers on the CPU: every call must bind to the real signature, and is then computed densely."""

import inspect
import json
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import torch

from worker_svc.attention.flashinfer_backend import FlashInfer

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

    def plan(self, *arguments, **options):
        given = self._bind("plan", arguments, options)
        for name in ("indptr", "indices", "last_page_len"):
            table = given[self.names[name]]
            assert table.dtype == torch.int32, name
            assert table.device.type == "cpu", "a table on the device would be waited for"
        lens = given[self.names["last_page_len"]]
        assert ((lens >= 1) & (lens <= given["page_size"])).all()
        self.planned = given

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

    def query_starts(self, plan):
        assert plan["causal"] is True
        starts = plan["qo_indptr"].tolist()
        assert all(a < b for a, b in pairwise(starts)), "a row without tokens"
        return starts


class DecodeWrapper(_Wrapper):
    name = "BatchDecodeWithPagedKVCacheWrapper"
    names = MappingProxyType({name: name for name in ("indptr", "indices", "last_page_len", "head_dim")})

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
