"""The text part of Qwen3.5 (Qwen3_5ForCausalLM, Qwen3_5MoeForCausalLM): Qwen3-Next with separate tensors for the inputs
of linear layers, dense or with experts."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.hybrid_names import build_weights
from serve_llm.engine.model.families.multimodal import PREFIXES
from serve_llm.engine.model.families.names import ATTENTION, GATED, PRE_NORMS
from serve_llm.engine.model.families.qwen2_moe import NAMES, SHARED
from serve_llm.engine.model.families.qwen3_next import read_hybrid
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

INPUTS = {"in_proj_qkv": "q k v", "in_proj_z": "z", "in_proj_b": "beta", "in_proj_a": "alpha"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3_5TextConfig)."""
    config.set_defaults(intermediate_size=12288)
    config.empty("mlp_only_layers")
    spec = read_hybrid(config, "Qwen3_5ForCausalLM", default_kv_heads=4)
    _finish(config)
    weights = build_weights(spec, PRE_NORMS | ATTENTION | GATED, INPUTS, by_key_head=False)
    return spec, replace(weights, prefixes=PREFIXES)


def read_moe(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen3_5MoeTextConfig)."""
    width = config.integer("moe_intermediate_size", 512)
    config.set_defaults(intermediate_size=width)  # no layer is dense
    dense = read_hybrid(config, "Qwen3_5MoeForCausalLM", default_kv_heads=2)
    config.only("norm_topk_prob", True, None)
    config.only("decoder_sparse_step", 1, None)
    config.empty("mlp_only_layers")
    router = read_router(config, config.integer("num_experts", 256, highest=10_000), 8)
    spec = with_experts(dense, router, width, config.integer("shared_expert_intermediate_size", 512), shared_gate=True)
    config.ignore(*IN_TRAINING)
    _finish(config)
    weights = build_weights(spec, NAMES | SHARED, INPUTS, by_key_head=False)
    return spec, replace(weights, stacks=_stack_experts(router.num_experts), prefixes=PREFIXES)


def _stack_experts(num_experts: int) -> tuple[WeightRule, ...]:
    """In some checkpoints, all experts of a layer are in one tensor, as (experts, outputs, inputs)."""
    return tuple(
        WeightRule(
            f"model.layers.{{layer}}.mlp.experts.{source}",
            tuple(f"layers.{{layer}}.ffn.experts.{{member}}.{name}.weight" for name in names),
            members=num_experts,
        )
        for source, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
    )


def _finish(config: ConfigReader) -> None:
    config.only("attn_output_gate", True, None)
    config.only("mamba_ssm_dtype", "float32", None)
    config.ignore("mtp_num_hidden_layers", "mtp_use_dedicated_embeddings")  # draft layers, which are not used
    config.done()
