"""Compare tokens per second with LoRA adapters and with the base model, by engines that take turns in one process.

Run on a quiet machine, in about 10 minutes: PYTHONPATH=tests python -m bench.lora [--rank 16] [--turns 9] [--demo]
With --waits, only measure how long requests wait for the first token if most adapters are not loaded.

16 requests decode together: without `--enable-lora`, and in an engine with it, using the base model, one adapter, 4
adapters and 16. Adapters change all linear layers. The model has the shape of Qwen2 0.5B and random weights; --demo
uses the demo model, whose steps are short. Also measures the time to load an adapter into a slot, during which all
requests wait. Prints a table, then one JSON line. `ratio` is the median over turns of the tokens per second relative to
those without `--enable-lora`, `cpu` the same for processor time, `aim` the target ratio.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.model import model_folder
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.startup import find_served_targets
from support.adapter_files import write_adapter
from support.adapters import make_adapter
from support.engine import make_engine
from support.resolved import resolve_all

ROWS = 16
PROMPT_LENGTH = 64
AIM = 0.90  # with 4 adapters
NUM_REGISTERED = 200
NUM_RESIDENT = 8
WAITING = 4  # concurrent requests, fewer than slots
NUM_ADAPTERS = {"base rows": 0, "1 adapter": 1, "4 adapters": 4, "16 adapters": 16}


def make_requests(adapters: Sequence[Adapter], turn: int, tokens: int) -> list[EngineCoreRequest]:
    """Return requests that use the adapters in turn."""
    generator = torch.Generator().manual_seed(turn)
    requests = []
    for number in range(ROWS):
        ids = torch.randint(300, 4000, (PROMPT_LENGTH,), generator=generator).tolist()
        sampling = Sampling(max_tokens=tokens, seed=number, temperature=1.0)
        adapter = adapters[number % len(adapters)] if adapters else None
        requests.append(EngineCoreRequest(id=number, prompt_ids=ids, sampling=sampling, adapter=adapter))
    return requests


def run_turn(engine: EngineCore, requests: Sequence[EngineCoreRequest]) -> tuple[float, float]:
    """Return wall-clock and processor seconds per token of all requests. Excludes prompts and loading."""
    engine.add_requests(requests)
    counts = dict.fromkeys((request.id for request in requests), 0)
    began = cpu_began = 0.0
    num_before = 0
    while engine.has_work:
        for output in engine.step().outputs:
            counts[output.id] += len(output.token_ids)
        if not began and all(counts.values()):
            num_before = sum(counts.values())
            began, cpu_began = time.perf_counter(), time.process_time()
    num_tokens = sum(counts.values()) - num_before
    return (time.perf_counter() - began) / num_tokens, (time.process_time() - cpu_began) / num_tokens


def measure_loads(engine: EngineCore, adapters: Sequence[Adapter]) -> float:
    """Return by how many seconds (median) a step is longer when it loads an adapter."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for number, adapter in enumerate(adapters):
        for is_loaded in (False, True):
            sampling = Sampling(max_tokens=1, seed=0)
            engine.add_requests([EngineCoreRequest(id=number, prompt_ids=[500], sampling=sampling, adapter=adapter)])
            began = time.perf_counter()
            while engine.has_work:
                engine.step()
            seconds[is_loaded].append(time.perf_counter() - began)
    return statistics.median(seconds[False]) - statistics.median(seconds[True])


def write_adapters(folder: Path, directory: Path, rank: int, count: int) -> list[Adapter]:
    """Write adapters of all linear layers to files."""
    options = make_options(str(folder), enable_lora=True)
    config, spec, weights = resolve_all(options, str(folder), read_config(folder))
    targets = find_served_targets(config, spec, weights).values()
    layers = {target.module: (target.outputs, target.inputs) for target in targets if target.kind == "linear"}
    return [write_adapter(directory / f"waits{number}", layers, rank, number) for number in range(count)]


def measure_waits(engine: EngineCore, adapters: Sequence[Adapter]) -> list[float]:
    """Measure the seconds from each request to its first token, ascending: one request per adapter, WAITING at a time.

    Each finished request is followed by the next at once. Lengths differ, so that few requests finish together.
    """
    waits = {}
    asked = {}
    remaining = deque(enumerate(adapters))

    def ask_next() -> None:
        number, adapter = remaining.popleft()
        sampling = Sampling(max_tokens=5 + number % 7, seed=0)
        request = EngineCoreRequest(id=number, prompt_ids=[500 + number] * 8, sampling=sampling, adapter=adapter)
        asked[number] = time.perf_counter()
        engine.add_requests([request])

    for _ in range(WAITING):
        ask_next()
    while engine.has_work:
        for output in engine.step().outputs:
            if output.token_ids and output.id not in waits:
                waits[output.id] = time.perf_counter() - asked[output.id]
            if output.finish_reason is not None and remaining:
                ask_next()
    return sorted(waits.values())


def report_waits(folder: Path, rank: int) -> None:
    """Print the waits when each request loads its adapter and when adapters are in memory, and the time of one load."""
    options: dict[str, object] = {"max_model_len": 512, "kv_cache_memory": "256MiB", "max_lora_rank": rank}
    with tempfile.TemporaryDirectory() as directory:
        adapters = write_adapters(folder, Path(directory), rank, NUM_REGISTERED)
        engine = make_engine(folder, enable_lora=True, max_loras=NUM_RESIDENT, **options)
        load_seconds = measure_loads(engine, adapters)
        measure_waits(engine, adapters[:NUM_RESIDENT])
        resident = measure_waits(engine, adapters[:NUM_RESIDENT] * (NUM_REGISTERED // NUM_RESIDENT))
        loaded = measure_waits(engine, adapters)
    results = {"load_seconds": load_seconds}
    for name, waits in (("resident", resident), ("loaded", loaded)):
        results[f"{name}_median"] = statistics.median(waits)
        results[f"{name}_p95"] = waits[int(0.95 * len(waits))]
        results[f"{name}_most"] = waits[-1]
    print(f"{NUM_REGISTERED} adapters of rank {rank}, {NUM_RESIDENT} resident, {WAITING} requests at a time")
    print(f"one load {1000 * load_seconds:.1f} ms; first token, ms: median, p95, most")
    for name in ("resident", "loaded"):
        figures = [1000 * results[f"{name}_{figure}"] for figure in ("median", "p95", "most")]
        print(f"{name:10}" + "".join(f"{figure:9.1f}" for figure in figures))
    print(json.dumps(results))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="output tokens per request")
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--demo", action="store_true", help="use the demo model")
    parser.add_argument("--waits", action="store_true", help="only measure how long requests wait for adapters")
    given = parser.parse_args()
    folder = Path(resolve_model("demo")) if given.demo else model_folder()
    if given.waits:
        report_waits(folder, given.rank)
        return
    with tempfile.TemporaryDirectory() as directory:
        adapters = [
            make_adapter(folder, Path(directory) / str(number), seed=number, scale=0.01, r=given.rank)
            for number in range(max(NUM_ADAPTERS.values()))
        ]
        options: dict[str, object] = {"max_model_len": 512, "kv_cache_memory": "256MiB"}
        plain = make_engine(folder, **options)
        engine = make_engine(folder, enable_lora=True, max_loras=len(adapters), max_lora_rank=given.rank, **options)
        load_seconds = measure_loads(engine, adapters)
        results: dict[str, dict[str, float]] = {}
        for name, count in NUM_ADAPTERS.items():
            ratios = []
            cpu_ratios = []
            speeds = []
            for turn in range(given.turns + 1):  # the first turn is not counted
                found = {}
                for is_plain in (True, False) if turn % 2 else (False, True):
                    own = [] if is_plain else adapters[:count]
                    requests = make_requests(own, turn, given.tokens)
                    found[is_plain] = run_turn(plain if is_plain else engine, requests)
                if turn:
                    ratios.append(found[True][0] / found[False][0])
                    cpu_ratios.append(found[True][1] / found[False][1])
                    speeds.append(1 / found[True][0])
            results[name] = {
                "tokens_per_second_without": statistics.median(speeds),
                "ratio": statistics.median(ratios),
                "least_ratio": min(ratios),
                "cpu_ratio": statistics.median(cpu_ratios),
            }
    results["4 adapters"]["aim"] = AIM
    print(f"{ROWS} rows, rank {given.rank}; loading an adapter takes {load_seconds:.3f} s")
    print(f"{'':14}{'without, tokens/s':>19}{'ratio':>8}{'least':>8}{'cpu':>8}{'aim':>8}")
    for name, row in results.items():
        aim = f"{row['aim']:8.2f}" if "aim" in row else ""
        ratio = f"{row['ratio']:8.2f}{row['least_ratio']:8.2f}{row['cpu_ratio']:8.2f}"
        print(f"{name:14}{row['tokens_per_second_without']:19.1f}{ratio}{aim}")
    print(json.dumps({"load_seconds": load_seconds, **results}))


if __name__ == "__main__":
    main()
