"""Measure the gain from moving experts: tokens per second of two engines that share experts with uneven load.

Run on a quiet machine with two cores: PYTHONPATH=tests python -m bench.eplb [--turns 3] [--redundant 8] [--skew 1.0]

The model has random weights and 6 layers with 32 experts, of which each token uses 4. The router's outputs are
multiplied by factors whose logarithms have the standard deviation `--skew`, so that some experts are chosen much more
often; the first engine has the largest factors. Three servers without HTTP take turns: experts that stay, experts that
move, and experts that move with redundant copies. Each generates the same texts once to warm up and to move experts,
then once for the measurement. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from serve_llm import LLM, SamplingParams
from support.tiny import make_served_checkpoint

SIZES = {
    "hidden_size": 512,
    "intermediate_size": 512,
    "moe_intermediate_size": 512,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
OPTIONS = {
    "device": "cpu",
    "dtype": "bfloat16",
    "cpu_threads": 1,
    "kv_cache_memory": "256MiB",
    "data_parallel_size": 2,
    "enable_expert_parallel": True,
}
NUM_TEXTS = 32
NUM_TOKENS = 128


def make_model(directory: Path, skew: float) -> None:
    """Write the model. skew: standard deviation of the log of the experts' factors; the first engine gets the
    largest."""
    make_served_checkpoint(directory, "qwen3_moe", dtype="bfloat16", std=0.05, **SIZES)
    path = directory / "model.safetensors"
    weights = load_file(path)
    factors = torch.randn(SIZES["num_experts"], generator=torch.Generator().manual_seed(1)).mul(skew).exp()
    for name in [name for name in weights if name.endswith("mlp.gate.weight")]:
        router = weights[name].float() * factors.sort(descending=True).values[:, None]
        weights[name] = router.to(weights[name].dtype)
    save_file(weights, path, {"format": "pt"})


def measure(model: Path, options: dict[str, object]) -> float:
    """Return output tokens per second once experts have moved."""
    prompts = [[2 + (37 * text + place) % 4000 for place in range(16)] for text in range(NUM_TEXTS)]
    sampling = SamplingParams(max_tokens=NUM_TOKENS, temperature=1.0, seed=1, ignore_eos=True)
    with LLM(str(model), **OPTIONS, **options) as llm:
        llm.generate(prompts, sampling, use_tqdm=False)
        began = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return NUM_TEXTS * NUM_TOKENS / (time.perf_counter() - began)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--redundant", type=int, default=8)
    parser.add_argument("--skew", type=float, default=1.0)
    given = parser.parse_args()
    config = {"step_interval": 30}
    ways: dict[str, dict[str, object]] = {
        "experts stay": {},
        "experts move": {"enable_eplb": True, "eplb_config": config},
        f"and {given.redundant} copies": {
            "enable_eplb": True,
            "eplb_config": config | {"num_redundant_experts": given.redundant},
        },
    }
    found: dict[str, list[float]] = {name: [] for name in ways}
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        make_model(model, given.skew)
        for _ in range(given.turns):
            for name, options in ways.items():
                found[name].append(measure(model, options))
    first = statistics.median(found["experts stay"])
    for name, values in found.items():
        ratio = statistics.median(values) / first
        print(f"{name:16} {statistics.median(values):7.1f} tokens/s ({min(values):.1f}-{max(values):.1f}), {ratio:.2f}")
    print(json.dumps({"skew": given.skew, "redundant": given.redundant, "tokens_per_second": found}))


if __name__ == "__main__":
    main()
