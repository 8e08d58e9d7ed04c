"""GPT-J (GPTJForCausalLM): GPT-2's keys, parallel attention and feed-forward, interleaved rope in a part of each
head."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import map_attention
from serve_llm.engine.model.families.gpt2 import read_plain
from serve_llm.engine.model.families.names import Names, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE, check_rotary_dim
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import AttentionSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

NAMES = {
    "ln_1": "attention_norm",
    "attn.q_proj": "attention.q",
    "attn.k_proj": "attention.k",
    "attn.v_proj": "attention.v",
    "attn.out_proj": "attention.output",
    "mlp.fc_in": "ffn.up",
    "mlp.fc_out": "ffn.down",
}
OUTSIDE = Names("transformer.", "transformer.h", "transformer.wte", "transformer.ln_f")


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GPTJConfig)."""
    plain = read_plain(
        config, "GPTJForCausalLM", default_max_position=2048, default_tied=False, norm_position="parallel"
    )
    plain = replace(plain, lm_head_bias=True)
    mixer = plain.layers[0].attention
    assert isinstance(mixer, AttentionSpec)
    rotary_dim = check_rotary_dim(config.integer("rotary_dim", 64), mixer.head_dim)
    rope = RopeSpec(DEFAULT_BASE, rotary_dim=rotary_dim, interleaved=True)
    spec = map_attention(plain, lambda index, attention: replace(attention, rope=rope))
    config.ignore("rotary", "scale_attn_weights")  # in the published file; transformers does not read them
    config.done()
    return spec, weights(spec, NAMES, OUTSIDE)
