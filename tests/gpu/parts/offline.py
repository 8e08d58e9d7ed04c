"""Output tokens per second offline, in the shape of Llama 8B with random weights, with as many requests as fit."""

from __future__ import annotations

from floors import LLAMA_8B

from parts import common
from parts.speed import generate
from serve_llm import LLM

TENSORRT_FP8 = 17744  # output tokens/s published by TensorRT-LLM for this shape in FP8, 1000 in and 1000 out


def main() -> None:
    here = common.place("offline")
    length = here.sized(1000, 16)
    with LLM(here.folder(LLAMA_8B), max_num_seqs=here.sized(1024, 8), **here.options()) as llm:
        fit = llm._replicas.model_info.kv_cache_tokens // (2 * length)
        count = min(fit, here.sized(1024, 4))
        rate = count * length / generate(llm, count, length, length, seed=5)
    here.report.measured("8B: offline, 1000 in and out", rate, f"tokens/s, {count} requests of {length}")
    here.report.measured("8B: offline, over TensorRT-LLM's published figure in FP8", rate / TENSORRT_FP8)


if __name__ == "__main__":
    main()
