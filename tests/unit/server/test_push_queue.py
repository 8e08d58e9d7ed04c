"""One callback of the event loop serves all streams that have something new."""

from __future__ import annotations

import asyncio

from serve_llm.server.generate.push_queue import PushQueue


class Stream:
    def __init__(self, queue: PushQueue, following: list[Stream]) -> None:
        self.num_pushes = 0
        self._queue = queue
        self._following = following

    def push_changes(self) -> None:
        self.num_pushes += 1
        for stream in self._following:
            self._queue.add(stream)


def test_streams_are_pushed_together_after_the_step() -> None:
    async def scenario() -> None:
        queue = PushQueue()
        last = Stream(queue, [])
        first = Stream(queue, [last])
        for stream in (first, last):
            queue.add(stream)
        assert first.num_pushes == last.num_pushes == 0, "not within the step"
        await asyncio.sleep(0)
        assert (first.num_pushes, last.num_pushes) == (1, 1), "what a push adds comes after it"
        await asyncio.sleep(0)
        assert (first.num_pushes, last.num_pushes) == (1, 2)

    asyncio.run(scenario())
