"""Send a trace to a real daemon, and derive the daemon's step costs from client-side times."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence

import msgspec

from bench.simulation.costs import StepCosts, StepWork, fit_costs
from bench.simulation.engine import REPLY_ID
from bench.simulation.fleet import IDS
from bench.simulation.report import GapHistogram, Latencies
from bench.simulation.traces import PromptBuilder, TraceRequest
from serve_llm.cli.bench.client import StreamClient, TimedReply

DECODE_TOKENS = 160  # streams used to time decode steps
# (streams, prompt tokens of each) of the timed decode steps
DECODE_BATCHES = ((1, 16), (2, 16), (4, 16), (12, 16), (1, 800), (6, 480))
PROMPT_LENGTHS = (16, 128, 256, 480)
DECODE_REPEATS = 2
DECODE_ATTEMPTS = 10
PROMPT_REPEATS = 5


class MeasuredRun(msgspec.Struct, frozen=True):
    """A trace run on a real daemon."""

    output_tokens: int
    output_tokens_per_second: float
    latencies: Latencies


class Calibration(msgspec.Struct, frozen=True):
    """Times measured on an otherwise idle daemon."""

    steps: list[tuple[StepWork, float]]  # decode steps and their seconds
    prompts: list[tuple[int, float]]  # tokens of a prompt, and its seconds to first token

    def fit(self, other: Calibration) -> StepCosts:
        """Fit costs to the medians of two calibrations, made before and after the run."""
        seconds: defaultdict[StepWork, list[float]] = defaultdict(list)
        for work, one in [*self.steps, *other.steps]:
            seconds[work].append(one)
        costs = fit_costs([(work, statistics.median(times)) for work, times in seconds.items()])
        rests: defaultdict[int, list[float]] = defaultdict(list)
        for length, one in [*self.prompts, *other.prompts]:
            rests[length].append(one - costs.seconds(StepWork(0, 0, length)))
        slope, intercept = statistics.linear_regression(list(rests), list(map(statistics.median, rests.values())))
        return msgspec.structs.replace(costs, prompt_token_seconds=max(0.0, slope), request_seconds=max(0.0, intercept))


class DaemonClient:
    """Sends requests of traces. Every id of a reply is recorded as REPLY_ID, so conversations' next turns are known."""

    def __init__(self, url: str, model: str | None, seed: int) -> None:
        """seed: different seeds give different prompts, which are in no cache."""
        self.prompts = PromptBuilder(IDS, seed)
        self._client = StreamClient(url)
        self._model = model

    async def complete(self, prompt_ids: Sequence[int], output_tokens: int) -> TimedReply:
        """Raises RuntimeError if the reply is not complete."""
        body = {
            "model": self._model,
            "prompt": prompt_ids,
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logit_bias": {str(REPLY_ID): 100},
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        reply = await self._client.send("/v1/completions", body)
        if reply.error is not None or reply.usage is None or reply.usage.completion_tokens != output_tokens:
            raise RuntimeError(f"the daemon did not complete a request: {reply.error or 'the reply is too short'}")
        return reply

    async def replay(self, trace: Sequence[TraceRequest]) -> MeasuredRun:
        """Send the trace at its times and the turns of conversations in order, as the simulation does."""
        chains: defaultdict[int, list[int]] = defaultdict(list)
        for number, one in enumerate(trace):
            chains[-1 - number if one.conversation is None else one.conversation].append(number)
        began = time.perf_counter()
        replies: list[TimedReply] = []

        async def send_chain(numbers: list[int]) -> None:
            history: list[int] = []
            for number in numbers:
                one = trace[number]
                await asyncio.sleep(max(0.0, began + one.at - time.perf_counter()))
                prompt_ids = self.prompts.build(number, one, history)
                replies.append(await self.complete(prompt_ids, one.output_tokens))
                history = prompt_ids + [REPLY_ID] * one.output_tokens

        await asyncio.gather(*map(send_chain, chains.values()))
        return _summarise(replies, sum(one.output_tokens for one in trace))

    async def calibrate(self) -> Calibration:
        """Measure decode steps by the times between tokens, and prompts by the time to the first token."""
        numbers = itertools.count(10**6 + random.SystemRandom().randrange(10**6))  # prompts that are in no cache

        async def time_streams(streams: int, prompt_tokens: int, output_tokens: int) -> list[TimedReply]:
            prompts = [self.prompts.own_text(next(numbers), prompt_tokens) for _ in range(streams)]
            return await asyncio.gather(*(self.complete(prompt, output_tokens) for prompt in prompts))

        await time_streams(4, 64, 16)
        steps = []
        for streams, prompt_tokens in DECODE_BATCHES:
            context = streams * (prompt_tokens + DECODE_TOKENS // 2)
            timed: list[float] = []
            for _ in range(DECODE_ATTEMPTS):
                seconds = _time_step(await time_streams(streams, prompt_tokens, DECODE_TOKENS))
                if seconds is not None:
                    timed.append(seconds)
                if len(timed) == DECODE_REPEATS:
                    break
            else:
                raise ValueError(f"{streams} streams never ran at the same time: the daemon is too disturbed")
            steps += [(StepWork(0, streams, context), seconds) for seconds in timed]
        prompts = []
        for length in PROMPT_LENGTHS:
            for _ in range(PROMPT_REPEATS):
                (reply,) = await time_streams(1, length, 1)
                prompts.append((length, reply.times[0] - reply.began))
        return Calibration(steps, prompts)


def _time_step(replies: Sequence[TimedReply]) -> float | None:
    """Mean seconds of a step while all of the streams were decoding; None if they never were."""
    start = max(reply.times[0] for reply in replies)
    end = min(reply.times[-1] for reply in replies)
    rates = []
    for reply in replies:
        within = [at for at in reply.times if start <= at <= end]
        if len(within) > 1:
            rates.append((within[-1] - within[0]) / (len(within) - 1))
    return statistics.median(rates) if rates else None


def _summarise(replies: Sequence[TimedReply], output_tokens: int) -> MeasuredRun:
    gaps = GapHistogram()
    for reply in replies:
        for before, after in itertools.pairwise(reply.times):
            gaps.add(after - before)
    seconds = max(reply.times[-1] for reply in replies) - min(reply.began for reply in replies)
    latencies = Latencies.summarise(
        [reply.times[0] - reply.began for reply in replies],
        gaps,
        [reply.times[-1] - reply.began for reply in replies],
    )
    return MeasuredRun(output_tokens, output_tokens / seconds if seconds > 0 else math.nan, latencies)
