"""transformers' own generation with continuous batching on the same card, compared with ours on the same requests."""

from __future__ import annotations

import random
import time

import torch
from floors import LLAMA_8B
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from parts import common
from serve_llm import LLM, SamplingParams


def main() -> None:
    here = common.place("peer")
    folder = here.folder(LLAMA_8B)
    count, prompt_tokens, output = here.sized(64, 2), here.sized(256, 16), here.sized(128, 4)
    rng = random.Random(1)
    others, prompts = (
        [[rng.randrange(300, 4000) for _ in range(prompt_tokens)] for _ in range(count)] for _ in range(2)
    )
    params = SamplingParams(temperature=0, max_tokens=output, ignore_eos=True)
    with LLM(folder, max_num_seqs=count, gpu_memory_utilization=0.4, **here.options()) as llm:
        llm.generate(others, params, use_tqdm=False)  # compiles and captures what the following requests use
        began = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        ours = count * output / (time.perf_counter() - began)
    here.report.measured(f"ours, {count} requests of {prompt_tokens} in, {output} out", ours, "tokens/s")
    if here.rehearse:
        here.report.not_run("transformers, generate_batch", "it is made for GPUs")
        return
    config = AutoConfig.from_pretrained(folder)
    with torch.device(here.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
    chosen = GenerationConfig(max_new_tokens=output, do_sample=False, eos_token_id=-1, pad_token_id=0)
    how = {"generation_config": chosen, "progress_bar": False, "persistent_manager": True}  # keeps captured graphs
    model.generate_batch(inputs=others, **how)
    began = time.perf_counter()
    found = model.generate_batch(inputs=prompts, **how)
    tokens = sum(len(result.generated_tokens) for result in found.values())
    theirs = tokens / (time.perf_counter() - began)
    here.report.measured("transformers, generate_batch", theirs, "tokens/s")
    here.report.measured("ours over transformers", ours / theirs)


if __name__ == "__main__":
    main()
