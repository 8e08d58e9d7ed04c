"""StableLM (StableLmForCausalLM): Llama with layer norms, rope in a part of each head, and halves in parallel."""

from __future__ import annotations

from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.llama import ATTENTION, GATED, PRE_NORMS, read_decoder, weights
from serve_llm.engine.model.spec import ModelSpec, Norm
from serve_llm.engine.model.weight_map import WeightMap


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (StableLmConfig)."""
    config.refuse("qk_layernorm")  # a layer norm of every head, with weights of its own
    parallel = config.flag("use_parallel_residual", False)
    spec = read_decoder(
        config,
        "StableLmForCausalLM",
        default_kv_heads=32,
        default_max_position=4096,
        partial_rotary=0.25,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=Norm("layer", config.number("layer_norm_eps", 1e-5)),
        qkv_bias=config.flag("use_qkv_bias", False),
        placement="parallel" if parallel else "pre",
    )
    norms = {"input_layernorm": "attention_norm"} if parallel else PRE_NORMS
    config.ignore("hidden_dropout")
    config.done()
    return spec, weights(spec, norms | ATTENTION | GATED)
