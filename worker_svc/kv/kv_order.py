"""In which order a pool's elements lie in memory: names alone, so that settings can be checked without torch."""

from enum import Enum


class KVOrder(Enum):
    """Order of one layer's elements. P pages, H KV heads, S slots a page, D the head's width."""

    HEADS = "heads"
    """[2, H, P, S, D]: keys, then values; one head's page is a contiguous run."""
    NATIVE = "native"
    """[P, H, 2, S * D]: a head's keys as [D, S], its values as [S, D]; what `kernels.native_ops` reads."""
    NHD = "nhd"
    """[P, 2, S, H, D]: keys, then values; flashinfer's default."""
    HND = "hnd"
    """[P, 2, H, S, D]"""
