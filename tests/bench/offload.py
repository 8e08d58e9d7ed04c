"""Measure the gain from reading KV blocks back: time to first token in conversations that need four times the cache.

Run: PYTHONPATH=tests python -m bench.offload [--model DIR] [--conversations 8] [--turns 3] [--first 1024] [--more 128].
Prints a table, then one JSON line.

Each turn of a conversation sends everything said before. The conversations take turns, so a cache for a quarter of them
has evicted each one by its next turn. Three engines get the same requests one after the other, so that other work on
the machine disturbs all of them: one recomputes, one has host memory for all conversations, and one has host memory for
a quarter of them and a directory. The first turn, which is new to all engines, is not counted.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from pathlib import Path

from bench.model import IDS, model_folder
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from support.engine import make_engine

BLOCK_SIZE = 16
CACHE_SHARE = 4  # size of all conversations relative to the cache


def first_token_seconds(engine: EngineCore, request: EngineCoreRequest) -> tuple[float, int]:
    """Return the seconds until the first token, and the number of cached prompt tokens."""
    began = time.perf_counter()
    engine.add_requests([request])
    cached = 0
    seconds = 0.0
    while engine.has_work:
        for output in engine.step().outputs:
            if output.token_ids and not seconds:
                seconds = time.perf_counter() - began
                cached = output.cached_tokens or 0
    return seconds, cached


def write_all(engine: EngineCore) -> None:
    """Let the engine write to disk what it would write when idle."""
    manager = engine._offload
    if manager is None or manager.store is None:
        return
    while not manager.store.is_open or manager.num_unwritten:
        engine.write_blocks()
        manager.store.wait(0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--conversations", type=int, default=8)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--first", type=int, default=1024)
    parser.add_argument("--more", type=int, default=128)
    given = parser.parse_args()
    model = given.model or model_folder()
    longest = given.first + given.more * (given.turns - 1)
    max_model_len = longest + BLOCK_SIZE
    sizes = {"max_model_len": max_model_len, "max_num_seqs": 4, "block_size": BLOCK_SIZE}
    block_bytes = make_engine(model, **sizes, load_format="dummy").kv_cache_config.block_bytes
    needed = given.conversations * -(-longest // BLOCK_SIZE) * block_bytes
    sizes["kv_cache_memory"] = max(needed // CACHE_SHARE, -(-max_model_len // BLOCK_SIZE) * block_bytes)
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            "computed again": make_engine(model, **sizes),
            "from host memory": make_engine(model, **sizes, kv_offload_memory=needed),
            "from disk": make_engine(model, **sizes, kv_offload_memory=needed // 4, kv_offload_dir=folder),
        }
        rng = random.Random(0)
        said: list[list[int]] = [[] for _ in range(given.conversations)]
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        cached = dict.fromkeys(engines, 0)
        num_prompt = 0
        number = 0
        for turn in range(given.turns):
            for text in said:
                text += rng.choices(IDS, k=given.more if turn else given.first)
                num_prompt += len(text) if turn else 0
                for name, engine in engines.items():
                    number += 1
                    sampling = Sampling(max_tokens=1, seed=0, temperature=0.0)
                    taken, found = first_token_seconds(
                        engine, EngineCoreRequest(id=number, prompt_ids=list(text), sampling=sampling)
                    )
                    write_all(engine)
                    if turn:
                        seconds[name].append(taken)
                        cached[name] += found
        report(engines, seconds, cached, num_prompt)


def report(
    engines: dict[str, EngineCore], seconds: dict[str, list[float]], cached: dict[str, int], num_prompt: int
) -> None:
    result: dict[str, dict[str, float]] = {}
    slowest = statistics.median(seconds["computed again"])
    print("| | first token, median ms | least to most | times shorter | tokens found | read back, MB |")
    print("|---|---|---|---|---|---|")
    for name, engine in engines.items():
        stats = engine.step().stats
        memory = 0 if stats.offload_memory is None else stats.offload_memory.hit_bytes
        disk = 0 if stats.offload_disk is None else stats.offload_disk.hit_bytes
        median = statistics.median(seconds[name])
        result[name] = {
            "first_token_seconds": median,
            "times_shorter": slowest / median,
            "hit_rate": cached[name] / num_prompt,
            "bytes_from_memory": memory,
            "bytes_from_disk": disk,
        }
        least, most = min(seconds[name]), max(seconds[name])
        print(
            f"| {name} | {1e3 * median:.0f} | {1e3 * least:.0f} to {1e3 * most:.0f} | {slowest / median:.1f} "
            f"| {cached[name] / num_prompt:.0%} | {memory / 1e6:.0f}, of these {disk / 1e6:.0f} from disk |"
        )
    print(json.dumps({"offload": result}))


if __name__ == "__main__":
    main()
