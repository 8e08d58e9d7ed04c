"""Measure the accuracy cost of quantised layers and KV caches: held-out bits per byte of the demo model, and logits of
random models.

Bits per byte are measured as in `tools/train_demo.py --evaluate`, on the same windows of the same held-out files, but
with this engine's decoder: in bf16, with each --quantization that a CPU supports, and with an int8 KV cache. Random
models are generated from a seed (`--load-format dummy`); their logits are compared with float32: the size of the
difference relative to the spread of the logits, and how often the most likely token is the same.

Run: PYTHONPATH=tests:tools python -m bench.accuracy [--files 35]. Prints two tables, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import demo_data
import demo_eval
import torch
from tokenizers import Tokenizer
from torch import Tensor

from serve_llm.common.hub import resolve_model
from serve_llm.engine.config import INT4_GROUP_SIZES
from serve_llm.engine.model.decoder import Decoder
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec
from support import published
from support.forward import Harness, load_whole, read_spec

WAYS = {  # dtype, --quantization (or "head" for the LM head and a tied embedding alone), dtype of the KV cache
    "float32": (torch.float32, "none", torch.float32),
    "bf16": (torch.bfloat16, "none", torch.bfloat16),
    "int8 head": (torch.bfloat16, "head", torch.bfloat16),
    "int8": (torch.bfloat16, "int8", torch.bfloat16),
    "fp8": (torch.bfloat16, "fp8", torch.bfloat16),  # weights alone, as on a CPU
    "int4-g32": (torch.bfloat16, "int4-g32", torch.bfloat16),
    "int4": (torch.bfloat16, "int4", torch.bfloat16),
    "int4-g128": (torch.bfloat16, "int4-g128", torch.bfloat16),
    "int8 KV cache": (torch.bfloat16, "none", torch.int8),
}
RANDOM = {"Qwen2.5-0.5B, 8 of 24 layers": ("QWEN2_HALF_B", 8), "Llama-3.2-1B, 4 of 16 layers": ("LLAMA_1B", 4)}
PROMPT_TOKENS = 96


@dataclass(frozen=True)
class Model:
    """Wrap a decoder so that `demo_eval` can call it like a transformers model. Needs either logprobs or logits."""

    spec: ModelSpec
    decoder: Decoder
    cache: torch.dtype

    def __call__(self, input_ids: Tensor) -> SimpleNamespace:
        (rows,) = Harness(self.spec, self.decoder, self.cache).logprobs([input_ids[0].tolist()])
        return SimpleNamespace(logits=rows[None])


def quantise(spec: ModelSpec, quantization: str, dtype: torch.dtype) -> ModelSpec:
    """Return the spec as a CPU serves it."""
    if quantization in INT4_GROUP_SIZES:
        spec = spec.with_int4(INT4_GROUP_SIZES[quantization])
    elif quantization == "int8":
        spec = spec.with_int8()
    elif quantization == "fp8":
        spec = spec.with_fp8_weights()
    elif quantization == "head":
        spec = replace(spec, int8_lm_head=True)
    return spec.with_packed_tables(rounds=dtype == torch.bfloat16)


def bits_per_byte(num_files: int) -> dict[str, float]:
    directory = Path(resolve_model("demo"))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    files = demo_data.read_library()[1][:num_files]
    texts = [file.content.decode("utf-8") for file in files]
    documents = [torch.from_numpy(ids) for ids in demo_data.encode_documents(tokenizer, texts)]
    num_bytes = sum(len(file.content) for file in files)
    found = {}
    spec, weight_map = read_spec(directory)
    for name, (dtype, quantization, cache) in WAYS.items():
        if dtype == torch.float32:
            continue
        chosen = quantise(spec, quantization, dtype)
        model = Model(chosen, load_whole(directory, chosen, weight_map, dtype=dtype), cache)
        found[name] = demo_eval.held_out_bits(model, documents)[0] / num_bytes
        print(f"demo model, {len(files)} held-out files, {name} {found[name]:.5f} bits per byte", flush=True)
    return found


def random_model(name: str, num_layers: int) -> dict[str, tuple[float, float]]:
    """Return the relative error of the logits and the share of equal most likely tokens, per way but float32."""
    spec, weight_map = read_model({**getattr(published, name), "num_hidden_layers": num_layers})
    rng = random.Random(1)
    prompts = [[rng.randrange(spec.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(2)]
    logits: dict[str, Tensor] = {}
    for way, (dtype, quantization, cache) in WAYS.items():
        chosen = quantise(spec, quantization, dtype)
        decoder = load_whole(Path(), chosen, weight_map, dtype=dtype, load_format="dummy", seed=1)
        rows = torch.cat(Harness(chosen, decoder, cache).logprobs(prompts))
        logits[way] = rows - rows.mean(-1, keepdim=True)
    exact = logits.pop("float32")
    return {
        way: (
            float((rows - exact).norm() / exact.norm()),
            float((rows.argmax(-1) == exact.argmax(-1)).float().mean()),
        )
        for way, rows in logits.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=35, help="held-out files that are read (default: all 35)")
    bits = bits_per_byte(parser.parse_args().files)
    for name in bits:
        if name == "bf16":
            continue
        print(f"{name} over bf16: {100 * (bits[name] / bits['bf16'] - 1):+.3f} %")
    errors = {}
    for title, (name, num_layers) in RANDOM.items():
        errors[title] = random_model(name, num_layers)
        for way, (error, same) in errors[title].items():
            print(f"{title:30} {way:13} logits off by {100 * error:5.2f} %, same likeliest token {100 * same:5.1f} %")
    print(json.dumps({"bits_per_byte": bits, "random": errors}))


if __name__ == "__main__":
    main()
