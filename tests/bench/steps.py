"""Measure how the time of an engine step divides into parts, and compare with the limits of memory and arithmetic.

Run on a quiet machine: PYTHONPATH=tests python -m bench.steps [--quantization int8 | int4] [--steps 24]

A 0.5B-shaped model runs in this process, stepped as in the engine's loop, with messages over a real socket. Timers are
put around the engine's parts from outside: around every kernel in the table with which the model is built, and around
the calls in `CALLS`. Time in nested parts counts once, for the inner one; time that no timer covers is "other". Steps
with and without timers take turns; the time of a step is that of steps without. Steps are not recorded, because the
parts of a recorded step cannot be timed. Prints a table, then one JSON line.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as in engine processes, before torch is imported

import argparse
import dataclasses
import json
import random
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import zmq

from bench.model import IDS, model_folder
from bench.roofline import Limits, measure_limits, step_work
from serve_llm.common import messages
from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine import startup
from serve_llm.engine.__main__ import ZmqChannel
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.weights import load
from serve_llm.kernels.embedding_table import EmbeddingTable
from serve_llm.kernels.registry import Kernels
from support.resolved import resolve_all

CONTEXT = 256
CHUNK = 256
FILL = 2048  # token budget of a step while streams begin
WARM_STEPS = 4
PREFILLS = 6
# The part of a kernel, by a fragment of its name; the first match wins. Other kernels are parts by their own names.
KERNEL_PARTS = (
    ("pack", "linear"),
    ("attention", "attention"),
    ("angles", "rope, cache"),
    ("rope", "rope, cache"),
    ("cache", "rope, cache"),
    ("norm", "norms"),
    ("activation", "activation"),
    ("silu", "activation"),
    ("gelu", "activation"),
    ("sampl", "sampling"),
)
# Paths of other parts, starting at the engine; `[]` stands for every element of a list.
CALLS = (
    ("scheduling", "scheduler.schedule"),
    ("scheduling", "scheduler.update_from_output"),
    ("scheduling", "add_requests"),
    ("inputs", "_executor._worker._runner._input_batch.apply"),
    ("inputs", "_executor._worker._runner._input_batch.gather"),
    ("embedding", "_executor._worker._decoder._embed"),
    ("rope, cache", "_executor._worker._decoder._ropes.[]"),
    ("head", "_executor._worker._decoder.logits"),
    ("sampling", "_executor._worker._runner._sampler.sample"),
)
ORDER = (
    *("embedding", "norms", "linear", "rope, cache", "attention", "activation", "head", "sampling"),
    *("inputs", "scheduling", "messages"),
)


class Stopwatch:
    """Seconds by part. Time in a nested part is subtracted from the outer one."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.on = False
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = 0.0

    def wrap(self, part: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            if not self.on:
                return call(*args, **kwargs)
            now = self._clock()
            if self._inside:
                self.seconds[self._inside[-1]] += now - self._since
            self._inside.append(part)
            self._since = now
            try:
                return call(*args, **kwargs)
            finally:
                now = self._clock()
                self.seconds[self._inside.pop()] += now - self._since
                self._since = now

        return timed


class TimedLinear:
    """A packed linear layer that is timed, and otherwise behaves like the original."""

    def __init__(self, product: Any, part: str, watch: Stopwatch) -> None:
        self._product, self._call = product, watch.wrap(part, product)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._product, name)


def kernel_part(name: str) -> str:
    return next((part for word, part in KERNEL_PARTS if word in name), name)


def timed_kernels(kernels: Kernels, vocab_size: int, watch: Stopwatch) -> Kernels:
    """Return the same kernels, each timed. For `pack...`, the product that it returns is timed, not the packing."""

    def packing(pack: Callable[..., Any]) -> Callable[..., Any]:
        def packed(weight: Any, *args: Any, **kwargs: Any) -> TimedLinear:
            part = "head" if weight.shape[0] == vocab_size else "linear"
            return TimedLinear(pack(weight, *args, **kwargs), part, watch)

        return packed

    def packing_table(pack: Callable[..., EmbeddingTable]) -> Callable[..., EmbeddingTable]:
        def packed(*args: Any, **kwargs: Any) -> EmbeddingTable:
            table = pack(*args, **kwargs)
            look_up = watch.wrap("embedding", table.look_up)
            return EmbeddingTable(TimedLinear(table.multiply, "head", watch), look_up)

        return packed

    def timed(name: str, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: watch.wrap(kernel_part(name), one) for key, one in value.items()}
        if not callable(value):
            return value
        if name in ("pack_experts", "pack_heads"):  # built from timed products, or used by other models
            return value
        if name.endswith("_table"):
            return packing_table(value)
        return packing(value) if name.startswith("pack") else watch.wrap(kernel_part(name), value)

    fields = [one.name for one in dataclasses.fields(kernels)]
    return dataclasses.replace(kernels, **{name: timed(name, getattr(kernels, name)) for name in fields})


def time_calls(engine: EngineCore, watch: Stopwatch, calls: Sequence[tuple[str, str]] = CALLS) -> list[str]:
    """Put timers around `calls`. Returns the paths that do not exist (any more)."""
    missing = []
    for part, path in calls:
        *way, name = path.split(".")
        owner: Any = engine
        try:
            for step in way:
                owner = getattr(owner, step)
            if name == "[]":
                owner[:] = [watch.wrap(part, call) for call in owner]
            else:
                setattr(owner, name, watch.wrap(part, getattr(owner, name)))
        except (AttributeError, TypeError):
            missing.append(path)
    return missing


class Bench:
    """An engine with timers, and the other end of its socket. A context manager that closes both."""

    def __init__(self, directory: Path, **options: object) -> None:
        self.watch = Stopwatch()
        chosen = make_options(
            str(directory),
            **{"enable_prefix_caching": False, "kv_cache_memory": "512MiB", "log_level": "warning"}
            | {"enforce_eager": True}
            | options,
        )
        raw = read_config(directory)
        config, spec, weights = resolve_all(chosen, str(directory), raw)
        self.spec: ModelSpec = spec
        real = load.choose

        def choose(*args: Any, **kwargs: Any) -> Kernels:
            return timed_kernels(real(*args, **kwargs), spec.vocab_size, self.watch)

        with mock.patch.object(load, "choose", choose):
            self.engine = EngineCore(config, startup.build_executor(config, spec, weights, raw))
        self.missing = time_calls(self.engine, self.watch)
        self._socket = zmq.Context.instance().socket(zmq.PAIR)
        self._folder = tempfile.TemporaryDirectory()
        address = f"ipc://{self._folder.name}/steps"
        self._socket.bind(address)
        self._channel = channel = ZmqChannel(address)
        self._receive = self.watch.wrap("messages", channel.receive)
        self._send = self.watch.wrap("messages", channel.send)
        self._next_id = 0

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        self._socket.close()
        self._folder.cleanup()

    def submit(self, count: int, prompt_tokens: int, max_tokens: int) -> None:
        rng = random.Random(self._next_id)
        requests = []
        for _ in range(count):
            self._next_id += 1
            prompt = [rng.choice(IDS) % self.spec.vocab_size for _ in range(prompt_tokens)]
            sampling = Sampling(temperature=0.0, seed=0, max_tokens=max_tokens)
            requests.append(EngineCoreRequest(id=self._next_id, prompt_ids=prompt, sampling=sampling))
        self._socket.send(messages.encode(messages.Submit(requests)))

    def step(self, timed: bool) -> tuple[float, messages.EngineCoreOutputs]:
        """Run one iteration of the loop. Returns its seconds and the message sent."""
        self.watch.on = timed
        began = time.perf_counter()
        for message in self._receive(0):
            self.engine.add_requests(message.requests)
        self._send(self.engine.step())
        seconds = time.perf_counter() - began
        self.watch.on = False
        step = messages.decode_from_engine(self._socket.recv())
        assert isinstance(step, messages.EngineCoreOutputs)
        return seconds, step

    def drain(self) -> None:
        while self.engine.has_work:
            self.step(False)


@dataclass(frozen=True)
class Case:
    """Seconds per step."""

    plain: float  # without timers
    timed: float
    parts: dict[str, float]
    weights: float  # to read the weights once
    least: float  # lower bound by memory and arithmetic: see `roofline`
    num_bytes: float
    operations: float


def middle_half(steps: Sequence[tuple[float, dict[str, float]]]) -> tuple[float, dict[str, float]]:
    """Return the means over the steps without the fastest and the slowest quarter."""
    ordered = sorted(steps, key=lambda step: step[0])
    cut = len(ordered) // 4
    kept = ordered[cut : len(ordered) - cut]
    names = {name for _, parts in kept for name in parts}
    means = {name: sum(parts.get(name, 0.0) for _, parts in kept) / len(kept) for name in names}
    return sum(seconds for seconds, _ in kept) / len(kept), means


def measure(bench: Bench, steps: Iterator[None], limits: Limits, chunks: list[tuple[int, int]]) -> Case:
    """Measure every other step with timers. steps: before each element, the next step is ready to run. chunks: what
    such a step computes, as in `step_work`."""
    found: dict[bool, list[tuple[float, dict[str, float]]]] = {True: [], False: []}
    for number, _ in enumerate(steps):
        timed = number % 2 == 1
        bench.watch.seconds.clear()
        seconds, _ = bench.step(timed)
        found[timed].append((seconds, dict(bench.watch.seconds)))
    plain, _ = middle_half(found[False])
    timed_seconds, parts = middle_half(found[True])
    work = step_work(bench.spec, chunks, bench.spec.int8 is not None)
    weights = work.weight_bytes / limits.bandwidth / 1e9
    return Case(plain, timed_seconds, parts, weights, work.least_seconds(limits), work.num_bytes, work.operations)


def decode(bench: Bench, streams: int, count: int, limits: Limits) -> Case:
    bench.submit(streams, CONTEXT - count // 2, count + 2 * WARM_STEPS + streams)
    begun: set[int] = set()
    with mock.patch.object(bench.engine._budget, "next", lambda *_: FILL):  # all begin before the first one ends
        while len(begun) < streams:
            begun |= {output.id for output in bench.step(False)[1].outputs if output.token_ids}
    for _ in range(WARM_STEPS):
        bench.step(False)
    case = measure(bench, iter([None] * count), limits, [(1, CONTEXT)] * streams)
    bench.drain()
    return case


def prefill(bench: Bench, limits: Limits) -> Case:
    """Measure steps of one chunk, the whole prompt; this overrides the engine's token budget."""

    def prompts() -> Iterator[None]:
        for _ in range(2 * PREFILLS):
            bench.submit(1, CHUNK, 1)
            yield

    with mock.patch.object(bench.engine._budget, "next", lambda *_: CHUNK):
        for _ in range(2):
            bench.submit(1, CHUNK, 1)
            bench.step(False)
        return measure(bench, prompts(), limits, [(CHUNK, CHUNK)])


def table(cases: Mapping[str, Case]) -> list[str]:
    """Format the table: ms and share of a step for every part, then the step and its lower bound."""
    names = [*ORDER, *sorted({name for case in cases.values() for name in case.parts}.difference(ORDER))]
    rows = [["ms (share of the step)", *cases]]
    for name in names:
        cells = [case.parts.get(name, 0.0) for case in cases.values()]
        rows.append([name, *(_share(cell, case.timed) for cell, case in zip(cells, cases.values(), strict=True))])
    rest = [case.timed - sum(case.parts.values()) for case in cases.values()]
    rows.append(["other", *(_share(cell, case.timed) for cell, case in zip(rest, cases.values(), strict=True))])
    rows.append(["step, with timers", *(f"{1e3 * case.timed:.2f}" for case in cases.values())])
    rows.append(["step", *(f"{1e3 * case.plain:.2f}" for case in cases.values())])
    rows.append(["weights read once", *(f"{1e3 * case.weights:.2f}" for case in cases.values())])
    rows.append(["step / weights read", *(f"{case.plain / case.weights:.2f}" for case in cases.values())])
    rows.append(["MB, GFLOP", *(f"{case.num_bytes / 1e6:.0f}, {case.operations / 1e9:.1f}" for case in cases.values())])
    rows.append(["roofline", *(_share(case.least, case.plain) for case in cases.values())])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        lines.append(name.ljust(widths[0]) + "".join(f"  {c:>{w}}" for c, w in zip(cells, widths[1:], strict=True)))
    return lines


def _share(seconds: float, step: float) -> str:
    return f"{1e3 * seconds:.2f} ({seconds / step:4.0%})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a checkpoint (default: the shape of Qwen2 0.5B)")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--steps", type=int, default=24, help="steps per number of streams, half of them with timers")
    parser.add_argument("--quantization", choices=("int8", "int4"))
    given = parser.parse_args()
    options = {"quantization": given.quantization} if given.quantization else {}
    limits = measure_limits()
    with Bench(given.model or model_folder(), **options) as bench:
        cases = {f"decode, {streams}": decode(bench, streams, given.steps, limits) for streams in given.streams}
        cases[f"prefill of {CHUNK}"] = prefill(bench, limits)
    print(f"memory {limits.bandwidth:.0f} GB/s, bf16 matrix product {limits.peak:.0f} GFLOP/s; contexts of {CONTEXT}\n")
    print("\n".join(table(cases)))
    for path in bench.missing:
        print(f"there is no {path} to put a timer around: its time is in `other`")
    found = {name: dataclasses.asdict(case) for name, case in cases.items()}
    print(json.dumps(dataclasses.asdict(limits) | {"seconds": found}))


if __name__ == "__main__":
    main()
