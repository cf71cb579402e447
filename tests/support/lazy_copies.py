"""A device whose copies happen as late as they may: a copy in reads its source only when somebody waits for it.

So whatever is overwritten, used or read too early shows as wrong numbers.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from worker_svc.device.host_staging import Mark


class LazyMark:
    """A number of copies."""

    def __init__(self, copies: "LazyCopies", num_copies: int) -> None:
        self._copies = copies
        self.num_copies = num_copies

    def wait_on_host(self) -> None:
        self._copies.host_waits.append(max(0, self.num_copies - self._copies.num_done))
        self._copies.run(self.num_copies)


class LazyCopies:
    """A `SideCopies` on the CPU."""

    def __init__(self) -> None:
        self._asked: list[Callable[[], object]] = []
        self.num_done = 0
        self.host_waits: list[int] = []
        """Of each wait of the host: how many copies it had to wait for."""
        self.buffers: list[Tensor] = []
        self.crossed: list[Tensor] = []
        """What the computing side was allowed to use."""

    def page_locked(self, num_bytes: int) -> Tensor:
        self.buffers.append(torch.full((num_bytes,), 0xEE, dtype=torch.uint8))
        return self.buffers[-1]

    def copy_in(self, source: Tensor) -> Tensor:
        target = torch.full_like(source, 77)
        self._asked.append(lambda: target.copy_(source))
        return target

    def mark(self) -> Mark:
        return LazyMark(self, len(self._asked))

    def compute_waits(self, mark: Mark, tensors: list[Tensor]) -> None:
        assert isinstance(mark, LazyMark)
        self.run(mark.num_copies)
        self.crossed.extend(tensors)

    def copy_out(self, tensors: tuple[Tensor, ...]) -> list[Tensor]:
        return [tensor.detach().clone() for tensor in tensors]

    def run(self, num_copies: int) -> None:
        """Until so many are done, in their order."""
        while self.num_done < num_copies:
            self._asked[self.num_done]()
            self.num_done += 1
