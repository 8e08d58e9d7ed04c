"""Names of a decoder's tensors in checkpoints: Llama's names, with replacements for other families."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_llm.engine.model.spec import AnyAttentionSpec, AttentionSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from serve_llm.engine.model.weight_map import Transform, WeightMap, WeightRule

PRE_NORMS = {"input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm"}
ATTENTION = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
}
JOINT_GATED = {"mlp.gate_up_proj": "ffn.gate ffn.up", "mlp.down_proj": "ffn.down"}
GATED = {"mlp.gate_proj": "ffn.gate", "mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down"}
QKV = "attention.q attention.k attention.v"
MOE = ("ffn.router", "ffn.experts.", "ffn.shared")  # parameters of layers with experts
QK_NORMS = {"self_attn.q_norm": "attention.q_norm", "self_attn.k_norm": "attention.k_norm"}
HEAD_NORMS = {source: f"{parameter}.{{member}}" for source, parameter in QK_NORMS.items()}  # one stack per layer


@dataclass(frozen=True)
class Names:
    """Names in a checkpoint of the modules outside the layers, and of the list of layers."""

    prefix: str = "model."
    layers: str = "model.layers"
    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    head: str = "lm_head"


LLAMA = Names()


def weights(
    spec: ModelSpec,
    names: Mapping[str, str] = PRE_NORMS | ATTENTION | GATED,
    outside: Names = LLAMA,
    norms: Transform = "none",
    qkv_groups: int = 1,
) -> WeightMap:
    """Build the weight map of LlamaForCausalLM and its descendants, with biases where the spec has them.

    names: module of a layer in the checkpoint -> the parameters that it fills, separated by spaces. outside: names
    outside the layers. norms: how the weights of all norms are stored. qkv_groups: groups of query heads in a joint
    weight, each stored with the key and value head that it reads.
    """
    layer = spec.layers[0]
    mixer = layer.attention
    sizes = {}
    members = _members(spec)
    if isinstance(mixer, AttentionSpec):
        norm = mixer.qk_norm
        if mixer.qk_projection_norm is not None or (norm is not None and norm.kind == "rms" and norm.affine):
            names = {**names, **QK_NORMS}
        sizes = {"attention.q": mixer.num_heads * mixer.head_dim}
        sizes |= dict.fromkeys(("attention.k", "attention.v"), mixer.num_kv_heads * mixer.head_dim)
    dense = [one.ffn for one in spec.layers if isinstance(one.ffn, MLPSpec)]
    biased = _biased(mixer)
    biased |= dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), any(ffn.bias for ffn in dense))
    biased |= dict.fromkeys(("attention_norm", "ffn_norm"), layer.norm.has_bias)

    def build_rules(source: str, joined: str) -> list[WeightRule]:
        parameters = joined.split()
        in_ffn = parameters[0].startswith("ffn.")
        kind_of = MoESpec if parameters[0].startswith(MOE) else MLPSpec if in_ffn else MLPSpec | MoESpec
        layers = tuple(index for index, one in enumerate(spec.layers) if isinstance(one.ffn, kind_of))
        return [
            WeightRule(
                f"{outside.layers}.{{layer}}.{source}.{kind}",
                tuple(f"layers.{{layer}}.{parameter}.{kind}" for parameter in parameters),
                norms if kind == "weight" and parameters[0].endswith("norm") else "none",
                tuple(sizes[parameter] for parameter in parameters if len(parameters) > 1 and parameter in sizes),
                qkv_groups if joined == QKV else 1,
                layers=layers if len(layers) < len(spec.layers) else None,
                members=members.get(parameters[0].partition(".{member}")[0], 0) if "{member}" in joined else 0,
            )
            for kind in (("weight", "bias") if biased.get(parameters[0]) else ("weight",))
        ]

    layer_rules = [rule for source, joined in names.items() for rule in build_rules(source, joined)]
    kinds = ("weight", "bias") if layer.norm.has_bias else ("weight",)
    outside_rules = [
        WeightRule(f"{outside.final_norm}.{kind}", (f"final_norm.{kind}",), norms if kind == "weight" else "none")
        for kind in kinds
    ]
    if spec.lm_head_bias:
        outside_rules.append(WeightRule(f"{outside.head}.bias", ("head.bias",)))
    return WeightMap(
        rules=(*layer_rules, *outside_rules),
        embedding=f"{outside.embedding}.weight",
        head=f"{outside.head}.weight",
        prefix=outside.prefix,
        # computed from config.json, and the causal mask, stored by old versions
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.(attn|attention)\.(bias|masked_bias)"),
    )


def _members(spec: ModelSpec) -> dict[str, int]:
    """The number of experts or heads, keyed by the part of a parameter's name before `{member}`."""
    mixer = spec.layers[0].attention
    experts = [layer.ffn.router.num_experts for layer in spec.layers if isinstance(layer.ffn, MoESpec)]
    counts = {"attention.q_norm": mixer.num_heads, "attention.k_norm": mixer.num_kv_heads}
    return {**counts, "ffn.experts": max(experts, default=0)}


def _biased(mixer: AnyAttentionSpec) -> dict[str, bool]:
    """Return for each linear layer of the attention whether it has a bias."""
    if isinstance(mixer, MLASpec):
        return dict.fromkeys(("attention.q_down", "attention.kv_down", "attention.output"), mixer.bias)
    assert isinstance(mixer, AttentionSpec)
    return dict.fromkeys(("attention.q", "attention.k", "attention.v"), mixer.qkv_bias) | {
        "attention.output": mixer.output_bias
    }
