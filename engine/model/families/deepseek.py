"""DeepSeek-V2 and DeepSeek-V3 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM): latent attention, experts in groups."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.experts import read_router, with_experts
from serve_llm.engine.model.families.latent import latent_names, read_latent_decoder
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import ExpertGroups, ModelSpec, MoE, Router
from serve_llm.engine.model.weight_map import Row, WeightMap

UNREAD = (  # by transformers; of training, or of what the checkpoint was computed on
    "aux_loss_alpha",
    "ep_size",
    "output_router_logits",
    "seq_aux",
)
ROUTED = {"mlp.gate": "ffn.router"} | {
    f"mlp.{source}.{kind}_proj": f"ffn.{parameter}.{kind}"
    for source, parameter in (("experts.{member}", "experts.{member}"), ("shared_experts", "shared"))
    for kind in ("gate", "up", "down")
}


def read_v2(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (DeepseekV2Config)."""
    dense = read_latent_decoder(config, "DeepseekV2ForCausalLM", default_max_position=2048, interleaved=True)
    if config.flag("norm_topk_prob", False):
        raise ModelError("config.json: norm_topk_prob is not supported: implementations disagree on what it means here")
    config.choice("scoring_func", {"softmax": "softmax"}, "softmax")
    choice = config.choice("topk_method", {"greedy": "greedy", "group_limited_greedy": "groups"}, "greedy")
    router = read_router(config, config.integer("n_routed_experts", 64, highest=10_000), 6, normalise=False)
    groups = _groups(config, router, 1, 1, best=1)
    router = replace(router, wide=True, factor=config.number("routed_scaling_factor", 1.0))
    router = replace(router, groups=groups if choice == "groups" else None)
    return _with_experts(config, dense, router, default_dense=0, default_width=1407, default_shared=2)


def read_v3(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (DeepseekV3Config)."""
    interleaved = config.flag("rope_interleave", True)
    dense = read_latent_decoder(config, "DeepseekV3ForCausalLM", default_max_position=4096, interleaved=interleaved)
    config.choice("scoring_func", {"sigmoid": "sigmoid"}, "sigmoid")
    config.choice("topk_method", {"noaux_tc": "noaux_tc"}, "noaux_tc")
    normalise = config.flag("norm_topk_prob", True)
    router = read_router(config, config.integer("n_routed_experts", 256, highest=10_000), 8, normalise)
    router = replace(
        router,
        scores="sigmoid",
        factor=config.number("routed_scaling_factor", 2.5),
        groups=_groups(config, router, 8, 4, best=2),
        correction=True,
        wide=True,
    )
    spec, found = _with_experts(config, dense, router, default_dense=3, default_width=2048, default_shared=1)
    routed = tuple(index for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoE))
    correction = Row(
        "model.layers.{layer}.mlp.gate.e_score_correction_bias",
        ("layers.{layer}.ffn.router.correction",),
        layers=routed,
    )
    return spec, replace(found, rows=(*found.rows, correction))


def _groups(config: Config, router: Router, default_count: int, default_top_k: int, best: int) -> ExpertGroups:
    """best: as of `ExpertGroups`."""
    count, top_k = config.integer("n_group", default_count), config.integer("topk_group", default_top_k)
    size, rest = divmod(router.num_experts, count)
    if rest or not best <= size or top_k > count or router.top_k > top_k * size:
        raise ModelError(
            f"config.json: n_group {count} and topk_group {top_k} do not fit {router.num_experts} experts, of which "
            f"{router.top_k} are chosen"
        )
    return ExpertGroups(count, top_k, best)


def _with_experts(
    config: Config, dense: ModelSpec, router: Router, *, default_dense: int, default_width: int, default_shared: int
) -> tuple[ModelSpec, WeightMap]:
    """The model, and the names of its weights."""
    first = config.integer("first_k_dense_replace", default_dense, lowest=0)
    width = config.integer("moe_intermediate_size", default_width)
    shared = config.integer("n_shared_experts", default_shared) * width
    if config.integer("moe_layer_freq", 1) != 1:
        raise ModelError("config.json: moe_layer_freq other than 1 is not supported")
    num_layers = len(dense.layers)
    more = config.integer("num_nextn_predict_layers", 0, lowest=0)  # layers that predict further tokens, not served
    config.ignore(*UNREAD)
    config.done()
    spec = with_experts(dense, router, width, shared, where=lambda index: index >= first)
    found = weights(spec, latent_names(spec) | ROUTED)
    further = tuple(rf"model\.layers\.{index}\..*" for index in range(num_layers, num_layers + more))
    return spec, replace(found, ignored=found.ignored + further)
