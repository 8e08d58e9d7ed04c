"""What checkpoints call a decoder's tensors: the names of Llama, and what other families have in their place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from serve_llm.engine.model.spec import MLA, Attention, Dense, Mixer, ModelSpec, MoE
from serve_llm.engine.model.weight_map import Row, Transform, WeightMap

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
HEAD_NORMS = {source: f"{parameter}.{{member}}" for source, parameter in QK_NORMS.items()}  # all of a layer in a stack


@dataclass(frozen=True)
class Names:
    """What a checkpoint calls modules outside its layers, and the list of these."""

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
    """The names of LlamaForCausalLM and its descendants, and for each whether the spec has weight and bias or one.

    names: in a layer of the checkpoint -> the parameters that this fills, with spaces between. norms: how the weights
    of all norms are stored. qkv_groups: in a joint weight, of query heads with the key and value head that they read.
    """
    layer = spec.layers[0]
    mixer = layer.mixer
    sizes = {}
    members = _members(spec)
    if isinstance(mixer, Attention):
        if mixer.projection_norm_eps is not None or (mixer.head_norm is not None and mixer.head_norm.kind == "rms"):
            names = {**names, **QK_NORMS}
        sizes = {"attention.q": mixer.heads * mixer.head_dim}
        sizes |= dict.fromkeys(("attention.k", "attention.v"), mixer.kv_heads * mixer.head_dim)
    dense = [one.ffn for one in spec.layers if isinstance(one.ffn, Dense)]
    biased = _biased(mixer)
    biased |= dict.fromkeys(("ffn.gate", "ffn.up", "ffn.down"), any(ffn.bias for ffn in dense))
    biased |= dict.fromkeys(("attention_norm", "ffn_norm"), layer.norm.has_bias)

    def rows(source: str, filled: str) -> list[Row]:
        parameters = filled.split()
        kind_of = MoE if parameters[0].startswith(MOE) else Dense if parameters[0].startswith("ffn.") else Dense | MoE
        layers = tuple(index for index, one in enumerate(spec.layers) if isinstance(one.ffn, kind_of))
        return [
            Row(
                f"{outside.layers}.{{layer}}.{source}.{kind}",
                tuple(f"layers.{{layer}}.{parameter}.{kind}" for parameter in parameters),
                norms if kind == "weight" and parameters[0].endswith("norm") else "none",
                tuple(sizes[parameter] for parameter in parameters if len(parameters) > 1 and parameter in sizes),
                qkv_groups if filled == QKV else 1,
                layers=layers if len(layers) < len(spec.layers) else None,
                members=members.get(parameters[0].partition(".{member}")[0], 0) if "{member}" in filled else 0,
            )
            for kind in (("weight", "bias") if biased.get(parameters[0]) else ("weight",))
        ]

    inside = [row for source, filled in names.items() for row in rows(source, filled)]
    kinds = ("weight", "bias") if layer.norm.has_bias else ("weight",)
    ends = [
        Row(f"{outside.final_norm}.{kind}", (f"final_norm.{kind}",), norms if kind == "weight" else "none")
        for kind in kinds
    ]
    if spec.head_bias:
        ends.append(Row(f"{outside.head}.bias", ("head.bias",)))
    return WeightMap(
        rows=(*inside, *ends),
        embedding=f"{outside.embedding}.weight",
        head=f"{outside.head}.weight",
        prefix=outside.prefix,
        # computed from config.json, and the causal mask, stored by old versions
        ignored=(r".*\.rotary_emb\.inv_freq", r".*\.(attn|attention)\.(bias|masked_bias)"),
    )


def _members(spec: ModelSpec) -> dict[str, int]:
    """How many experts or heads there are, by what stands before `{member}` in parameters."""
    mixer = spec.layers[0].mixer
    experts = [layer.ffn.router.num_experts for layer in spec.layers if isinstance(layer.ffn, MoE)]
    counts = {"attention.q_norm": mixer.heads, "attention.k_norm": mixer.kv_heads}
    return {**counts, "ffn.experts": max(experts, default=0)}


def _biased(mixer: Mixer) -> dict[str, bool]:
    """Which of its products have a bias."""
    if isinstance(mixer, MLA):
        return dict.fromkeys(("attention.q_down", "attention.kv_down", "attention.output"), mixer.bias)
    return dict.fromkeys(("attention.q", "attention.k", "attention.v"), mixer.qkv_bias) | {
        "attention.output": mixer.output_bias
    }
