"""DeepSeek-V2 and DeepSeek-V3 (DeepseekV2ForCausalLM, DeepseekV3ForCausalLM): latent attention, experts in groups."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.experts import read_router, with_experts
from serve_llm.engine.model.families.names import GATED, PRE_NORMS, weights
from serve_llm.engine.model.families.rope import read_rope, score_factor
from serve_llm.engine.model.spec import MLA, Dense, ExpertGroups, Layer, ModelSpec, MoE, Norm, Router
from serve_llm.engine.model.weight_map import Row, WeightMap

NORM_EPS = 1e-6  # of latent vectors; not in config.json
UNREAD = (  # by transformers; of training, or of what the checkpoint was computed on
    "aux_loss_alpha",
    "ep_size",
    "output_router_logits",
    "seq_aux",
)
NAMES = {
    **PRE_NORMS,
    **GATED,
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_a_layernorm": "attention.kv_norm",
    "self_attn.kv_b_proj": "attention.kv_up",
    "self_attn.o_proj": "attention.output",
}
QUERIES = {"self_attn.q_proj": "attention.q"}
LATENT_QUERIES = {
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_a_layernorm": "attention.q_norm",
    "self_attn.q_b_proj": "attention.q_up",
}
ROUTED = {"mlp.gate": "ffn.router"} | {
    f"mlp.{source}.{kind}_proj": f"ffn.{parameter}.{kind}"
    for source, parameter in (("experts.{member}", "experts.{member}"), ("shared_experts", "shared"))
    for kind in ("gate", "up", "down")
}


def read_v2(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (DeepseekV2Config)."""
    dense = _read_dense(config, "DeepseekV2ForCausalLM", default_max_position=2048, interleaved=True)
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
    dense = _read_dense(config, "DeepseekV3ForCausalLM", default_max_position=4096, interleaved=interleaved)
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


def _read_dense(config: Config, architecture: str, *, default_max_position: int, interleaved: bool) -> ModelSpec:
    """The model with a dense part in every layer."""
    mixer, context = _read_mixer(config, default_max_position, interleaved)
    norm = Norm("rms", config.number("rms_norm_eps", 1e-6))
    config.choice("hidden_act", {"silu": "silu"}, "silu")
    config.refuse("mlp_bias")
    layer = Layer(mixer, Dense(config.integer("intermediate_size"), "silu", gated=True), norm)
    return ModelSpec(
        architecture=architecture,
        vocab_size=config.integer("vocab_size"),
        width=config.integer("hidden_size"),
        max_position=context,
        layers=(layer,) * config.layers("num_hidden_layers"),
        final_norm=norm,
        tied_head=config.flag("tie_word_embeddings", False),
    )


def _read_mixer(config: Config, default_max_position: int, interleaved: bool) -> tuple[MLA, int]:
    """And the longest context in tokens."""
    rank = None if config.is_null("q_lora_rank") else config.integer("q_lora_rank", 1536)
    nope_dim, rope_dim = config.integer("qk_nope_head_dim", 128), config.integer("qk_rope_head_dim", 64)
    rope, context = read_rope(config, config.integer("max_position_embeddings", default_max_position), rope_dim)
    bias = config.flag("attention_bias", False)
    if bias and rank is None:
        raise ModelError("config.json: attention_bias without q_lora_rank is not supported")
    config.ignore("num_key_value_heads", "head_dim", "qk_head_dim")  # of latent attention they say nothing
    mixer = MLA(
        heads=config.integer("num_attention_heads"),
        q_lora_rank=rank,
        kv_lora_rank=config.integer("kv_lora_rank", 512),
        nope_dim=nope_dim,
        rope_dim=rope_dim,
        value_dim=config.integer("v_head_dim", 128),
        scale=(nope_dim + rope_dim) ** -0.5 * score_factor(config, rope),
        norm_eps=NORM_EPS,
        rope=replace(rope, interleaved=interleaved),
        bias=bias,
    )
    return mixer, context


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
    mixer = dense.layers[0].mixer
    queries = QUERIES if isinstance(mixer, MLA) and mixer.q_lora_rank is None else LATENT_QUERIES
    found = weights(spec, NAMES | queries | ROUTED)
    further = tuple(rf"model\.layers\.{index}\..*" for index in range(num_layers, num_layers + more))
    return spec, replace(found, ignored=found.ignored + further)
