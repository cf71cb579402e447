"""The CPU's tape keeps the contract of device graphs."""

import gc
import mmap
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from worker_svc.device import tape_arena
from worker_svc.device.device_graph import CaptureError
from worker_svc.device.tape import Tape, TapeDevice

WIDTH = 64


class SmallModel:
    """Every kind of operator that our layers use, on fixed inputs."""

    def __init__(self, *, num_rows: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.table = torch.randn(100, WIDTH, generator=generator)
        self.weight = torch.randn(4 * WIDTH, WIDTH, generator=generator)
        self.down = torch.randn(WIDTH, 2 * WIDTH, generator=generator)
        self.scale = torch.randn(WIDTH, generator=generator)
        self.ids = torch.randint(0, 100, (num_rows,), generator=generator)

    def __call__(self) -> tuple[Tensor, ...]:
        hidden = functional.embedding(self.ids, self.table).float()
        for _ in range(3):
            normed = functional.rms_norm(hidden, (WIDTH,), self.scale, 1e-5)
            left, right = functional.linear(normed, self.weight).chunk(2, dim=-1)
            mixed = torch.empty_like(left)
            torch.mul(left, right, out=mixed).sub_(left * 0.5)
            hidden = hidden + functional.linear(functional.silu(mixed), self.down)
            hidden.add_(torch.softmax(hidden, -1))
            hidden = torch.cat((hidden[:, WIDTH // 2 :], hidden[:, : WIDTH // 2]), dim=-1)
        return hidden, hidden.argmax(-1), hidden.topk(3).values, hidden.to(torch.bfloat16)


def captured(device: TapeDevice, work: Callable[[], tuple[Tensor, ...]]) -> tuple[Tape, tuple[Tensor, ...]]:
    with torch.inference_mode(), device.session() as session:
        capture = session.begin()
        try:
            outputs = work()
            return capture.end(), outputs
        finally:
            capture.abandon()


@pytest.mark.parametrize("num_rows", [1, 3, 16])
def test_replay_equals_the_eager_run_bit_for_bit_whatever_the_memory_held(num_rows: int) -> None:
    device, model = TapeDevice(), SmallModel(num_rows=num_rows)
    tape, outputs = captured(device, model)
    for seed in range(3):
        model.ids.copy_(torch.randint(0, 100, (num_rows,), generator=torch.Generator().manual_seed(seed)))
        device.arena.poison(0xFF)
        tape.replay()
        with torch.inference_mode():
            expected = model()
        assert all(torch.equal(found, known) for found, known in zip(outputs, expected, strict=True))


def test_outputs_keep_their_addresses_and_are_overwritten_by_the_next_replay() -> None:
    device, model = TapeDevice(), SmallModel(num_rows=2)
    tape, outputs = captured(device, model)
    addresses, first = [output.data_ptr() for output in outputs], outputs[0].clone()
    model.ids.add_(1).remainder_(100)
    tape.replay()
    assert [output.data_ptr() for output in outputs] == addresses
    assert not torch.equal(outputs[0], first)


def test_smaller_shapes_live_in_the_memory_of_the_largest() -> None:
    device = TapeDevice()
    captured(device, SmallModel(num_rows=1024))
    alone = device.pool_bytes()
    for num_rows in (768, 512, 256, 64, 16, 4, 2, 1):
        captured(device, SmallModel(num_rows=num_rows))
    assert alone > 1 << 20
    assert device.pool_bytes() < 1.3 * alone


def test_a_shape_with_one_large_block_lives_where_shapes_with_many_small_ones_did() -> None:
    """As the logits of a decode graph beside the layers of a prefill graph."""

    def layers() -> tuple[Tensor, ...]:
        kept = [torch.ones(64, 1024) + layer for layer in range(8)]
        return (torch.cat(kept).sum(),)

    def logits() -> tuple[Tensor, ...]:
        return (torch.ones(64, 12 * 1024).sum(),)

    alone = []
    for work in (layers, logits):
        device = TapeDevice()
        captured(device, work)
        alone.append(device.pool_bytes())
    device = TapeDevice()
    captured(device, layers)
    captured(device, logits)
    assert device.pool_bytes() < 1.3 * max(alone)


def test_where_the_system_counts_addresses_fewer_are_reserved_and_too_large_a_graph_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, asked = tape_arena.mmap.mmap, []

    def limited(fileno: int, length: int, **options: int) -> mmap.mmap:
        asked.append(length)
        if length > 1 << 26:
            raise OSError("Cannot allocate memory")
        return real(fileno, length, **options)

    monkeypatch.setattr(tape_arena.mmap, "mmap", limited)
    device, values = TapeDevice(), torch.ones(4)
    tape, (doubled,) = captured(device, lambda: (values * 2,))
    assert asked[-1] == 1 << 26
    with pytest.raises(CaptureError, match="67108864 bytes of addresses"):
        captured(device, lambda: (torch.zeros(1 << 25),))
    values.fill_(3)
    tape.replay()
    assert doubled.tolist() == [6.0] * 4
    monkeypatch.setattr(tape_arena, "_LEAST_RESERVED_BYTES", 1 << 27)
    with pytest.raises(CaptureError, match="reserves no addresses"):
        captured(TapeDevice(), lambda: (torch.ones(1),))


def bytes_made_by(work: Callable[[], object]) -> int:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    return sum(max(0, event.self_cpu_memory_usage) for event in profile.events())


def test_a_replay_makes_no_storage_when_no_scratch_is_declared() -> None:
    device, model = TapeDevice(), SmallModel(num_rows=64)
    tape, _ = captured(device, model)
    assert not tape.scratch_operators
    assert bytes_made_by(tape.replay) < 64  # torch's mean makes a number to divide by
    assert bytes_made_by(model) > 64 * WIDTH * 4


def test_scratch_operators_are_named() -> None:
    values = torch.arange(6.0)
    tape, (output,) = captured(TapeDevice(), lambda: (torch.stack((values, values)),))
    values.add_(1)
    tape.replay()
    assert tape.scratch_operators == {"aten::stack"}
    assert torch.equal(output, torch.stack((values, values)))


def test_writes_into_outside_tensors_happen_again() -> None:
    pool, slots, rows = torch.zeros(8, 4), torch.tensor([2, 5]), torch.ones(2, 4)

    def write() -> tuple[Tensor, ...]:
        pool.index_copy_(0, slots, rows * 2)
        return ()

    tape, _ = captured(TapeDevice(), write)
    slots.copy_(torch.tensor([1, 7]))
    pool.zero_()
    tape.replay()
    assert pool.sum(1).tolist() == [0, 8, 0, 0, 0, 0, 0, 8]


def test_a_tape_that_is_let_go_lets_go_of_its_tensors() -> None:
    device = TapeDevice()
    values = torch.ones(3)
    with torch.inference_mode(), device.session() as session:
        capture = session.begin()
        try:
            capture.marked(lambda numbers: numbers * 2, (values,), {})
            tape = capture.end()
        finally:
            capture.abandon()
    tape.replay()
    watched = weakref.ref(values)
    del values, tape, capture, session
    gc.collect()
    assert watched() is None


NUMBERS = torch.arange(4)
REFUSED: dict[str, tuple[Callable[[], object], str]] = {
    "item": (lambda: NUMBERS.sum().item(), "_local_scalar_dense"),
    "bool": (lambda: bool(NUMBERS[0] > 3), "_local_scalar_dense"),
    "nonzero": (lambda: NUMBERS.nonzero(), "nonzero"),
    "mask_index": (lambda: NUMBERS[NUMBERS > 1], "index"),
    "numpy": (lambda: NUMBERS.numpy(), "numpy"),
    "tolist": (lambda: NUMBERS.tolist(), "tolist"),
    "array": (lambda: np.asarray(NUMBERS), "__array__"),
    "address": (lambda: NUMBERS.data_ptr(), "data_ptr"),
    "host_list": (lambda: torch.tensor([1, 2]), "lift_fresh"),
    "host_array": (lambda: torch.from_numpy(np.ones(2)), "lift_fresh"),
    "random": (lambda: torch.rand(3), "rand"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replayed_fails_the_capture_by_name(case: str) -> None:
    work, name = REFUSED[case]
    device = TapeDevice()
    with pytest.raises(CaptureError, match=name):
        captured(device, lambda: (torch.ones(1), work())[:1])
    assert NUMBERS.tolist() == [0, 1, 2, 3]  # the modes are off again


def test_a_refusal_that_the_work_swallows_fails_at_the_end() -> None:
    def swallows() -> tuple[Tensor, ...]:
        with pytest.raises(CaptureError):
            NUMBERS.tolist()
        return (NUMBERS + 1,)

    with pytest.raises(CaptureError, match="tolist"):
        captured(TapeDevice(), swallows)


def test_a_failed_capture_leaves_earlier_tapes_as_they_were() -> None:
    device, model = TapeDevice(), SmallModel(num_rows=4)
    tape, outputs = captured(device, model)
    with pytest.raises(CaptureError):
        captured(device, lambda: (torch.rand(3),))
    tape.replay()
    with torch.inference_mode():
        assert torch.equal(outputs[0], model()[0])
