"""GPT-J (GPTJForCausalLM): GPT-2's keys, halves in parallel, interleaved rope in a part of each head."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.engine.model.config import Config
from serve_llm.engine.model.families.gpt2 import read_plain
from serve_llm.engine.model.families.names import Names, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE, part_of_head
from serve_llm.engine.model.spec import ModelSpec, Rope
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


def read(config: Config) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GPTJConfig)."""
    plain = read_plain(config, "GPTJForCausalLM", default_max_position=2048, default_tied=False)
    layer = plain.layers[0]
    dims = part_of_head(config.integer("rotary_dim", 64), layer.mixer.head_dim)
    mixer = replace(layer.mixer, rope=Rope(DEFAULT_BASE, dims=dims, interleaved=True))
    layers = (replace(layer, mixer=mixer, placement="parallel"),) * len(plain.layers)
    spec = replace(plain, layers=layers, head_bias=True)
    config.ignore("rotary", "scale_attn_weights")  # of the published one; transformers does not read them
    config.done()
    return spec, weights(spec, NAMES, OUTSIDE)
