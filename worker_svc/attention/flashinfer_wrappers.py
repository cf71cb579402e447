"""What is used of the package flashinfer, and one step's plan in its terms. Knows neither pools nor how it is found."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


class PagedWrapper(Protocol):
    """What is used of flashinfer's wrappers."""

    def plan(self, *arguments: Any, **options: Any) -> None:
        """Prepare one step."""
        ...

    def run(self, q: Tensor, paged_kv_cache: Tensor) -> Tensor:
        """[num_tokens, num_q_heads, head_dim], owned."""
        ...

    def reset_workspace_buffer(self, float_workspace_buffer: Tensor, int_workspace_buffer: Tensor) -> None:
        """Use other memory than it made for itself."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInfer:
    """The classes of the package."""

    prefill_wrapper: Callable[..., PagedWrapper]
    """BatchPrefillWithPagedKVCacheWrapper"""
    decode_wrapper: Callable[..., PagedWrapper]
    """BatchDecodeWithPagedKVCacheWrapper"""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class FlashInferMetadata:
    """One step's plan. Lives until the step's forward is done, or as long as the graphs that hold it."""

    out_cache_loc: Tensor
    num_tokens: int
    """Padding tokens left out: the wrapper takes as many queries as its rows have tokens."""
    wrapper: PagedWrapper
    number: int | None = None
    """Which plan of this back-end it is: a wrapper holds one at a time. None: the wrapper has no other."""
