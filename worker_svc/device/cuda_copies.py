"""`SideCopies` of an NVIDIA GPU: a stream for copies in, one for copies out, events between them and the computing one.

Nothing here waits for the whole device. Tensors that cross streams are recorded, so that the allocator does not hand
their memory out while the other stream still uses it.
"""

import torch
from torch import Tensor

from worker_svc.device.host_staging import Mark, Transfers, direct_transfers, side_transfers


class CudaMark:
    """An event of a stream."""

    def __init__(self, event: torch.cuda.Event) -> None:
        self.event = event

    def wait_on_host(self) -> None:
        """Return when the stream has come to it."""
        self.event.synchronize()


class CudaCopies:
    """Made once per worker; copies in are asked for by the thread that stages, the rest by the device thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._inward = torch.cuda.Stream(device)
        self._outward = torch.cuda.Stream(device)

    def page_locked(self, num_bytes: int) -> Tensor:
        """[num_bytes] uint8 of the host."""
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def copy_in(self, source: Tensor) -> Tensor:
        """A device tensor that will be a copy."""
        with torch.cuda.stream(self._inward):
            return source.to(self._device, non_blocking=True)

    def mark(self) -> Mark:
        """The end of the copies in so far."""
        event = torch.cuda.Event()
        event.record(self._inward)
        return CudaMark(event)

    def compute_waits(self, mark: Mark, tensors: list[Tensor]) -> None:
        """The computing stream goes on after `mark`."""
        assert isinstance(mark, CudaMark)
        computing = torch.cuda.current_stream(self._device)
        computing.wait_event(mark.event)
        for tensor in tensors:
            tensor.record_stream(computing)

    def copy_out(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        """Copies on the host, on the outward stream, behind what is computed so far."""
        computed = torch.cuda.Event()
        computed.record(torch.cuda.current_stream(self._device))
        self._outward.wait_event(computed)
        copies = [torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True) for tensor in tensors]
        with torch.cuda.stream(self._outward):
            for copy, tensor in zip(copies, tensors, strict=True):
                copy.copy_(tensor, non_blocking=True)
                tensor.record_stream(self._outward)
        copied = torch.cuda.Event()
        copied.record(self._outward)
        copied.synchronize()
        return copies


def transfers_of(device: torch.device, *, num_slots: int) -> Transfers:
    """The way to a device and back: beside its work where it has streams."""
    if device.type == "cuda":
        return side_transfers(CudaCopies(device), num_slots=num_slots)
    return direct_transfers(device)
