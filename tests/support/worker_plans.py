"""Small valid plans, and the description of a small worker that takes them."""

from dataclasses import replace

import numpy as np

from protos.wire.enums import ForwardMode, GraphRefusal, HiddenMode, SubPoolKind
from protos.wire.plan import (
    Forward,
    ForwardPlan,
    PageTable,
    PlanIdentity,
    RowColumns,
    SamplingColumns,
    TokenColumns,
)
from protos.wire.worker_info import Fingerprints, SubPool, WorkerInfo, WorkerLimits

INCARNATION = bytes(range(16))
PAGE_SIZE = 16


def worker_info(*, window=1, cached_results=3, incarnation=INCARNATION):
    return WorkerInfo(
        incarnation=incarnation,
        protocol=1,
        features=frozenset(),
        sub_pools=(SubPool(kind=SubPoolKind.FULL, num_pages=64, page_size=PAGE_SIZE, bytes_per_page=1024),),
        limits=WorkerLimits(
            max_rows=16,
            max_tokens=256,
            max_plan_bytes=1 << 20,
            window=window,
            cached_results=cached_results,
            context_tokens=512,
            max_logprobs=0,
        ),
        logits_width=1000,
        buckets=(),
        modes=frozenset({ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.IDLE}),
        numerics="reproducible",
        dtype="float32",
        device="cpu",
        model_name="fake",
        fingerprints=Fingerprints(weights="00", tokenizer="00", kv_layout="00"),
        max_hidden_mode=HiddenMode.NULL,
        kernels="fake",
    )


def identity(seq, *, epoch=1, term=1, incarnation=INCARNATION):
    return PlanIdentity(epoch=epoch, term=term, seq=seq, incarnation=incarnation, budget_ms=1000)


def extend_plan(plan_identity, *, ids=(1, 2, 3), first_position=0, page=1, handle=7, seed=None):
    """One row that computes `ids` and samples; its pages are consecutive from `page`."""
    seq_len = first_position + len(ids)
    num_pages = -(-seq_len // PAGE_SIZE)
    pages = np.arange(page, page + num_pages, dtype=np.int32)
    mode = ForwardMode.DECODE if len(ids) == 1 and first_position else ForwardMode.EXTEND
    return ForwardPlan(
        identity=plan_identity,
        forwards=(Forward(mode=mode, logical_mode=mode, row_begin=0, row_end=1, graph=GraphRefusal.DISABLED),),
        rows=RowColumns(
            handles=np.array([handle], dtype=np.uint64),
            attempts=np.zeros(1, dtype=np.uint32),
            seq_lens=np.array([seq_len], dtype=np.int32),
            extend_lens=np.array([len(ids)], dtype=np.int32),
            first_positions=np.array([first_position], dtype=np.int32),
            samples=np.ones(1, dtype=np.uint8),
        ),
        tokens=TokenColumns(ids=np.array(ids, dtype=np.int32)),
        page_tables=(
            PageTable(
                sub_pool=0,
                indptr=np.array([0, num_pages], dtype=np.int32),
                indices=pages,
                last_page_lens=np.array([(seq_len - 1) % PAGE_SIZE + 1], dtype=np.int32),
                written_pages=pages[first_position // PAGE_SIZE :],
            ),
        ),
        sampling=None if seed is None else SamplingColumns(seeds=np.array([seed], dtype=np.uint64)),
    )


def with_seq(plan, seq):
    return replace(plan, identity=replace(plan.identity, seq=seq))
