"""A real engine in the test's process, without sockets, whose integrity is checked after every step."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from serve_llm.common.hub import read_config
from serve_llm.common.options.engine_schema import EngineOptions
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling, TokenLogprobs
from serve_llm.engine import startup
from serve_llm.engine.config import Config
from serve_llm.engine.distributed.executor import DPSyncExecutor, Executor
from serve_llm.engine.draft_model.draft_model import DraftModel
from serve_llm.engine.draft_model.resolve import DraftModelConfig, find_draft_directory, resolve_draft_model
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.parallel.dp_sync import DPStepSync
from serve_llm.engine.parallel.layout import ParallelLayout
from support.ranks import Meeting, Ranks, ThreadExecutor, run_together
from support.registered import ENGINES, BuiltEngine
from support.resolved import resolve_all


def make_engine(
    directory: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    split: tuple[float, ...] | None = None,
    layers: Sequence[int] | None = None,
    **options: object,
) -> EngineCore:
    """Build the engine that `serve-llm directory` would start with these options. The cache is small unless a size is
    given.

    tensor, pipeline, split, layers: ranks as threads of this process (`support.ranks`).
    """
    chosen = make_options(str(directory), **({"kv_cache_memory": "64MiB", "max_num_seqs": 64} | options))
    raw = read_config(directory)
    config, spec, weights = resolve_all(chosen, str(directory), raw)
    draft = find_draft_config(chosen, config)
    config = startup.add_hidden_state_layers(config, draft)
    draft_model = startup.build_draft_model(draft, config)
    if tensor == pipeline == 1:
        executor: Executor = startup.build_executor(config, spec, weights, raw, draft=draft)
        draft_model = draft_model or startup.reach_draft_model(draft, config, executor)
    else:
        ranks = Ranks(spec, ParallelLayout(tensor, pipeline), split, layers)
        executor = ThreadExecutor(config, spec, weights, ranks)
    engine = EngineCore(config, executor, draft_model=draft_model)
    sizes = max(tensor, config.tensor_parallel_size), max(pipeline, config.pipeline_parallel_size)
    ENGINES[engine] = BuiltEngine(config, *sizes)
    return engine


def find_draft_config(options: EngineOptions, config: Config) -> DraftModelConfig | None:
    """Find the draft model that the options name. Test checkpoints have no tokenizers to compare."""
    if config.speculation is None or not config.speculation.has_draft_model:
        return None
    directory = Path(config.directory) if config.speculation.model is None else find_draft_directory(options)
    return resolve_draft_model(options, config, directory)


def make_draft_model(options: EngineOptions, config: Config) -> tuple[Config, DraftModel | None]:
    """Return the served model's settings, and the draft model that the options name, in this process."""
    draft = find_draft_config(options, config)
    config = startup.add_hidden_state_layers(config, draft)
    return config, startup.build_draft_model(draft, config)


def make_engines(
    directory: Path, meeting: Path, engines: int, tensor: int = 1, pipeline: int = 1, **options: object
) -> list[EngineCore]:
    """Build several engines that share experts. meeting: a directory for their sockets. For the rest, see
    `make_engine`."""
    given = {
        "data_parallel_size": engines,
        "tensor_parallel_size": tensor,
        "pipeline_parallel_size": pipeline,
        "enable_expert_parallel": True,
    }
    defaults = {"kv_cache_memory": "16MiB", "max_num_seqs": 64}
    chosen = make_options(str(directory), **(defaults | given | options))
    raw = read_config(directory)
    columns = [Meeting(engines) for _ in range(tensor * pipeline)]

    def make(index: int) -> EngineCore:
        config, spec, weights = resolve_all(chosen, str(directory), raw, engine=index)
        config, draft_model = make_draft_model(chosen, config)
        ranks = Ranks(
            spec,
            ParallelLayout(tensor, pipeline),
            config.tensor_parallel_split,
            columns=columns,
            engine=index,
            num_redundant=config.redundant_experts,
        )
        executor = ThreadExecutor(config, spec, weights, ranks)
        synced = DPSyncExecutor(executor, DPStepSync(meeting, index, engines))
        engine = EngineCore(config, synced, draft_model=draft_model)
        ENGINES[engine] = BuiltEngine(config, tensor, pipeline)
        return engine

    def abort() -> None:
        for column in columns:
            column.abort()

    return run_together(engines, make, abort)


def generate_together(
    engines: Sequence[EngineCore], shares: Sequence[Sequence[EngineCoreRequest]]
) -> list[dict[int, Result]]:
    """Return each engine's outputs for its share of the requests, run at the same time; engines without requests take
    part."""

    def work(index: int) -> dict[int, Result]:
        try:
            results = generate(engines[index], shares[index], [3 * place for place in range(len(shares[index]))])
            engines[index].drain()
            return results
        finally:
            engines[index]._executor.sync.close()

    def abort() -> None:
        for engine in engines:
            engine._executor.executor.ranks.abort()

    return run_together(len(engines), work, abort)


class Result:
    """All outputs of one request, folded."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.logprobs: list[TokenLogprobs] = []
        self.prompt_logprobs: list[TokenLogprobs] | None = None
        self.cached_tokens: int | None = None
        self.vector: bytes | None = None
        self.finish_reason: FinishReason | None = None

    def add(self, output: EngineCoreOutput) -> None:
        assert self.finish_reason is None, "output after the final one"
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs or []
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.vector = output.vector or self.vector
        if output.cached_tokens is not None:
            self.cached_tokens = output.cached_tokens
        self.finish_reason = output.finish_reason


def generate(
    engine: EngineCore, requests: Sequence[EngineCoreRequest], arrivals: Sequence[int] = ()
) -> dict[int, Result]:
    """Run requests to their end. `arrivals`: the step before which each arrives (default: all before the first)."""
    waiting = sorted(zip(arrivals or [0] * len(requests), requests, strict=True), key=lambda pair: pair[0])
    results = {request.id: Result() for request in requests}
    step = 0
    while waiting or engine.has_work:
        arrived = [request for start, request in waiting if start <= step]
        waiting = waiting[len(arrived) :]
        engine.add_requests(arrived)
        for output in engine.step().outputs:
            results[output.id].add(output)
        engine.scheduler.check_integrity()
        step += 1
    stats = engine.scheduler.stats()
    assert (stats.num_running, stats.num_waiting, stats.kv_cache_usage) == (0, 0, 0.0)
    return results


def assert_equal(found: dict[int, Result], expected: dict[int, Result], is_exact: bool = True) -> None:
    """Assert that results are equal. is_exact: logprobs have the same bits, not only nearly the same value."""
    assert found.keys() == expected.keys()
    for number, one in expected.items():
        result = found[number]
        assert (result.token_ids, result.finish_reason) == (one.token_ids, one.finish_reason), f"request {number}"
        assert result.vector == one.vector, f"request {number}"
        if is_exact:
            assert result.logprobs == one.logprobs, f"request {number}"
        else:
            assert len(result.logprobs) == len(one.logprobs), f"request {number}"
            pairs = zip(result.logprobs, one.logprobs, strict=True)
            assert all(abs(left.logprob - right.logprob) <= 1e-4 for left, right in pairs), f"request {number}"


def greedy(number: int, prompt_ids: Sequence[int], max_tokens: int, **sampling: object) -> EngineCoreRequest:
    """Return a greedy request."""
    chosen = {"temperature": 0.0, "seed": 0, "max_tokens": max_tokens} | sampling
    return EngineCoreRequest(id=number, prompt_ids=list(prompt_ids), sampling=Sampling(**chosen))


def abort(engine: EngineCore, ids: Sequence[int]) -> None:
    engine.abort_requests(list(ids))
