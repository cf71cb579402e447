"""Asks a grammar lane or a pool of them, and awaits the answers."""

import asyncio
import contextlib

from scheduler_svc.text.grammar_lane import MaskQuestion

LIMIT_S = 60.0


class Asker:
    """Asks a lane or a pool and awaits the answers."""

    def __init__(self):
        self.answers = {}
        self.came = asyncio.Event()
        self.target = None

    def answered(self, answer):
        self.answers[answer.row, answer.position] = answer.answer
        self.came.set()

    async def ask(self, *questions):
        for row, source, ids in questions:
            self.target.ask(MaskQuestion(row, source, tuple(ids)))
        keys = [(row, len(ids)) for row, _, ids in questions]
        async with asyncio.timeout(LIMIT_S):
            while not all(key in self.answers for key in keys):
                self.came.clear()
                await self.came.wait()
        return [self.answers.pop(key) for key in keys]


@contextlib.asynccontextmanager
async def running(target, asker):
    asker.target = target
    task = asyncio.create_task(target.run())
    try:
        yield target
    finally:
        task.cancel()
        await asyncio.wait({task})
