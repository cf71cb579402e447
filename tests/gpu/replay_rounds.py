"""Captures and replays small work in many orders on the device that is named: what `compute-sanitizer` watches."""

import sys
from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.device.break_points import BreakPoints
from worker_svc.device.cuda_graphs import CudaGraphDevice
from worker_svc.device.tape import TapeDevice
from worker_svc.graph_backends.breakable import BreakableBackend
from worker_svc.graph_backends.full import FullBackend
from worker_svc.graph_backends.kept_tensors import KeptTensors

WIDTH = 32
SIZES = (64, 32, 16)


def main(where: str) -> int:
    """The number of replays that differed from the eager run."""
    place = torch.device(where)
    device = TapeDevice() if place.type == "cpu" else CudaGraphDevice(place)
    breaks = BreakPoints()
    kept = KeptTensors(device)
    inputs, weight = torch.zeros(SIZES[0], WIDTH, device=place), torch.eye(WIDTH, device=place) * 0.5

    def work(size: int) -> Callable[[], tuple[Tensor, ...]]:
        def run() -> tuple[Tensor, ...]:
            mixed = breaks.call(torch.cumsum, inputs[:size] @ weight, dim=0)
            assert isinstance(mixed, Tensor)
            return (mixed @ weight,)

        return run

    wrong = 0
    for kind in (FullBackend, BreakableBackend):
        backend = kind(device, kept=kept, breaks=breaks)
        for size in SIZES:
            backend.capture(size, work(size))
        for step in range(12):
            size = SIZES[step * 5 % len(SIZES)]
            inputs.fill_(step + 1)
            (found,), (known,) = backend.replay(size), work(size)()
            wrong += not torch.allclose(found, known)
    return wrong


if __name__ == "__main__":
    with torch.inference_mode():
        sys.exit(main(sys.argv[1]))
