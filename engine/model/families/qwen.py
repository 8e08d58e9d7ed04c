"""Qwen 1 (QWenLMHeadModel): Llama with biases on q, k and v, joint qkv weights, and GPT-2's names.

Beyond seq_length, the published code changes rope's base with the length of the prompt (use_dynamic_ntk) and scales
queries (use_logn_attn). This server limits the context to seq_length.
"""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import QKV, Names, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE, check_rotary_dim
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    "ln_1": "attention_norm",
    "attn.c_attn": QKV,
    "attn.c_proj": "attention.output",
    "ln_2": "ffn_norm",
    "mlp.w1": "ffn.up",
    "mlp.w2": "ffn.gate",
    "mlp.c_proj": "ffn.down",
}
OUTSIDE = Names("transformer.", "transformer.h", "transformer.wte", "transformer.ln_f")


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are those of the published code (QWenConfig)."""
    config.set_defaults(
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=22016,
        num_hidden_layers=32,
        num_attention_heads=32,
        kv_channels=128,
    )
    heads = config.integer("num_attention_heads")
    head_dim = config.integer("kv_channels")
    if heads * head_dim != config.integer("hidden_size"):
        raise ModelError(
            f"config.json: hidden_size must be num_attention_heads {heads} times kv_channels {head_dim}, but it is "
            f"{config.integer('hidden_size')}"
        )
    both, rest = divmod(config.integer("intermediate_size"), 2)  # outputs of w1 and w2 together
    if rest:
        raise ModelError(f"config.json: intermediate_size must be even, but it is {2 * both + rest}")
    bias = not config.flag("no_bias", True)
    rotary = check_rotary_dim(int(head_dim * config.number("rotary_pct", 1.0)), head_dim)
    max_position = config.integer("max_position_embeddings", 8192)
    seq_length = config.integer("seq_length")
    changes = [config.flag(key, True) for key in ("use_dynamic_ntk", "use_logn_attn")]
    context = min(max_position, seq_length) if any(changes) else max_position
    spec = read_decoder(
        config,
        "QWenLMHeadModel",
        default_kv_heads=None,
        default_max_position=max_position,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=NormSpec("rms", config.number("layer_norm_epsilon", 1e-6)),
        ffn=MLPSpec(both, "silu", gated=True, bias=bias),
        qkv_bias=True,
        output_bias=bias,
        rope=(RopeSpec(config.number("rotary_emb_base", DEFAULT_BASE), rotary_dim=rotary), context),
    )
    config.only("scale_attn_weights", True, None)
    config.ignore("bf16", "fp16", "fp32", "onnx_safe", "use_flash_attn", "softmax_in_fp32")  # how it is computed
    config.ignore("use_cache_quantization", "use_cache_kernel")
    config.done()
    return spec, weights(spec, NAMES, OUTSIDE)
