"""Compare `--model-impl transformers` with a family file: the same prompts offline through both, in turns.

Run on a quiet machine: PYTHONPATH=tests python -m bench.transformers_impl [--turns 3]

The model has the shape of Qwen2 0.5B; prompts have 256 tokens, outputs 128; one stream and 16. Prints output tokens per
second and their ratios, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace

from bench.model import model_folder
from bench.throughput import KV_CACHE, offline_speed
from bench.workloads import WARM, WORKLOADS
from serve_llm import LLM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    options = {"kv_cache_memory": KV_CACHE, "log_level": "warning", "max_num_seqs": 16}
    found = {}
    with (
        LLM(str(model_folder()), **options) as ours,
        LLM(str(model_folder()), model_impl="transformers", **options) as theirs,
    ):
        for llm in (ours, theirs):
            offline_speed(llm, WARM, 0)
        for streams in (1, 16):
            workload = replace(WORKLOADS["W2"], streams=streams, requests=streams)
            turns = [[offline_speed(llm, workload, turn) for llm in (ours, theirs)] for turn in range(given.turns)]
            own, slow = (statistics.median(speeds) for speeds in zip(*turns, strict=True))
            ratios = [after / before for before, after in turns]
            found[streams] = {"ours": own, "transformers": slow, "ratios": ratios}
            spread = f"{min(ratios):.2f}-{max(ratios):.2f}"
            middle = statistics.median(ratios)
            print(f"{streams} streams: {own:.1f} and {slow:.1f} tokens/s, ratio {middle:.2f} ({spread})")
    print(json.dumps(found))


if __name__ == "__main__":
    main()
