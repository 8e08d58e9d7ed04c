"""The shapes that the GPU check measures, their steps, and lower bounds for the times of the steps. Shared by the parts
of the check and the predictions in docs/gpu.md, so that both count the same bytes and operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.model import SHAPE
from bench.roofline import Limits, Work, step_work
from serve_llm.engine.config import INT4_GROUP_SIZES
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec

H200 = Limits(bandwidth=4300.0, peak=790_000.0)  # GB/s of a copy, GFLOP/s of a bf16 product, as predictions assume
FP8_RATE = 2  # relative to bf16
Chunks = Sequence[tuple[int, int]]  # new tokens and context of each sequence, as in `step_work`

TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 4500,
}


@dataclass(frozen=True)
class Shape:
    """A model without weights. tiny: changes to config.json for a rehearsal."""

    name: str
    config: dict[str, Any]
    tiny: dict[str, Any] = field(default_factory=lambda: TINY)

    def spec(self, quantization: str | None = None) -> ModelSpec:
        found, _ = read_model(dict(self.config))
        if quantization == "fp8":
            return found.with_fp8()
        return found.with_int4(INT4_GROUP_SIZES[quantization]) if quantization in INT4_GROUP_SIZES else found


_LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_QWEN3_30B_A3B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_DEEPSEEK_V2_LITE = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "dtype": "bfloat16",
}
_TINY_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TINY_LATENT = {"kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
LLAMA_8B = Shape("8b", _LLAMA_8B)
_BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
_BLOCKS["modules_to_not_convert"] = ["lm_head"]
LLAMA_8B_BLOCKS = Shape("8b-blocks", _LLAMA_8B | {"quantization_config": _BLOCKS})
LLAMA_8B_LONG = Shape("8b-long", _LLAMA_8B | {"max_position_embeddings": 131072})
QWEN_HALF_B = Shape("half-b", SHAPE | {"max_position_embeddings": 16384})
EXPERTS_30B = Shape("experts", _QWEN3_30B_A3B, TINY | _TINY_EXPERTS | {"num_experts": 4, "head_dim": 16})
LATENT_16B = Shape("latent", _DEEPSEEK_V2_LITE, TINY | _TINY_EXPERTS | _TINY_LATENT | {"n_routed_experts": 4})

CONTEXT = 1024  # context of decodes
LONG_CONTEXT = 65536
PROMPT = 8192
ARRIVING = 200  # prompt tokens added to each step
BEHIND = 100  # new tokens after a long prefix


def decode_steps(batch: int) -> int:
    """Return how many steps are timed."""
    return 200 if batch == 1 else 100


def decodes(batch: int, context: int = CONTEXT, steps: int | None = None) -> list[tuple[int, int]]:
    """Return the middle one of this many decode steps."""
    steps = decode_steps(batch) if steps is None else steps
    return [(1, context + steps // 2)] * batch


def uneven(batch: int = 64, context: int = CONTEXT, longest: int = LONG_CONTEXT) -> list[int]:
    """Return contexts, one of which is much longer."""
    return [context] * (batch - 1) + [longest]


def even(contexts: Sequence[int]) -> list[int]:
    """Return as many contexts of equal length, with the same total."""
    return [sum(contexts) // len(contexts)] * len(contexts)


def arrivals(batch: int = 64, context: int = CONTEXT, arriving: int = ARRIVING) -> list[tuple[int, int]]:
    return [(1, context)] * batch + [(arriving, arriving)]


def floor_seconds(spec: ModelSpec, chunks: Chunks, limits: Limits = H200) -> float:
    """Return the lower bound for the time of one step: see `bench.roofline`. fp8 products run at up to twice the
    rate."""
    parts = step_work(spec, chunks).parts
    if spec.fp8 or (spec.grouped is not None and spec.grouped.rounds_inputs):
        read, done = parts["linear"]
        parts = parts | {"linear": (read, done / FP8_RATE)}
    return Work(parts).least_seconds(limits)


def products_seconds(spec: ModelSpec, tokens: int, limits: Limits = H200) -> float:
    """Return the seconds for the arithmetic of linear layers for this many tokens."""
    return step_work(spec, [(tokens, tokens)]).parts["linear"][1] / limits.peak / 1e9
