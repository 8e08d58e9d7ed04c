"""A scripted engine with the interface of `server.engines.client.EngineClient`, without processes, sockets or
sleeps."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from serve_llm.common.errors import EngineDead
from serve_llm.common.types import (
    EngineCoreOutput,
    EngineCoreRequest,
    FinishReason,
    ModelInfo,
    SchedulerStats,
    TokenLogprobs,
)
from serve_llm.server.metrics.meter import Clock, Meter

Sink = Callable[[EngineCoreOutput], None]
Script = Callable[[EngineCoreRequest], Sequence[int]]


def make_model_info(**changed: object) -> ModelInfo:
    """Return plausible values for the demo model's tokenizer."""
    usual: dict[str, object] = {
        "architecture": "ScriptedForCausalLM",
        "max_model_len": 2048,
        "vocab_size": 4096,
        "block_size": 16,
        "num_kv_blocks": 256,
        "kv_cache_tokens": 4096,
        "max_num_seqs": 64,
        "dtype": "float32",
        "device": "cpu",
        "rank_hosts": ["host-a"],
    }
    return ModelInfo(**(usual | changed))


@dataclass
class Open:
    """A request that has not ended."""

    request: EngineCoreRequest
    sink: Sink
    ids: Sequence[int]
    num_given: int  # tokens, including `EngineCoreRequest.output_ids`
    is_new: bool = True  # has had no output


class ScriptedEngine:
    """Each request gets the ids of `script(request)`, repeated until a stop id or max_tokens; if it already has some
    ids, it continues after them.

    A pooling request gets `script(request)` as its vector.

    `automatic`: the event loop runs steps while requests are open; otherwise the test calls `step`.
    `tokens_per_step`: how many tokens each request gets per step.
    """

    def __init__(
        self,
        script: Script,
        *,
        automatic: bool = True,
        model_info: ModelInfo | None = None,
        tokens_per_step: int = 1,
        cached_tokens: int = 0,
        meter: Meter | None = None,
    ) -> None:
        self.script = script
        self.automatic = automatic
        self.model_info = model_info or make_model_info()
        self.tokens_per_step = tokens_per_step
        self.cached_tokens = cached_tokens
        self.ready = True
        self.stats = SchedulerStats()
        self.meter = meter or Meter(Clock())
        self.open: dict[int, Open] = {}
        self.submitted: list[EngineCoreRequest] = []
        self.aborted: list[int] = []
        self.changed = asyncio.Event()  # set at each submit and abort, for tests that wait for one
        self._stepping = False

    def submit_many(self, pairs: Iterable[tuple[EngineCoreRequest, Sink]]) -> None:
        if not self.ready:
            raise EngineDead("the engine is gone")
        for request, sink in pairs:
            assert request.id not in self.open, "an id was used twice"
            self.submitted.append(request)
            self.open[request.id] = Open(request, sink, self.script(request), len(request.output_ids))
        self._count()
        self._go_on()

    def abort(self, ids: Sequence[int]) -> None:
        for request_id in ids:
            if self.open.pop(request_id, None) is not None:
                self.aborted.append(request_id)
        self._count()

    def fail(self, message: str) -> None:
        """Let the engine die: every open request ends with an error."""
        self.ready = False
        ended, self.open = self.open, {}
        for request_id, entry in ended.items():
            entry.sink(EngineCoreOutput(id=request_id, token_ids=[], finish_reason=FinishReason.ERROR, error=message))
        self._count()

    def step(self) -> None:
        """Run one engine step, whose tokens for all open requests are one message."""
        outputs = [self._output(entry) for entry in self.open.values()]
        sinks = {output.id: self.open[output.id].sink for output in outputs}
        for output in outputs:
            if output.finish_reason is not None:
                del self.open[output.id]
        self._count()
        self.stats.num_steps += 1
        self.stats.step_tokens = sum(len(output.token_ids) for output in outputs)
        self.meter.count_step(self.stats)
        for output in outputs:
            # A request that an earlier sink of this step aborted gets nothing more; one that ended still gets its end.
            if output.id in self.open or output.finish_reason is not None:
                sinks[output.id](output)

    def _output(self, entry: Open) -> EngineCoreOutput:
        request, sampling = entry.request, entry.request.sampling
        output = EngineCoreOutput(id=request.id, token_ids=[])
        if entry.is_new:
            entry.is_new = False
            output.cached_tokens, output.queued_seconds = self.cached_tokens, 0.001
            if sampling.prompt_logprobs is not None:
                ids = request.prompt_ids[1:]
                output.prompt_logprobs = [logprobs_of(one, sampling.prompt_logprobs) for one in ids]
        if request.pooling:
            output.vector = array("f", entry.ids).tobytes()
            output.finish_reason = FinishReason.STOP
            return output
        while len(output.token_ids) < self.tokens_per_step and entry.num_given < sampling.max_tokens:
            token_id = entry.ids[entry.num_given % len(entry.ids)]
            entry.num_given += 1
            output.token_ids.append(token_id)
            if token_id in sampling.stop_token_ids and entry.num_given > sampling.min_tokens:
                output.finish_reason, output.stop_id = FinishReason.STOP, token_id
                break
        if output.finish_reason is None and entry.num_given >= sampling.max_tokens:
            output.finish_reason = FinishReason.LENGTH
        if sampling.logprobs is not None:
            asked = sampling.logprob_token_ids
            output.logprobs = [logprobs_of(one, sampling.logprobs, asked) for one in output.token_ids]
        return output

    def _count(self) -> None:
        self.stats.num_running = len(self.open)
        self.stats.kv_cache_usage = len(self.open) / self.model_info.num_kv_blocks
        self.changed.set()

    def _go_on(self) -> None:
        if self.automatic and not self._stepping and self.open:
            self._stepping = True
            asyncio.get_running_loop().call_soon(self._step_by_itself)

    def _step_by_itself(self) -> None:
        self._stepping = False
        self.step()
        self._go_on()


def logprobs_of(token_id: int, count: int, asked: Sequence[int] = ()) -> TokenLogprobs:
    """Return made-up logprobs that depend on the token: it is the most likely one if its id is even, otherwise the
    second."""
    rank = 1 + token_id % 2
    logprob = -0.25 * rank
    others = [other for other in range(10, 10 + count + 1) if other != token_id]
    ranked = [
        (token_id, logprob) if place + 1 == rank else (others.pop(), -0.25 * (place + 1)) for place in range(count)
    ]
    known = dict(ranked)
    ranked += [(one, -float(one)) for one in asked if one not in known]
    return TokenLogprobs(logprob, rank, [one for one, _ in ranked], [value for _, value in ranked])


class FixedEngines:
    """A `server.engines.scaler.ScalableEngines` that counts its calls."""

    def __init__(self, num_engines: int) -> None:
        self.num_engines = num_engines
        self.drain_seconds: list[float] = []

    async def add_engines(self, count: int) -> None:
        self.num_engines = count

    async def remove_engine(self, seconds: float) -> None:
        self.num_engines -= 1
        self.drain_seconds.append(seconds)
