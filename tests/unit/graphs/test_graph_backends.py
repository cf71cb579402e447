"""One suite for every graph back-end, on the CPU's tape and on a GPU's graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from protos.wire.errors import InternalFault
from worker_svc.device.break_points import BreakPoints
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.device_graph import CaptureError, GraphDevice
from worker_svc.device.tape import TapeCapture, TapeDevice, TapeSession
from worker_svc.graph_backends.base import GraphBackend
from worker_svc.graph_backends.breakable import BreakableBackend
from worker_svc.graph_backends.compiled import CompiledBackend, why_not_compiled
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors

WIDTH = 32
NUM_LAYERS = 3
gpu = pytest.mark.gpu
needs_compiler = pytest.mark.skipif(why_not_compiled() is not None, reason="no C++ compiler")


class Bench:
    """A model with marked calls over a cache, and the parts that back-ends are made of."""

    def __init__(self, device: GraphDevice, *, where: str) -> None:
        self.device, self.where = device, torch.device(where)
        self.breaks = BreakPoints()
        self.kept = KeptTensors(device)
        generator = torch.Generator().manual_seed(1)
        self.weights = [torch.randn(WIDTH, WIDTH, generator=generator).to(self.where) for _ in range(NUM_LAYERS)]
        self.inputs = torch.zeros(64, WIDTH, device=self.where)
        self.bias = torch.zeros(WIDTH // 2, device=self.where)
        self.calls = 0

    def attend(self, left: Tensor, right: Tensor, *, layer: int) -> Tensor:
        self.calls += 1
        return left * right.sum(-1, keepdim=True) + self.bias + layer

    def work(self, num_rows: int) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            hidden = self.inputs[:num_rows] * 2
            first = None
            for layer, weight in enumerate(self.weights):
                left, right = functional.linear(hidden, weight).chunk(2, dim=-1)
                mixed = self.breaks.call(self.attend, left, right, layer=layer)
                assert isinstance(mixed, Tensor)
                first = mixed if first is None else first
                hidden = hidden + torch.cat((mixed, mixed), dim=-1)
            assert first is not None
            return hidden, hidden.argmax(-1), first * 3  # a result is still read after later breaks

        return run

    def backend(self, name: str) -> GraphBackend:
        if name == "full":
            return FullBackend(self.device, kept=self.kept, breaks=self.breaks)
        if name == "breakable":
            return BreakableBackend(self.device, kept=self.kept, breaks=self.breaks)
        return CompiledBackend(kept=self.kept, breaks=self.breaks)

    def fill(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.inputs.copy_(torch.randn(self.inputs.shape, generator=generator).to(self.where))
        self.bias.fill_(seed % 7)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=gpu)])
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    device = TapeDevice() if request.param == "cpu" else CudaGraphDevice(torch.device("cuda"))
    with torch.inference_mode():
        yield Bench(device, where="cpu" if request.param == "cpu" else "cuda")


def expected(bench: Bench, num_rows: int) -> tuple[Tensor, ...]:
    with bench.breaks.straight():
        return bench.work(num_rows)()


def assert_replays(bench: Bench, backend: GraphBackend, num_rows: int) -> None:
    for found, known in zip(backend.replay(num_rows), expected(bench, num_rows), strict=True):
        torch.testing.assert_close(found, known, rtol=0, atol=0 if bench.where.type == "cpu" else 1e-4)


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_buckets_replayed_in_every_order_equal_the_eager_run(bench: Bench, name: str) -> None:
    backend = bench.backend(name)
    for num_rows in (64, 32, 16):
        backend.capture(num_rows, bench.work(num_rows))
    for seed, order in enumerate(permutations((64, 32, 16))):
        for num_rows in (*order, *reversed(order)):
            bench.fill(seed * 10 + num_rows)
            assert_replays(bench, backend, num_rows)


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_two_back_ends_share_a_pool_and_do_not_disturb_each_other(bench: Bench, name: str) -> None:
    other = "breakable" if name == "full" else "full"
    first, second = bench.backend(name), bench.backend(other)
    first.capture(64, bench.work(64))
    second.capture(16, bench.work(16))
    for seed in range(4):
        bench.fill(seed)
        assert_replays(bench, first, 64)
        assert_replays(bench, second, 16)


@needs_compiler
@pytest.mark.timeout(300)
def test_compiled_pieces_equal_the_eager_run_within_rounding() -> None:
    with torch.inference_mode():
        bench = Bench(TapeDevice(), where="cpu")
        backend = bench.backend("compiled")
        bench.fill(0)
        backend.capture(8, bench.work(8))
        for seed in range(3):
            bench.fill(seed)
            found, known = backend.replay(8), expected(bench, 8)
            torch.testing.assert_close(found[0], known[0], rtol=1e-4, atol=1e-4)


def test_outputs_have_the_same_addresses_at_each_replay(bench: Bench) -> None:
    for name in ("full", "breakable"):
        backend = bench.backend(name)
        addresses = [output.data_ptr() for output in backend.capture(16, bench.work(16))]
        assert [output.data_ptr() for output in backend.replay(16)] == addresses


def test_a_marked_call_runs_eagerly_at_each_replay_and_the_rest_does_not(bench: Bench) -> None:
    backend = bench.backend("breakable")
    backend.capture(16, bench.work(16))
    before = bench.calls
    backend.replay(16)
    assert bench.calls == before + NUM_LAYERS
    assert isinstance(backend, BreakableBackend)
    assert backend.num_pieces(16) == 2 * NUM_LAYERS + 1


@pytest.mark.parametrize("name", ["full", "breakable"])
def test_a_replay_runs_no_python_of_the_model(bench: Bench, name: str) -> None:
    runs, work = 0, bench.work(16)

    def counted() -> tuple[Tensor, ...]:
        nonlocal runs
        runs += 1
        return work()

    backend = bench.backend(name)
    backend.capture(16, counted)
    backend.replay(16)
    assert runs == 2  # the warm-up and the capture


def test_a_marked_call_inside_a_marked_call_is_part_of_it(bench: Bench) -> None:
    def outer(left: Tensor) -> Tensor:
        inner = bench.breaks.call(bench.attend, left, left, layer=1)
        assert isinstance(inner, Tensor)
        return inner + 1

    def work() -> tuple[Tensor, ...]:
        result = bench.breaks.call(outer, bench.inputs[:4, : WIDTH // 2] * 2)
        assert isinstance(result, Tensor)
        return (result * 2,)

    backend = BreakableBackend(bench.device, kept=bench.kept, breaks=bench.breaks)
    backend.capture("nested", work)
    bench.fill(3)
    assert backend.num_pieces("nested") == 3
    assert torch.equal(backend.replay("nested")[0], work()[0])


def test_tuples_and_nothing_pass_a_break(bench: Bench) -> None:
    seen: list[float] = []

    def looks(values: Tensor) -> None:
        seen.append(float(values.sum()))

    def halves(values: Tensor) -> tuple[Tensor, ...]:
        return values[:2], values[2:]

    def work() -> tuple[Tensor, ...]:
        bench.breaks.call(looks, bench.inputs[:4] + 0)
        parts = bench.breaks.call(halves, bench.inputs[:4] * 2)
        assert isinstance(parts, tuple)
        return (parts[0] + parts[1],)

    backend = bench.backend("breakable")
    backend.capture("parts", work)
    bench.fill(5)
    found = backend.replay("parts")[0].clone()
    assert seen[-1] == pytest.approx(float(bench.inputs[:4].sum()), rel=1e-5)
    assert torch.equal(found, work()[0])


def test_a_result_of_another_shape_at_a_replay_is_refused(bench: Bench) -> None:
    rows = [4]

    def work() -> tuple[Tensor, ...]:
        result = bench.breaks.call(lambda values: values[: rows[0]], bench.inputs[:8] * 2)
        assert isinstance(result, Tensor)
        return (result + 1,)

    backend = bench.backend("breakable")
    backend.capture("rows", work)
    rows[0] = 3
    with pytest.raises(InternalFault, match=r"3, 32.*4, 32"):
        backend.replay("rows")


class Unsteady:
    """Gives one row more at each call."""

    def __init__(self, values: Tensor) -> None:
        self._values, self._num_rows = values, 3

    def __call__(self) -> tuple[Tensor, ...]:
        self._num_rows += 1
        return (self._values[: self._num_rows] * 2,)


def test_work_that_differs_from_its_warm_up_is_not_captured(bench: Bench) -> None:
    for name in ("full", "breakable"):
        backend = bench.backend(name)
        with pytest.raises(CaptureError, match="warm-up"):
            backend.capture("unsteady", Unsteady(bench.inputs))
        assert not backend.has("unsteady")
        with pytest.raises(KeyError):
            backend.replay("unsteady")


def test_a_failed_capture_leaves_earlier_keys_alive(bench: Bench) -> None:
    for name in ("full", "breakable"):
        backend = bench.backend(name)
        backend.capture(16, bench.work(16))
        with pytest.raises((CaptureError, RuntimeError)):
            backend.capture("bad", lambda: (bench.inputs[: int(bench.inputs.argmax()) + 1] * 2,))
        bench.fill(2)
        assert_replays(bench, backend, 16)


def test_other_work_may_run_at_every_pause(bench: Bench) -> None:
    for name, pauses in (("full", 1), ("breakable", 1 + NUM_LAYERS)):
        backend = bench.backend(name)
        backend.capture(32, bench.work(32))
        count = 0

        def disturb(live: GraphBackend = backend) -> None:
            nonlocal count
            count += 1
            bench.fill(count)
            assert_replays(bench, live, 32)

        backend.capture(16, bench.work(16), pause=disturb)
        assert count == pauses
        bench.fill(9)
        assert_replays(bench, backend, 16)
        assert_replays(bench, backend, 32)


JOINS = ("asked for", "marked call", "end")


def work_beside(bench: Bench, how: str) -> Callable[[], tuple[Tensor, ...]]:
    """Two stretches that may run at once, and their join."""

    def run() -> tuple[Tensor, ...]:
        scaled = bench.inputs[:8] * 2
        with bench.breaks.beside():
            summed = scaled.cumsum(0) @ bench.weights[0]
        turned = scaled.sin()
        if how == "asked for":
            bench.breaks.join()
            return (summed + turned,)
        if how == "marked call":
            mixed = bench.breaks.call(torch.add, summed, turned)
            assert isinstance(mixed, Tensor)
            with bench.breaks.beside():
                shifted = mixed + 1
            return shifted, mixed * 2
        return summed, turned

    return run


@pytest.mark.parametrize("how", JOINS)
@pytest.mark.parametrize("name", ["full", "breakable"])
def test_work_beside_other_work_is_done_before_what_follows_their_join(bench: Bench, name: str, how: str) -> None:
    backend, work = bench.backend(name), work_beside(bench, how)
    backend.capture(how, work)
    for seed in range(3):
        bench.fill(seed)
        for found, known in zip(backend.replay(how), work(), strict=True):
            torch.testing.assert_close(found, known, rtol=0, atol=0 if bench.where.type == "cpu" else 1e-4)


class Watched(TapeDevice):
    """A tape that writes down what its captures are asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    @contextmanager
    def session(self) -> Iterator[TapeSession]:
        self.arena.start_session()
        session = TapeSession(self.arena)
        session.begin = self._begin  # type: ignore[method-assign]
        yield session

    def _begin(self) -> TapeCapture:
        capture = TapeCapture(self.arena)
        self.events.append("begin")
        for name in ("beside", "join", "end"):
            setattr(capture, name, self._watched(name, getattr(capture, name)))
        return capture

    def _watched(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call() -> Any:
            self.events.append(name)
            return function()

        return call


@pytest.mark.parametrize(
    ("name", "how", "events"),
    [
        ("full", "asked for", "begin beside join join end"),
        ("full", "end", "begin beside join end"),
        ("breakable", "asked for", "begin beside join join end"),
        ("breakable", "marked call", "begin beside join end begin beside join end"),
        ("breakable", "end", "begin beside join end"),
    ],
)
def test_a_segment_joins_what_was_forked_before_anything_is_copied_out_of_it(name: str, how: str, events: str) -> None:
    device = Watched()
    with torch.inference_mode():
        bench = Bench(device, where="cpu")
        bench.backend(name).capture(how, work_beside(bench, how))
    assert device.events == events.split()


def test_smaller_buckets_need_no_more_memory() -> None:
    with torch.inference_mode():
        bench = Bench(TapeDevice(), where="cpu")
        bench.inputs = torch.zeros(4096, WIDTH)
        backend = bench.backend("breakable")
        backend.capture(4096, bench.work(4096))
        alone = bench.device.pool_bytes() + bench.kept.num_bytes()
        for num_rows in (2048, 1024, 512, 64, 1):
            backend.capture(num_rows, bench.work(num_rows))
        assert bench.device.pool_bytes() + bench.kept.num_bytes() < 1.3 * alone
