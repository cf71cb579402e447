"""How many threads a step gets, from the times of steps like it. Pure: the runner measures, this decides.

Steps are of one size class if their token counts have the same number of bits. Now and then a class tries a
neighbouring count on every other step and compares medians. Guards: fewer threads win a tie, a change needs a clear
gain (so noise does not flap it), and tries become rare while nothing changes. A row's bits do not depend on the count.
"""

from collections import defaultdict, deque
from dataclasses import dataclass, field
from statistics import median

FIRST_TRY_AFTER = 16
"""Steps of a class before it first tries another count."""
MOST_BETWEEN_TRIES = 512
PAIRS = 3
"""Steps with each count in one try."""
GAIN_OF_MORE, LOSS_OF_FEWER = 0.95, 1.02
"""More threads must take less than this share of the time; fewer may take this much of it."""
DISTURBED = 1.5
"""A step this much slower than usual brings the next try forward: a neighbour may have come."""
_USUAL_OF = 9


def candidate_counts(most: int) -> tuple[int, ...]:
    """1, 2, 4 ... and `most`, ascending."""
    powers = [1 << bit for bit in range(most.bit_length())]
    return tuple(sorted({*(power for power in powers if power <= most), most}))


@dataclass(slots=True)
class _Try:
    """A comparison under way: steps alternate between the class's count and another."""

    other: int
    own_times: list[float] = field(default_factory=list)
    other_times: list[float] = field(default_factory=list)


@dataclass(slots=True)
class _SizeClass:
    place: int
    """Of the count in use, among the candidates."""
    steps_until_try: int = FIRST_TRY_AFTER
    interval: int = FIRST_TRY_AFTER
    tries_fewer: bool = True
    """Which neighbour is tried next."""
    current: _Try | None = None
    usual: deque[float] = field(default_factory=lambda: deque(maxlen=_USUAL_OF))
    """Times of the last steps with the count in use."""


class ThreadChoice:
    """One per runner. `before` each step, `after` it."""

    def __init__(self, most: int) -> None:
        self._counts = candidate_counts(most)
        self._classes: dict[int, _SizeClass] = defaultdict(lambda: _SizeClass(place=len(self._counts) - 1))

    def before(self, num_tokens: int) -> int:
        """Threads for a step of that many tokens."""
        size_class = self._classes[num_tokens.bit_length()]
        if len(self._counts) > 1 and size_class.current is None and size_class.steps_until_try <= 0:
            size_class.current = _Try(self._neighbour(size_class))
        tried = size_class.current
        if tried is not None and len(tried.other_times) < len(tried.own_times):
            return self._counts[tried.other]
        return self._counts[size_class.place]

    def after(self, num_tokens: int, *, threads: int, seconds: float) -> None:
        """The step that `before` was asked about took so long with that many threads."""
        size_class = self._classes[num_tokens.bit_length()]
        size_class.steps_until_try -= 1
        tried = size_class.current
        if tried is not None:
            is_own = threads == self._counts[size_class.place]
            (tried.own_times if is_own else tried.other_times).append(seconds)
            if len(tried.other_times) == PAIRS:
                _settle(size_class, tried)
        elif len(size_class.usual) == _USUAL_OF and seconds > DISTURBED * median(size_class.usual):
            size_class.steps_until_try = min(size_class.steps_until_try, FIRST_TRY_AFTER // 4)
        size_class.usual.append(seconds)

    def _neighbour(self, size_class: _SizeClass) -> int:
        """The place to try, alternately below and above where both are."""
        place, last = size_class.place, len(self._counts) - 1
        goes_down = place == last or (size_class.tries_fewer and place > 0)
        size_class.tries_fewer = not goes_down
        return place - 1 if goes_down else place + 1


def _settle(size_class: _SizeClass, tried: _Try) -> None:
    """Take the better count; try again soon after a change, later and later without one."""
    own, other = median(tried.own_times), median(tried.other_times)
    is_fewer = tried.other < size_class.place
    wins = other <= own * (LOSS_OF_FEWER if is_fewer else GAIN_OF_MORE)
    if wins:
        size_class.place = tried.other
        size_class.usual.clear()
    size_class.interval = FIRST_TRY_AFTER if wins else min(2 * size_class.interval, MOST_BETWEEN_TRIES)
    size_class.steps_until_try = size_class.interval
    size_class.current = None
