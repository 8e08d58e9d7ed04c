"""The engine's speed in real shapes with random weights, offline, compared with the lower bound by bytes and operations
of each step: see `floors`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence

from floors import CONTEXT, LLAMA_8B, PROMPT, QWEN_HALF_B, Shape, decode_steps, decodes

from bench.roofline import Limits
from parts import common
from serve_llm import LLM, SamplingParams
from serve_llm.engine.model.spec import ModelSpec


def generate(llm: LLM, count: int, prompt_tokens: int, output_tokens: int, seed: int) -> float:
    """Return the seconds for this many concurrent requests. Prompts of another seed are in no cache."""
    rng = random.Random(seed)
    prompts = [[rng.randrange(300, 4000) for _ in range(prompt_tokens)] for _ in range(count)]
    params = SamplingParams(temperature=0, max_tokens=output_tokens, ignore_eos=True)
    began = time.perf_counter()
    llm.generate(prompts, params, use_tqdm=False)
    return time.perf_counter() - began


def decode_rate(llm: LLM, batch: int, context: int, steps: int) -> float:
    """Return the tokens per second of each sequence while all are decoding.

    This is the difference of a long and a short run with the same prompts, which are cached by then: computing them
    would hide the measured time.
    """
    generate(llm, batch, context, 8, seed=batch)  # compiles and captures what the following runs use
    short = generate(llm, batch, context, 8, seed=batch)
    return steps / (generate(llm, batch, context, 8 + steps, seed=batch) - short)


def prompt_seconds(llm: LLM, tokens: int) -> float:
    """Return the seconds from a prompt with this many tokens to its first new one: the minimum of three."""
    generate(llm, 1, tokens, 1, seed=1)
    return min(generate(llm, 1, tokens, 1, seed=seed) for seed in (2, 3, 4))


def decoding(
    here: common.Place, name: str, llm: LLM, spec: ModelSpec, found: Limits, batches: Sequence[int] = (1, 64, 256)
) -> None:
    context = here.sized(CONTEXT, 64)
    for full in batches:
        batch = here.sized(full, full % 61)  # 1, 3, 12
        steps = here.sized(decode_steps(full), 8)
        took = 1 / decode_rate(llm, batch, context, steps)
        chunks = decodes(batch, context, steps)
        common.tell_step(here, f"{name}: decode, batch {batch}", took, spec, chunks, found, aim=0.7)


def prefill(here: common.Place, name: str, llm: LLM, spec: ModelSpec, found: Limits, tokens: int = PROMPT) -> None:
    tokens = here.sized(tokens, 128)
    took = prompt_seconds(llm, tokens)
    common.tell_step(here, f"{name}: prompt of {tokens}", took, spec, [(tokens, tokens)], found, aim=0.6)


def measure_shape(here: common.Place, name: str, shape: Shape, quantization: str | None = None) -> None:
    """Measure decoding and a prompt of one shape."""
    found, spec = common.limits(here.rehearse), shape.spec(quantization)
    options = here.options() | ({"quantization": quantization} if quantization else {})
    with LLM(here.folder(shape), max_num_seqs=here.sized(64, 4), **options) as llm:
        decoding(here, name, llm, spec, found, (1, 64))
        prefill(here, name, llm, spec, found)


def main() -> None:
    here = common.place("speed")
    found = common.limits(here.rehearse)
    with LLM(here.folder(LLAMA_8B), max_num_seqs=here.sized(256, 8), **here.options()) as llm:
        decoding(here, "8B", llm, LLAMA_8B.spec(), found)
        prefill(here, "8B", llm, LLAMA_8B.spec(), found)
    with LLM(here.folder(QWEN_HALF_B), max_num_seqs=8, **here.options()) as llm:
        decoding(here, "0.5B", llm, QWEN_HALF_B.spec(), found, (1,))


if __name__ == "__main__":
    main()
