"""Granite-MoE (GraniteMoeForCausalLM, GraniteMoeSharedForCausalLM): Granite with experts, one stack per layer."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.experts import IN_TRAINING, read_router, with_experts
from serve_llm.engine.model.families.granite import read_granite
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    **PRE_NORMS,
    **ATTENTION,
    "block_sparse_moe.router.layer": "ffn.router",
    "block_sparse_moe.input_linear": "ffn.experts.{member}.gate ffn.experts.{member}.up",
    "block_sparse_moe.output_linear": "ffn.experts.{member}.down",
}
SHARED = {"shared_mlp.input_linear": "ffn.shared.gate ffn.shared.up", "shared_mlp.output_linear": "ffn.shared.down"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GraniteMoeConfig)."""
    return _read(config, "GraniteMoeForCausalLM", shared=0)


def read_shared(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Read Granite with a shared expert, unless its width is 0. Defaults of absent keys are
    GraniteMoeSharedConfig's."""
    shared = config.integer("shared_intermediate_size", 0, lowest=0)
    return _read(config, "GraniteMoeSharedForCausalLM", shared)


def _read(config: ConfigReader, architecture: str, shared: int) -> tuple[ModelSpec, WeightMap]:
    config.refuse("mlp_bias")
    dense = read_granite(config, architecture)
    router = read_router(config, config.integer("num_local_experts", 8, highest=10_000), default_top_k=2)
    spec = with_experts(dense, router, shared=shared)
    config.ignore(*IN_TRAINING)
    config.done()
    return spec, weights(spec, NAMES | (SHARED if shared else {}))
