"""Measure how a batch slows interactive requests in the engine alone, by the processor time of one thread.

Run: PYTHONPATH=tests python -m bench.batch_steps [--model demo] [--rate 3] [--requests 60] [--turns 5]

Time passes only while this process computes, and jumps to the next arrival when it is idle, so other work on the
machine hardly counts. As in the server, up to 64 requests of the batch run, but they start one at a time while
interactive requests are open. Prints the figures of bench.batches, without the server's share of the time.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator

from bench.batches import (
    BATCH_OUTPUT_TOKENS,
    BATCH_PROMPT_TOKENS,
    BESIDE,
    OUTPUT_TOKENS,
    PROMPT_TOKENS,
    QUIET,
    parse_options,
    report,
)
from bench.model import IDS, model_folder
from bench.workloads import Workload, poisson_arrivals
from serve_llm.cli.bench.client import TimedReply
from serve_llm.common.hub import resolve_model
from serve_llm.common.types import LOWEST_PRIORITY, EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.engine import make_engine

MAX_BATCH_REQUESTS = 64
WARM_UP = -1  # the warm-up turn, not counted


class WorkClock:
    """Counts the seconds that this process has computed, and those skipped."""

    def __init__(self) -> None:
        self._skipped = 0.0

    def __call__(self) -> float:
        return time.process_time() + self._skipped

    def skip_to(self, seconds: float) -> None:
        self._skipped += max(0.0, seconds - self())


def make_request(number: int, prompt: list[int], output_tokens: int, priority: int = 0) -> EngineCoreRequest:
    sampling = Sampling(max_tokens=output_tokens, temperature=0.0, seed=0)
    return EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling, priority=priority)


class Turn:
    """One phase: interactive requests that arrive at random times, with or without a batch."""

    def __init__(self, engine: EngineCore, clock: WorkClock, numbers: Iterator[int]) -> None:
        self._engine = engine
        self._clock = clock
        self._numbers = numbers
        self._open: dict[int, TimedReply] = {}
        self._lines: set[int] = set()  # requests of the batch in progress
        self.num_lines_done = 0

    def run(self, workload: Workload, turn: int, rate: float, has_batch: bool) -> list[TimedReply]:
        began = self._clock()
        arrivals = [began + after for after in poisson_arrivals(rate, workload.requests, turn)]
        waiting = list(zip(arrivals, workload.prompts(turn, IDS), strict=True))
        chooser = random.Random(turn)
        replies = []
        while waiting or self._open:
            while waiting and waiting[0][0] <= self._clock():
                arrival, prompt = waiting.pop(0)
                reply = TimedReply(arrival)
                replies.append(reply)
                number = next(self._numbers)
                self._open[number] = reply
                self._engine.add_requests([make_request(number, prompt, workload.output_tokens)])
            while has_batch and len(self._lines) < (1 if self._open else MAX_BATCH_REQUESTS):
                number = next(self._numbers)
                self._lines.add(number)
                prompt = chooser.choices(IDS, k=BATCH_PROMPT_TOKENS)
                line = make_request(number, prompt, BATCH_OUTPUT_TOKENS, LOWEST_PRIORITY)
                self._engine.add_requests([line])
            if self._engine.has_work:
                self._step()
            else:
                self._clock.skip_to(waiting[0][0])
        self._engine.abort_requests([*self._lines])
        while self._engine.has_work:
            self._engine.step()
        return replies

    def _step(self) -> None:
        for output in self._engine.step().outputs:
            if output.id in self._open and output.token_ids:
                self._open[output.id].times.append(self._clock())
            if output.finish_reason is not None:
                self._open.pop(output.id, None)
                self.num_lines_done += output.id in self._lines
                self._lines.discard(output.id)


def main() -> None:
    given = parse_options(__doc__, rate=3.0, requests=60, turns=5)
    directory = model_folder() if given.model is None else resolve_model(given.model)
    clock = WorkClock()
    engine = make_engine(directory, dtype="bfloat16", cpu_threads=1, kv_cache_memory="256MiB")
    engine._clock = clock
    workload = Workload("interactive", 0, PROMPT_TOKENS, OUTPUT_TOKENS, given.requests)
    numbers = itertools.count()
    turns: dict[str, list[list[TimedReply]]] = {QUIET: [], BESIDE: []}
    rates = []
    for turn in range(WARM_UP, given.turns):
        for kind in turns:
            began, phase = clock(), Turn(engine, clock, numbers)
            replies = phase.run(workload, 2 * turn + (kind is BESIDE), given.rate, kind is BESIDE)
            if turn != WARM_UP:
                turns[kind].append(replies)
            if kind is BESIDE:
                rates.append(phase.num_lines_done / (clock() - began))
    report(turns, rates)


if __name__ == "__main__":
    main()
