"""The engine's speed in real shapes with random weights, offline: bytes and operations counted first, then measured.

Decoding: tokens per second over what the measured bandwidth allows for the bytes of a step (weights once, cached keys
and values of every sequence once). A prompt: operations per second over the measured rate of a matrix product.
"""

from __future__ import annotations

import random
import time
from pathlib import Path

from bench.roofline import step_work
from parts import common
from serve_llm import LLM, SamplingParams
from serve_llm.engine.hub import read_config
from serve_llm.engine.model.registry import read_model

TENSORRT_FP8 = 17744  # output tokens/s that TensorRT-LLM publishes for this shape in FP8, 1000 in and 1000 out


def generate(llm: LLM, count: int, prompt_tokens: int, output_tokens: int, seed: int) -> float:
    """Seconds for so many requests at a time. Prompts of another seed are in no cache."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(300, 4000) for _ in range(prompt_tokens)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def decode_rate(llm: LLM, batch: int, context: int, steps: int) -> float:
    """Tokens per second of each sequence while all are decoded: a long run less a short one, of the same prompts, which
    are in the cache by then, as their time would hide what is measured."""
    generate(llm, batch, context, 8, seed=batch)  # compiles and captures what the others use
    short = generate(llm, batch, context, 8, seed=batch)
    return steps / (generate(llm, batch, context, 8 + steps, seed=batch) - short)


def prompt_seconds(llm: LLM, tokens: int) -> float:
    """From a prompt of so many tokens to its first new one: the best of three."""
    generate(llm, 1, tokens, 1, seed=1)
    return min(generate(llm, 1, tokens, 1, seed=seed) for seed in (2, 3, 4))


def decoding(here: common.Place, llm: LLM, spec: object, bandwidth: float) -> None:
    context = here.sized(1024, 64)
    for batch in (1, here.sized(64, 2), here.sized(256, 3)):
        steps = here.sized(200 if batch == 1 else 100, 8)
        rate = decode_rate(llm, batch, context, steps)
        work = step_work(spec, [(1, context + steps // 2)] * batch)  # type: ignore[arg-type]
        share = rate * work.num_bytes / bandwidth
        here.report.measured(f"decode, batch {batch}, context {context}", rate * batch, "tokens/s")
        here.report.measured(f"decode, batch {batch}: share of the bandwidth", share, aim=0.85 if batch == 1 else 0.75)


def main() -> None:
    here = common.place("speed")
    bandwidth, peak = common.limits(here.rehearse)
    folder = here.folder(common.LLAMA_8B, "8b")
    spec, _ = read_model(read_config(Path(folder)))
    with LLM(here.folder(common.QWEN_HALF_B, "half-b"), max_num_seqs=8, **here.options()) as llm:
        rate = decode_rate(llm, 1, here.sized(1024, 64), here.sized(200, 8))
        here.report.measured("0.5B: batch 1", 1000 / rate, "ms a token")
    with LLM(folder, max_num_seqs=here.sized(1024, 8), **here.options()) as llm:
        decoding(here, llm, spec, bandwidth)
        tokens = here.sized(8192, 128)
        took = prompt_seconds(llm, tokens)
        work = step_work(spec, [(tokens, tokens)])
        here.report.measured(f"8B: prompt of {tokens} tokens", tokens / took, "tokens/s")
        here.report.measured("8B: prompt, share of the matrix rate", work.operations / took / peak, aim=0.6)
        length = here.sized(1000, 16)
        fit = llm._replicas.facts.kv_cache_tokens // (2 * length)
        count = min(fit, here.sized(1024, 4))
        took = generate(llm, count, length, length, seed=5)
        here.report.measured(
            f"8B: offline, {count} requests of {length} in, {length} out", count * length / took, "tokens/s"
        )
        here.report.measured("8B: beside TensorRT-LLM's published figure in FP8", count * length / took / TENSORRT_FP8)


if __name__ == "__main__":
    main()
