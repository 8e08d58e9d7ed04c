"""Experts as in DeepSeek: groups of routed experts (later models choose them by corrected sigmoid scores), shared
experts, and dense first layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.experts import read_router, with_experts
from serve_llm.engine.model.families.names import weights
from serve_llm.engine.model.spec import GroupedTopK, ModelSpec, MoESpec, RouterSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

UNREAD = (  # transformers does not read these: training, or the hardware of the training run
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


def read_sigmoid_router(
    config: ConfigReader, *, num_experts: int, scaling_factor: float, groups: tuple[int, int]
) -> RouterSpec:
    """num_experts, scaling_factor, groups (n_group, topk_group): defaults of absent keys."""
    normalise = config.flag("norm_topk_prob", True)
    router = read_router(config, config.integer("n_routed_experts", num_experts, highest=10_000), 8, normalise)
    return replace(
        router,
        scoring="sigmoid",
        scaling_factor=config.number("routed_scaling_factor", scaling_factor),
        groups=read_groups(config, router, *groups, best=2),
        correction_bias=True,
        float32=True,
    )


def read_groups(
    config: ConfigReader, router: RouterSpec, default_count: int, default_top_k: int, best: int
) -> GroupedTopK:
    """best: `GroupedTopK.scores_per_group`."""
    count = config.integer("n_group", default_count)
    top_k = config.integer("topk_group", default_top_k)
    size, rest = divmod(router.num_experts, count)
    if rest or not best <= size or top_k > count or router.top_k > top_k * size:
        raise ModelError(
            f"config.json: n_group {count} and topk_group {top_k} do not fit {router.num_experts} experts, of which "
            f"{router.top_k} are chosen"
        )
    return GroupedTopK(count, top_k, best)


def read_routed_experts(
    config: ConfigReader,
    dense: ModelSpec,
    router: RouterSpec,
    names: Mapping[str, str],
    *,
    default_dense: int,
    default_width: int,
    default_shared: int,
) -> tuple[ModelSpec, WeightMap]:
    """The dense model with routed and shared experts in all but its first layers, and the names of its weights.

    names: modules of the dense model's layers -> parameters. The caller has taken all other keys.
    """
    first = config.integer("first_k_dense_replace", default_dense, lowest=0)
    width = config.integer("moe_intermediate_size", default_width)
    shared = config.integer("n_shared_experts", default_shared) * width
    if config.integer("moe_layer_freq", 1) != 1:
        raise ModelError("config.json: moe_layer_freq other than 1 is not supported")
    num_layers = len(dense.layers)
    more = config.integer("num_nextn_predict_layers", 0, lowest=0)  # multi-token prediction layers, which are not used
    config.ignore(*UNREAD)
    config.done()
    spec = with_experts(dense, router, width, shared, where=lambda index: index >= first)
    weight_map = weights(spec, {**names, **ROUTED})
    further = tuple(rf"model\.layers\.{index}\..*" for index in range(num_layers, num_layers + more))
    rules = weight_map.rules
    if router.correction_bias:
        routed = tuple(index for index, layer in enumerate(spec.layers) if isinstance(layer.ffn, MoESpec))
        source = "model.layers.{layer}.mlp.gate.e_score_correction_bias"
        rules += (WeightRule(source, ("layers.{layer}.ffn.router.correction",), layers=routed),)
    return spec, replace(weight_map, rules=rules, ignored=weight_map.ignored + further)
