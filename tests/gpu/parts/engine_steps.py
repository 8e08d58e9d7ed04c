"""An engine in this process whose steps are timed one by one and profiled by torch. Not a part of the check."""

from __future__ import annotations

import gc
import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from parts import common
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.engine import make_engine

Spans = Iterable[tuple[float, float]]  # begin and end
ENDS = 0.1  # share of the measured time at either end that is excluded, since the profiler also takes time there
TOP_KERNELS = 10
SETTLED = 4  # tokens of each sequence until its steps are captured
LONGEST = 16384  # tokens of the longest request that the shapes allow, which must fit into the cache
SLACK = 60  # steps until all sequences have settled


class KernelSpan(NamedTuple):
    """A kernel or copy on the device. Times in µs."""

    name: str
    begin: float
    end: float


def busy(spans: Spans, begin: float, end: float) -> float:
    """Return the time between begin and end during which any of the spans runs."""
    total, until = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, until), min(last, end)
        if last > first:
            total += last - first
            until = last
    return total


def idle_share(spans: Spans) -> float:
    """Return the idle share between the first and the last span, without both ends."""
    spans = list(spans)
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    margin = ENDS * (end - begin)
    begin, end = begin + margin, end - margin
    return 1.0 - busy(spans, begin, end) / (end - begin)


def top_kernels(spans: Iterable[KernelSpan], count: int = TOP_KERNELS) -> list[tuple[str, float, int]]:
    """Return name, µs and launches of the kernels with the most time, in descending order."""
    micros: Counter[str] = Counter()
    launches: Counter[str] = Counter()
    for span in spans:
        micros[span.name] += span.end - span.begin  # type: ignore[assignment]
        launches[span.name] += 1
    return [(name, took, launches[name]) for name, took in micros.most_common(count)]


def decoding_engine(
    here: common.Place, folder: str, contexts: Sequence[int], output: int, spare: int = 0
) -> EngineCore:
    """Build an engine with a request for each context, decoding in steps that are already captured, for `output` more
    steps. spare: tokens of other requests that fit into the cache."""
    batch, output = len(contexts), output + SLACK
    options = {key: value for key, value in here.options().items() if key != "log_level"}
    tokens = max(sum(contexts) + batch * (output + 64) + spare, LONGEST)  # 128 KiB each for an 8B model
    memory = options.get("kv_cache_memory", f"{-(-tokens // 4096)}GiB")
    engine = make_engine(Path(folder), **{**options, "max_num_seqs": batch + 4, "kv_cache_memory": memory})
    sampling = Sampling(max_tokens=output, temperature=0.0, seed=0)
    requests = [
        EngineCoreRequest(id=number, prompt_ids=prompt(context, number), sampling=sampling)
        for number, context in enumerate(contexts)
    ]
    engine.add_requests(requests)
    generated: Counter[int] = Counter()
    while len(generated) < batch or min(generated.values()) < SETTLED:
        for made in engine.step().outputs:
            generated[made.id] += len(made.token_ids)
    return engine


def forget() -> None:
    """Free the memory of discarded engines for the next one."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def prompt(tokens: int, seed: int) -> list[int]:
    """Return a prompt that is in no cache, unless another one has the seed."""
    return random.Random(seed).choices(range(300, 4000), k=tokens)


def timed_steps(engine: EngineCore, count: int, executed: list[float]) -> float:
    """Return the seconds of a step of steady decoding. executed: gets the host's seconds in each call of `execute`."""
    execute = engine._executor.execute

    def timed(batch: object, masks: object = None) -> object:
        began = time.perf_counter()
        started = execute(batch, masks)  # type: ignore[arg-type]
        executed.append(time.perf_counter() - began)
        return started

    engine._executor.execute = timed  # type: ignore[method-assign,assignment]
    try:
        began = time.perf_counter()
        for _ in range(count):
            assert len(engine.step().outputs) == engine.scheduler.num_running, "decoding was not steady"
        return (time.perf_counter() - began) / count
    finally:
        engine._executor.execute = execute  # type: ignore[method-assign]


class Arrivals:
    """Sends one more prompt before each step of an engine; each ends with its first token."""

    def __init__(self, engine: EngineCore, tokens: int) -> None:
        self._engine, self._tokens = engine, tokens
        self._ids = itertools.count(100_000)

    def run(self, count: int) -> tuple[float, list[int]]:
        """Run steps. Returns the seconds of each, and the tokens that it computed."""
        prompts = [prompt(self._tokens, next(self._ids)) for _ in range(count)]
        sampling = Sampling(max_tokens=1, temperature=0.0, seed=0)
        computed = []
        began = time.perf_counter()
        for ids in prompts:
            self._engine.add_requests([EngineCoreRequest(id=next(self._ids), prompt_ids=ids, sampling=sampling)])
            computed.append(self._engine.step().stats.step_tokens)
        return (time.perf_counter() - began) / count, computed


def first_token_seconds(engine: EngineCore, request: EngineCoreRequest) -> float:
    """Return the seconds to the first token of a request that runs alone and ends with it."""
    assert not engine.has_work
    began = time.perf_counter()
    engine.add_requests([request])
    while engine.has_work:
        engine.step()
    return time.perf_counter() - began


def kernels_of(call: Callable[[], object]) -> list[KernelSpan]:
    """Return what ran on the device during the block."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    return [
        KernelSpan(event.name, event.time_range.start, event.time_range.end)
        for event in profiled.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def tell_kernels(
    here: common.Place, name: str, call: Callable[[], object], count: int, aim: float | None = None
) -> None:
    """Report a profiled call of this many steps: the GPU's idle share, and the kernels with the most time."""
    if here.rehearse:
        here.report.not_run(f"{name}: idle share of the GPU", "there is none")
        return
    spans = kernels_of(call)
    if not spans:
        here.report.not_run(f"{name}: idle share of the GPU", "torch's profiler saw no kernel")
        return
    here.report.measured(f"{name}: idle share of the GPU", idle_share(span[1:] for span in spans), aim=aim)
    inside = sum(span.end - span.begin for span in spans)
    here.report.measured(f"{name}: kernels of a step, one after the other", inside / count / 1000, "ms")
    for place, (kernel, micros, launches) in enumerate(top_kernels(spans), 1):
        unit = f"µs a step, {micros / inside:.0%}, {launches / count:.4g} launches: `{kernel[:90]}`"
        here.report.measured(f"{name}: kernel {place}", micros / count, unit)
