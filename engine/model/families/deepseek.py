"""DeepSeek-V2 and DeepSeek-V3 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM): latent attention, experts in groups."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.experts import read_router
from serve_llm.engine.model.families.mla import mla_names, read_mla_decoder
from serve_llm.engine.model.families.routed_experts import read_groups, read_routed_experts, read_sigmoid_router
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap


def read_v2(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (DeepseekV2Config)."""
    dense = read_mla_decoder(config, "DeepseekV2ForCausalLM", default_max_position=2048, interleaved=True)
    if config.flag("norm_topk_prob", False):
        raise ModelError("config.json: norm_topk_prob is not supported: implementations disagree on what it means here")
    config.choice("scoring_func", {"softmax": "softmax"}, "softmax")
    choice = config.choice("topk_method", {"greedy": "greedy", "group_limited_greedy": "groups"}, "greedy")
    router = read_router(config, config.integer("n_routed_experts", 64, highest=10_000), 6, normalise=False)
    groups = read_groups(config, router, 1, 1, best=1)
    router = replace(router, float32=True, scaling_factor=config.number("routed_scaling_factor", 1.0))
    router = replace(router, groups=groups if choice == "groups" else None)
    return read_routed_experts(
        config, dense, router, mla_names(dense), default_dense=0, default_width=1407, default_shared=2
    )


def read_v3(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (DeepseekV3Config)."""
    interleaved = config.flag("rope_interleave", True)
    dense = read_mla_decoder(config, "DeepseekV3ForCausalLM", default_max_position=4096, interleaved=interleaved)
    config.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    config.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    router = read_sigmoid_router(config, num_experts=256, scaling_factor=2.5, groups=(8, 4))
    return read_routed_experts(
        config, dense, router, mla_names(dense), default_dense=3, default_width=2048, default_shared=1
    )
