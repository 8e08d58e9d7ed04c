"""Measure the overhead of HTTP and the front end: the same prompts offline (`LLM`) and through the daemon; idle memory.

Run on a quiet machine: PYTHONPATH=tests python -m bench.throughput [--turns 2] [--workload W2]

Both engines run the shape of Qwen2 0.5B, hold as many sequences as the workload has streams, and take turns; the daemon
is suspended during `LLM`'s turns. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import time
from pathlib import Path

from bench import load
from bench.model import IDS, model_folder
from bench.roofline import measure_limits, tokens_per_second
from bench.servers import named, running
from bench.workloads import WARM, WORKLOADS, Workload
from serve_llm import LLM, SamplingParams
from serve_llm.common.hub import read_config
from serve_llm.engine.model.registry import read_model

KV_CACHE = "512MiB"


def offline_speed(llm: LLM, workload: Workload, turn: int) -> float:
    """Return output tokens per second."""
    params = SamplingParams(temperature=0, max_tokens=workload.output_tokens, ignore_eos=True)
    prompts = workload.prompts(turn, IDS)
    began = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    return sum(len(output.outputs[0].token_ids) for output in outputs) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=2)
    parser.add_argument("--workload", choices=sorted(WORKLOADS), default="W2")
    parser.add_argument("--model", help="a checkpoint (default: the shape of Qwen2 0.5B)")
    given = parser.parse_args()
    workload = WORKLOADS[given.workload]
    model = given.model or str(model_folder())
    recipe = named("serve-llm", model)
    limits = ("--max-num-seqs", str(workload.streams), "--kv-cache-memory", KV_CACHE)
    recipe = dataclasses.replace(recipe, command=(*recipe.command, *limits))
    most = tokens_per_second(read_model(read_config(Path(model)))[0], workload, measure_limits())
    http, offline = [], []
    with running(recipe) as server:
        resident, idle = server.resident_bytes(), server.idle_cores()
        load.run(server.url, WARM, 0, IDS)
        server.pause()
        with LLM(model, max_num_seqs=workload.streams, kv_cache_memory=KV_CACHE, log_level="warning") as llm:
            offline_speed(llm, WARM, 0)
            for turn in range(given.turns):
                offline.append(offline_speed(llm, workload, turn))
                server.resume()
                result = load.run(server.url, workload, turn, IDS)
                server.pause()
                if result.errors or result.short:
                    raise SystemExit(f"{result.errors} errors: {result.first_error}, {result.short} too short")
                http.append(result.tokens_per_second)
    shares = [a / b for a, b in zip(http, offline, strict=True)]
    weights = sum(path.stat().st_size for path in Path(model).glob("*.safetensors"))
    found = {
        "offline_tokens_per_second": statistics.median(offline),
        "http_tokens_per_second": statistics.median(http),
        "http_to_offline": statistics.median(shares),
        "roofline_tokens_per_second": most,
        "resident_mb": resident / 1e6,
        "resident_to_weights": resident / weights if weights else None,
        "idle_cores": idle,
    }
    print(f"{workload.name} offline {found['offline_tokens_per_second']:.1f} output tokens/s")
    print(f"{workload.name} by HTTP {found['http_tokens_per_second']:.1f} output tokens/s")
    print(
        f"memory and arithmetic allow {most:.1f} output tokens/s: HTTP has {statistics.median(http) / most:.2f} of it"
    )
    print(f"HTTP / offline {found['http_to_offline']:.3f} ({min(shares):.3f}-{max(shares):.3f})")
    print(f"idle: {resident / 1e6:.0f} MB resident beside {weights / 1e6:.0f} MB of weights, {idle:.3f} cores")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
