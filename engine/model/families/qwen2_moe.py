"""Qwen1.5-MoE and Qwen2-MoE (Qwen2MoeForCausalLM): Qwen2 with experts and a gated shared expert."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder, read_windows
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.names import ATTENTION, GATED, PRE_NORMS, weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    **PRE_NORMS,
    **ATTENTION,
    **GATED,  # in layers without experts
    "mlp.gate": "ffn.router",
    **{f"mlp.experts.{{member}}.{name}_proj": f"ffn.experts.{{member}}.{name}" for name in ("gate", "up", "down")},
}
SHARED = {
    "mlp.shared_expert_gate": "ffn.shared_gate",
    **{f"mlp.shared_expert.{name}_proj": f"ffn.shared.{name}" for name in ("gate", "up", "down")},
}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Qwen2MoeConfig).

    Without layer_types, the layers that have the sliding window depend on the version.
    """
    if config.flag("use_sliding_window", False) and config.names("layer_types") is None:
        raise ModelError("config.json: use_sliding_window is served with layer_types only, but that is missing")
    dense = read_decoder(
        config,
        "Qwen2MoeForCausalLM",
        default_kv_heads=16,
        default_max_position=32768,
        windows=read_windows(config),
        qkv_bias=config.flag("qkv_bias", True),
    )
    num_experts = config.integer("num_experts", 60, highest=10_000)
    shared = config.integer("shared_expert_intermediate_size", 5632)
    spec = read_experts(config, dense, num_experts, default_top_k=4, default_width=1408, shared=shared)
    return spec, weights(spec, NAMES | SHARED)


def read_experts(
    config: ConfigReader, dense: ModelSpec, num_experts: int, *, default_top_k: int, default_width: int, shared: int = 0
) -> ModelSpec:
    """The model of dense layers, with experts where Qwen's keys ask for them. shared: as in `with_experts`."""
    step = config.integer("decoder_sparse_step", 1)
    dense_layers = config.integers("mlp_only_layers", highest=10_000)
    spec = with_experts(
        dense,
        read_router(config, num_experts, default_top_k, config.flag("norm_topk_prob", False)),
        config.integer("moe_intermediate_size", default_width),
        shared,
        shared_gate=shared > 0,
        where=lambda index: index not in (dense_layers or ()) and (index + 1) % step == 0,
    )
    config.ignore(*IN_TRAINING)
    config.done()
    return spec
