"""A real engine inside the test's process: no sockets, integrity checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_llm.engine import startup
from serve_llm.engine.hub import read_config
from serve_llm.engine.loop import Engine
from serve_llm.engine.options import Options
from serve_llm.engine.parallel.layout import Grid
from serve_llm.engine.parallel.lockstep import Lockstep
from serve_llm.engine.types import FinishReason, Output, Request, Sampling, TokenLogprobs
from serve_llm.engine.wire import Abort, Submit
from support.ranks import Meeting, Ranks, ThreadExecutor, run_together


def make_engine(
    directory: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    split: tuple[float, ...] | None = None,
    layers: Sequence[int] | None = None,
    **options: object,
) -> Engine:
    """The engine that `serve-llm directory` with these options would start. A small cache unless one is named.

    tensor, pipeline, split, layers: ranks as threads of this process (`support.ranks`).
    """
    chosen = Options.from_kwargs(str(directory), **({"kv_cache_memory": "64MiB", "max_num_seqs": 64} | options))
    raw = read_config(directory)
    config, spec, weights = startup.resolve_all(chosen, str(directory), raw)
    if tensor == pipeline == 1:
        return Engine(config, startup.build_executor(config, spec, weights, raw))
    return Engine(config, ThreadExecutor(config, spec, weights, Ranks(spec, Grid(tensor, pipeline), split, layers)))


def make_engines(directory: Path, meeting: Path, engines: int, tensor: int = 1, **options: object) -> list[Engine]:
    """Several engines that share out experts. meeting: a directory for their sockets. All else as `make_engine`."""
    given = {"data_parallel_size": engines, "tensor_parallel_size": tensor, "enable_expert_parallel": True}
    defaults = {"kv_cache_memory": "16MiB", "max_num_seqs": 64}
    chosen = Options.from_kwargs(str(directory), **(defaults | given | options))
    raw = read_config(directory)
    columns = [Meeting(engines) for _ in range(tensor)]

    def make(index: int) -> Engine:
        config, spec, weights = startup.resolve_all(chosen, str(directory), raw, engine=index)
        ranks = Ranks(spec, Grid(tensor, 1), config.tensor_parallel_split, columns=columns, engine=index)
        executor = ThreadExecutor(config, spec, weights, ranks)
        return Engine(config, executor, steps=Lockstep(meeting, index, engines))

    return [make(index) for index in range(engines)]


def generate_together(engines: Sequence[Engine], shares: Sequence[Sequence[Request]]) -> list[dict[int, Result]]:
    """What each engine makes of its share of the requests, all at the same time; engines without any take part."""

    def work(index: int) -> dict[int, Result]:
        try:
            results = generate(engines[index], shares[index], [3 * place for place in range(len(shares[index]))])
            engines[index].leave()
            return results
        finally:
            engines[index]._steps.close()

    def abort() -> None:
        for engine in engines:
            engine._executor.ranks.abort()

    return run_together(len(engines), work, abort)


class Result:
    """All outputs of one request, folded."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.cached_tokens: int | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, output: Output) -> None:
        assert self.finish_reason is None, "output after the final one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason


def generate(engine: Engine, requests: Sequence[Request], arrivals: Sequence[int] = ()) -> dict[int, Result]:
    """Run requests to their end. `arrivals`: the step before which each one comes (default: all before the first)."""
    waiting = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    results = {request.id: Result() for request in requests}
    step = 0
    while waiting or engine.has_work:
        arrived = [request for start, request in waiting if start <= step]
        waiting = waiting[len(arrived) :]
        engine.take([Submit(arrived)])
        for output in engine.step().outputs:
            results[output.id].add(output)
        engine.scheduler.check_integrity()
        step += 1
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    return results


def greedy(number: int, prompt_ids: Sequence[int], max_tokens: int, **sampling: object) -> Request:
    """A request for the likeliest tokens."""
    chosen = {"temperature": 0.0, "seed": 0, "max_tokens": max_tokens} | sampling
    return Request(id=number, prompt_ids=list(prompt_ids), sampling=Sampling(**chosen))


def abort(engine: Engine, ids: Sequence[int]) -> None:
    engine.take([Abort(list(ids))])
