"""GTE (v1.5 and multilingual): BERT with rope and a gated gelu."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.encoder import build_encoder, read_classifier, read_heads
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.pooled import Read
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.rope_spec import LinearScaling, RopeSpec
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

LAYER = {
    "attention.qkv_proj": "attention.q attention.k attention.v",
    "attention.o_proj": "attention.output",
    "attn_ln": "attention_norm",
    "mlp.up_gate_proj": "ffn.up ffn.gate",
    "mlp.down_proj": "ffn.down",
    "mlp_ln": "ffn_norm",
}
UNUSED = "pack_qkv unpad_inputs use_memory_efficient_attention logn_attention_clip1".split()


def read_gte(architecture: str, base: str) -> Read:
    """Reads transformers' config (GteConfig) and that of the model's own code (NewConfig).

    base: the name of the base model in checkpoints with a head.
    """

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        _, _, head_dim = read_heads(config)
        config.choice("hidden_act", {"gelu": "gelu"}, "gelu")
        config.only("layer_norm_type", "layer_norm", None)
        config.only("position_embedding_type", "rope", "absolute", None)
        config.refuse("logn_attention_scale")
        config.ignore(*UNUSED)
        length = config.integer("max_position_embeddings", 8192)
        rope, length = _read_ntk_rope(config, length, head_dim)
        token_types = config.integer("type_vocab_size", 1, lowest=0)
        spec = build_encoder(
            config,
            architecture,
            max_position=length,
            ffn=MLPSpec(config.integer("intermediate_size"), "gelu", gated=True, down_bias=True),
            norm=NormSpec("layer", config.number("layer_norm_eps", 1e-12)),
            ropes=[rope] * config.layers("num_hidden_layers"),
            token_types=token_types,
            pooler=read_classifier(config, architecture),
        )
        config.done()
        parts = {"embeddings.LayerNorm": "embedding_norm"}
        if token_types:
            parts["embeddings.token_type_embeddings"] = "token_types"
        classifier = {f"{base}.pooler.dense": "pooler.dense", "classifier": "pooler.classifier"}
        weights = build_weights(
            spec,
            LAYER,
            base=base,
            embedding_parts=parts,
            head="lm_head",
            pooler=classifier,
            ignored=() if spec.pooler is not None else (rf"({base}\.)?classifier\..*",),
        )
        return spec, weights

    return read


def _read_ntk_rope(config: ConfigReader, max_position: int, head_dim: int) -> tuple[RopeSpec, int]:
    """The rope; "ntk", which only NewConfig has, multiplies the base and divides all frequencies."""
    scaling = config.inner("rope_scaling")
    if scaling is None or "type" not in scaling.keys or "rope_type" in scaling.keys:
        return read_rope(config, max_position, head_dim, default_base=160_000.0)
    scaling.only("type", "ntk")
    factor = scaling.number("factor")
    scaling.done()
    base = config.number("rope_theta", 10_000.0)
    return RopeSpec(base * factor, LinearScaling(factor ** (2 / head_dim))), max_position
