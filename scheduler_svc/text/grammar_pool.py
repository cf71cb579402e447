"""The grammar processes of a scheduler's core: each row's masks come from one of them, one call at a time and process.

Knows nothing of the core. Guards: rows of one process do not wait for another's.
"""

import asyncio
from collections.abc import Callable

from scheduler_svc.text.grammar_lane import GrammarLane, MaskAnswer, MaskQuestion, RowKey
from scheduler_svc.text.grammar_messages import Greeting


class GrammarPool:
    """Made by a composition root, used on one event loop. Processes start with their first question."""

    def __init__(self, greeting: Greeting, *, num_processes: int, answered: Callable[[MaskAnswer], None]) -> None:
        """Name the processes; nothing is started yet.

        Args:
            greeting: what each process is told.
            num_processes: at least one.
            answered: takes every answer, in the order of a process's calls.
        """
        self._lanes = [GrammarLane(greeting, answered=answered) for _ in range(num_processes)]
        self._lane_of_row: dict[RowKey, GrammarLane] = {}
        self._num_rows = dict.fromkeys(range(num_processes), 0)

    @property
    def pids(self) -> list[int]:
        """Of the running processes."""
        return [lane.pid for lane in self._lanes if lane.pid is not None]

    def ask(self, question: MaskQuestion) -> None:
        """Ask for the next mask of a row, which waits for the answer."""
        lane = self._lane_of_row.get(question.row)
        if lane is None:
            index = min(self._num_rows, key=self._num_rows.__getitem__)
            self._num_rows[index] += 1
            lane = self._lane_of_row[question.row] = self._lanes[index]
        lane.ask(question)

    def forget(self, row: RowKey) -> None:
        """The row ended. Does nothing for one that never asked."""
        lane = self._lane_of_row.pop(row, None)
        if lane is not None:
            self._num_rows[self._lanes.index(lane)] -= 1
            lane.forget(row)

    async def run(self) -> None:
        """Answer for ever; ends the processes when it is cancelled."""
        async with asyncio.TaskGroup() as group:
            for lane in self._lanes:
                group.create_task(lane.run())
