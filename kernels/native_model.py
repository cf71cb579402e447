"""A whole decoder on the native kernels, in NumPy terms: packed weights, paged KV, one step at a time.

Holds the weights and the KV pages, no request state. A step runs as one call or phase by phase, with equal bits.
Guards: a row's output does not depend on batch mates, chunking, the number of threads or the instruction set.
"""

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from kernels.errors import KernelError, KernelStatus
from kernels.native import Closing, Native, ThreadPool
from kernels.native_spec import NativeLimits, NativeModelSpec, RawTensor, placed
from kernels.native_types import (
    MAX_GROUPS,
    MAX_ROPES,
    NUM_TIMES,
    PAGE_SIZE,
    CLayerSpec,
    CModelSpec,
    CPages,
    CStep,
    Variant,
    address,
    contiguous,
)

Array = np.ndarray
PHASE_NAMES = ("embedding", "qkv", "attention", "o", "gate_up", "down", "output")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPages:
    """Pages of one sub-pool, as in the worker's PageGroup."""

    kv_indptr: Array
    """[num_rows + 1] int32"""
    kv_indices: Array
    """[kv_indptr[num_rows]] int32"""
    out_cache_loc: Array
    """[num_tokens] int64: page * 16 + offset; slots of page 0 are not written."""
    start_positions: Array | None = None
    """[num_rows] int32: position of the first slot of the row's first listed page; absent: 0."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepInput:
    """One forward. Arrays are lent until the step is over; those of the right type are not copied."""

    input_ids: Array
    """[num_tokens] int32"""
    positions: Array
    """[num_tokens] int64"""
    qo_indptr: Array
    """[num_rows + 1] int32: row r computes tokens qo_indptr[r]:qo_indptr[r + 1]."""
    seq_lens: Array
    """[num_rows] int32, this step's tokens included."""
    pages: Sequence[StepPages]
    """One for each sub-pool."""
    out_tokens: Array
    """[num_out] int32: tokens whose distribution is wanted."""
    wants_logits: Array | None = None
    """[num_out] bool: write its logits; absent: none."""
    wants_hidden: bool = False
    """Of each row's last token."""
    wants_all_hidden: bool = False
    """Of every token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepOutput:
    """What a step leaves. Arrays are owned by the caller."""

    best_ids: Array
    """[num_out] int32: largest logit, the lowest id among equals."""
    best_logits: Array
    """[num_out] float32: that logit; NaN if any of the token is."""
    logits: Array
    """[rows that want them, vocab_size] float32, in the order of out_tokens."""
    last_hidden: Array | None
    """[num_rows, hidden_size] float32: final hidden state of each row's last token, if wanted."""
    finite: Array
    """[num_rows] bool: that state is finite."""
    all_hidden: Array | None = None
    """[num_tokens, hidden_size] float32: final hidden state of every token, if wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class _Bound:
    """A step in C form, with the arrays that it points to."""

    step: CStep
    output: StepOutput
    kept: list[Array] = field(default_factory=list)


class NativeModel(Closing):
    """Made by the worker's composition root; lives as long as the process. One thread at a time."""

    def __init__(
        self, spec: NativeModelSpec, weights: Mapping[str, RawTensor], *, limits: NativeLimits, pool: ThreadPool
    ) -> None:
        self.spec = spec
        self.limits = limits
        self.pool = pool
        self._native: Native = pool.native
        self._handle = ctypes.c_void_p()
        c_spec = _c_spec(spec, limits)
        self._native.call("fp_model_create", ctypes.byref(c_spec), pool.handle, ctypes.byref(self._handle))
        try:
            self._set_weights(weights)
        except KernelError:
            self.close()
            raise

    def reserve_pages(self, num_pages: Sequence[int]) -> None:
        """Replace the pages of every sub-pool by so many new ones; what they held is lost, and so are views of them.

        Raises:
            KernelError: a number is out of range, or the system does not give the memory; the old pages stay.
        """
        if len(num_pages) != self.spec.num_groups:
            message = f"num_pages names {len(num_pages)} sub-pools, the model has {self.spec.num_groups}"
            raise KernelError(message, status=KernelStatus.INVALID)
        counts = (ctypes.c_int32 * len(num_pages))(*num_pages)
        self._native.call("fp_model_reserve", self._handle, counts)
        self.limits = replace(self.limits, num_pages=tuple(num_pages))

    def step(self, inputs: StepInput) -> StepOutput:
        """Run one forward as one native call.

        Raises:
            KernelError: an argument is out of range; nothing was computed.
        """
        bound = self._bound(inputs)
        self._native.call("fp_model_step", self._handle, ctypes.byref(bound.step))
        return bound.output

    def step_by_phase(self, inputs: StepInput) -> StepOutput:
        """Run one forward as one native call a phase.

        Raises:
            KernelError: as `step`.
        """
        bound = self._bound(inputs)
        self._native.call("fp_model_bind", self._handle, ctypes.byref(bound.step))
        for phase in range(self.num_phases):
            self._native.call("fp_model_run_phase", self._handle, phase)
        return bound.output

    def logits(self, states: Array) -> Array:
        """[n, vocab_size] float32: of final hidden states [n, hidden_size], with the bits that a step gives them.

        Raises:
            KernelError: too many, or of another size.
        """
        if states.ndim != 2 or states.shape[1] != self.spec.hidden_size:
            message = f"states has shape {states.shape}, must be (n, {self.spec.hidden_size})"
            raise KernelError(message, status=KernelStatus.INVALID)
        states = contiguous(states, np.float32)
        logits = np.empty((len(states), self.spec.vocab_size), np.float32)
        self._native.call("fp_model_logits", self._handle, address(states), len(states), address(logits))
        return logits

    @property
    def num_phases(self) -> int:
        """Calls of an eager step."""
        return int(self._native.library.fp_model_num_phases(self._handle))

    @property
    def variant(self) -> Variant:
        """Which products run."""
        return Variant(self._native.library.fp_model_variant(self._handle))

    @property
    def weight_bytes(self) -> int:
        """Memory of the packed weights."""
        return int(self._native.library.fp_model_weight_bytes(self._handle))

    def kv_pages(self, group: int = 0) -> Array:
        """[layers of the group, num_pages, num_kv_heads, 2, 16 * head_dim] float16, the memory: keys, then values."""
        data, count = ctypes.c_void_p(), ctypes.c_int64()
        self._native.call("fp_model_kv", self._handle, group, ctypes.byref(data), ctypes.byref(count))
        flat = np.ctypeslib.as_array((ctypes.c_uint16 * count.value).from_address(data.value or 0)).view(np.float16)
        spec = self.spec
        return flat.reshape(
            spec.layers_of(group), self.limits.num_pages[group], spec.num_kv_heads, 2, PAGE_SIZE * spec.head_dim
        )

    def take_times(self) -> dict[str, float]:
        """Seconds spent in each kind of phase since the last call."""
        seconds = (ctypes.c_double * NUM_TIMES)()
        self._native.library.fp_model_take_times(self._handle, ctypes.byref(seconds))
        return dict(zip(PHASE_NAMES, seconds, strict=True))

    def describe(self) -> str:
        """One phrase for the start line, the metric and benchmark rows."""
        return self._native.describe(threads=self.pool.threads, variant=self.variant)

    def close(self) -> None:
        """Free everything. Safe to repeat; views of the KV pages die with it."""
        if self._handle:
            self._native.library.fp_model_destroy(self._handle)
            self._handle = ctypes.c_void_p()

    def _set_weights(self, weights: Mapping[str, RawTensor]) -> None:
        for role, layer, tensor in placed(weights):
            data = contiguous(tensor.data, np.uint8)
            self._native.call("fp_model_set_tensor", self._handle, role, layer, tensor.type, address(data), data.nbytes)
        self._native.call("fp_model_seal", self._handle)

    def _bound(self, inputs: StepInput) -> _Bound:
        """The step in C form, after the shapes were compared: the library proves the values, not the lengths."""
        num_rows, num_tokens, num_out = len(inputs.seq_lens), len(inputs.input_ids), len(inputs.out_tokens)
        _check_lengths(inputs, num_groups=self.spec.num_groups)
        wanted = (
            np.zeros(num_out, np.bool_) if inputs.wants_logits is None else np.asarray(inputs.wants_logits, np.bool_)
        )
        slots = np.where(wanted, np.cumsum(wanted) - 1, -1).astype(np.int32)
        num_logits = int(wanted.sum())
        finite = np.zeros(num_rows, np.bool_)
        output = StepOutput(
            best_ids=np.zeros(num_out, np.int32),
            best_logits=np.zeros(num_out, np.float32),
            logits=np.empty((num_logits, self.spec.vocab_size), np.float32),
            last_hidden=np.empty((num_rows, self.spec.hidden_size), np.float32) if inputs.wants_hidden else None,
            finite=finite,
            all_hidden=np.empty((num_tokens, self.spec.hidden_size), np.float32) if inputs.wants_all_hidden else None,
        )
        bound = _Bound(
            CStep(num_rows=num_rows, num_tokens=num_tokens, num_out=num_out, num_logits=num_logits), output, [slots]
        )
        columns = {
            "input_ids": contiguous(inputs.input_ids, np.int32),
            "positions": contiguous(inputs.positions, np.int64),
            "qo_indptr": contiguous(inputs.qo_indptr, np.int32),
            "seq_lens": contiguous(inputs.seq_lens, np.int32),
            "out_tokens": contiguous(inputs.out_tokens, np.int32),
            "logits_slot": slots,
            "best_ids": output.best_ids,
            "best_logits": output.best_logits,
            "logits": output.logits,
            "last_hidden": output.last_hidden,
            "all_hidden": output.all_hidden,
            "finite": finite,
        }
        _point(bound.step, columns, bound.kept)
        for group, pages in enumerate(inputs.pages):
            _point(bound.step.pages[group], page_columns(pages), bound.kept)
        return bound


def page_columns(pages: StepPages) -> dict[str, Array | None]:
    """The arrays of one sub-pool as the library reads them."""
    starts = pages.start_positions
    return {
        "kv_indptr": contiguous(pages.kv_indptr, np.int32),
        "kv_indices": contiguous(pages.kv_indices, np.int32),
        "out_cache_loc": contiguous(pages.out_cache_loc, np.int64),
        "start_positions": None if starts is None else contiguous(starts, np.int32),
    }


def check_length(name: str, array: Array, expected: int) -> None:
    """Raise unless `array` has one dimension and `expected` elements."""
    if array.shape != (expected,):
        raise KernelError(f"{name} has shape {array.shape}, must be ({expected},)", status=KernelStatus.INVALID)


def check_page_lengths(pages: StepPages, *, num_rows: int) -> None:
    """Raise unless the page table's arrays fit each other."""
    check_length("kv_indptr", pages.kv_indptr, num_rows + 1)
    check_length("kv_indices", pages.kv_indices, int(pages.kv_indptr[-1]))
    if pages.start_positions is not None:
        check_length("start_positions", pages.start_positions, num_rows)


def _check_lengths(inputs: StepInput, *, num_groups: int) -> None:
    num_rows, num_tokens, num_out = len(inputs.seq_lens), len(inputs.input_ids), len(inputs.out_tokens)
    check_length("seq_lens", inputs.seq_lens, num_rows)
    check_length("input_ids", inputs.input_ids, num_tokens)
    check_length("positions", inputs.positions, num_tokens)
    check_length("qo_indptr", inputs.qo_indptr, num_rows + 1)
    check_length("out_tokens", inputs.out_tokens, num_out)
    if inputs.wants_logits is not None:
        check_length("wants_logits", inputs.wants_logits, num_out)
    if len(inputs.pages) != num_groups:
        raise KernelError(f"pages has {len(inputs.pages)} sub-pools, must be {num_groups}", status=KernelStatus.INVALID)
    for pages in inputs.pages:
        check_page_lengths(pages, num_rows=num_rows)
        check_length("out_cache_loc", pages.out_cache_loc, num_tokens)


def _point(target: CStep | CPages, columns: Mapping[str, Array | None], kept: list[Array]) -> None:
    """Store the arrays' addresses in the structure's fields of the same names, and keep the arrays."""
    for name, array in columns.items():
        setattr(target, name, address(array))
        if array is not None:
            kept.append(array)


def _c_spec(spec: NativeModelSpec, limits: NativeLimits) -> CModelSpec:
    if not 1 <= spec.num_groups == len(limits.num_pages) <= MAX_GROUPS:
        message = (
            f"limits name {len(limits.num_pages)} sub-pools, the model has {spec.num_groups}, at most {MAX_GROUPS} work"
        )
        raise KernelError(message, status=KernelStatus.INVALID)
    if not 1 <= len(spec.rope_thetas) <= MAX_ROPES:
        raise KernelError(f"{len(spec.rope_thetas)} rope bases, at most {MAX_ROPES} work", status=KernelStatus.INVALID)
    layers = (CLayerSpec * len(spec.layers))(
        *(CLayerSpec(layer.group, layer.window, layer.rope) for layer in spec.layers)
    )
    thetas = [*spec.rope_thetas, *[spec.rope_thetas[0]] * (MAX_ROPES - len(spec.rope_thetas))]
    return CModelSpec(
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        num_q_heads=spec.num_q_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        ffn_size=spec.ffn_size,
        vocab_size=spec.vocab_size,
        max_context=limits.max_context,
        max_tokens=limits.max_tokens,
        max_rows=limits.max_rows,
        rope_interleaved=int(spec.rope_interleaved),
        activation=spec.activation,
        variant=limits.variant,
        num_groups=spec.num_groups,
        num_pages=(ctypes.c_int32 * MAX_GROUPS)(*limits.num_pages),
        rope_theta=(ctypes.c_float * MAX_ROPES)(*thetas),
        rms_epsilon=spec.rms_epsilon,
        embedding_scale=spec.embedding_scale,
        attention_scale=spec.attention_scale,
        layers=layers,
    )
