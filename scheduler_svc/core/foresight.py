"""What the past says of the near future: how long outputs become, how much longer than its device time a step takes.

Pure; owned by the scheduling state.
"""

from scheduler_svc.core.outlook import Outlook
from scheduler_svc.core.output_lengths import OutputLengths
from scheduler_svc.core.prompt_hits import PromptHits
from scheduler_svc.core.sent_away import SentAway
from scheduler_svc.core.worker_state import WorkerState

_MEMORY = 0.98
"""Weight that a plan keeps with each later one."""
_MOST_STRETCH = 4.0


class _Steps:
    """Of one worker: plans that followed each other without a pause."""

    def __init__(self) -> None:
        self._device_s = 0.0
        self._real_s = 0.0
        self._last_at: float | None = None

    def result(self, now: float, device_s: float, *, has_more: bool) -> None:
        if self._last_at is not None:
            self._device_s = self._device_s * _MEMORY + device_s
            self._real_s = self._real_s * _MEMORY + now - self._last_at
        self._last_at = now if has_more else None

    @property
    def stretch(self) -> float:
        return min(max(self._real_s / self._device_s, 1.0), _MOST_STRETCH) if self._device_s else 1.0


class Foresight:
    """Made with the scheduling state."""

    def __init__(self) -> None:
        self.outputs = OutputLengths()
        self.prompts = PromptHits()
        self.sent_away = SentAway()
        self._steps: dict[str, _Steps] = {}
        self._known: dict[str, tuple[tuple[float, int], Outlook]] = {}

    def result(self, worker: WorkerState, device_s: float, *, now: float) -> None:
        """The worker's oldest plan took so long on its device; it is in flight no more."""
        steps = self._steps.setdefault(worker.name, _Steps())
        steps.result(now, device_s, has_more=bool(worker.in_flight))

    def lost(self, worker: str) -> None:
        """What was measured of it says nothing about its next life."""
        self._steps.pop(worker, None)
        self._known.pop(worker, None)

    def outlook(self, worker: WorkerState, *, now: float) -> Outlook:
        """A new look at the worker."""
        steps = self._steps.get(worker.name)
        return Outlook(worker, self.outputs, stretch=steps.stretch if steps else 1.0, now=now)

    def last_outlook(self, worker: WorkerState, *, now: float) -> Outlook:
        """As `outlook`, but the look may be as old as the worker's last plan: for many questions at one time."""
        key = (now, worker.next_seq)
        found = self._known.get(worker.name)
        if found is None or found[0] != key:
            found = self._known[worker.name] = key, self.outlook(worker, now=now)
        return found[1]
