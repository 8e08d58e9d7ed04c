"""How long the GPU stands idle in steady decoding: the time in which no kernel runs, in some fifty steps of an engine
in this process; and what the host does in a step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from parts import common
from serve_llm.engine.loop import Engine
from serve_llm.engine.types import Request, Sampling
from serve_llm.engine.wire import Submit
from support.engine import make_engine

Spans = Iterable[tuple[float, float]]  # begin and end
STEPS = 50
ENDS = 0.1  # of the measured time at either end, which belong to the profiler as well


def busy(spans: Spans, begin: float, end: float) -> float:
    """Of the time from begin to end, the part in which any of the spans runs."""
    total, until = 0.0, begin
    for first, last in sorted(spans):
        first, last = max(first, until), min(last, end)
        if last > first:
            total += last - first
            until = last
    return total


def idle_share(spans: Spans) -> float:
    """Between the first and the last span, but for their ends."""
    spans = list(spans)
    begin, end = min(first for first, _ in spans), max(last for _, last in spans)
    margin = ENDS * (end - begin)
    begin, end = begin + margin, end - margin
    return 1.0 - busy(spans, begin, end) / (end - begin)


def engine_of(here: common.Place, folder: str, batch: int, context: int, output: int) -> Engine:
    """With so many requests, decoding, in steps that are captured already."""
    options = {key: value for key, value in here.options().items() if key != "log_level"}
    memory = options.get("kv_cache_memory", f"{-(-batch * (context + output + 64) // 4096)}GiB")
    engine = make_engine(Path(folder), **{**options, "max_num_seqs": batch, "kv_cache_memory": memory})
    sampling = Sampling(max_tokens=output, temperature=0.0, seed=0)
    prompts = [[(7 * number + place) % 4000 for place in range(context)] for number in range(batch)]
    engine.take([Submit([Request(id=n, prompt_ids=prompt, sampling=sampling) for n, prompt in enumerate(prompts)])])
    generated = 0
    while generated < 10 * batch:
        generated += sum(len(output.token_ids) for output in engine.step().outputs)
    return engine


def steps(engine: Engine, count: int, executed: list[float]) -> float:
    """Seconds of a step. executed: gets the host's seconds in each call of `execute`."""
    execute = engine._executor.execute

    def timed(batch: object) -> object:
        began = time.perf_counter()
        started = execute(batch)  # type: ignore[arg-type]
        executed.append(time.perf_counter() - began)
        return started

    engine._executor.execute = timed  # type: ignore[method-assign,assignment]
    began = time.perf_counter()
    for _ in range(count):
        assert len(engine.step().outputs) == engine.scheduler.num_running, "decoding was not steady"
    took = (time.perf_counter() - began) / count
    engine._executor.execute = execute  # type: ignore[method-assign]
    return took


def kernels_of(call: Callable[[], object]) -> list[tuple[float, float]]:
    """When kernels and copies ran on the device in the meantime, in µs."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        call()
        torch.cuda.synchronize()
    on_device = (event for event in profiled.events() if event.device_type == torch.autograd.DeviceType.CUDA)
    return [(event.time_range.start, event.time_range.end) for event in on_device]


def decoding(here: common.Place, name: str, folder: str, batch: int, aim: float | None) -> None:
    context, count = here.sized(1024, 32), here.sized(STEPS, 4)
    engine = engine_of(here, folder, batch, context, 10 + 4 * count + 20)
    executed: list[float] = []
    took = steps(engine, count, executed)
    name = f"{name}, batch {batch}"
    here.report.measured(f"{name}: a step", took * 1000, "ms")
    here.report.measured(f"{name}: host in `execute`, median", statistics.median(executed) * 1000, "ms")
    if here.rehearse:
        here.report.not_run(f"{name}: idle share of the GPU", "there is none")
        return
    spans = kernels_of(lambda: steps(engine, count, executed))
    if not spans:
        here.report.not_run(f"{name}: idle share of the GPU", "torch's profiler saw no kernel")
        return
    here.report.measured(f"{name}: idle share of the GPU", idle_share(spans), aim=aim)
    inside = sum(last - first for first, last in spans)
    here.report.measured(f"{name}: kernels of a step, one after the other", inside / count / 1000, "ms")


def main() -> None:
    here = common.place("idle")
    half = here.folder(common.QWEN_HALF_B, "half-b")
    decoding(here, "0.5B", half, 1, None)
    decoding(here, "0.5B", half, here.sized(8, 2), None)
    decoding(here, "8B", here.folder(common.LLAMA_8B, "8b"), here.sized(64, 3), 0.03)


if __name__ == "__main__":
    main()
