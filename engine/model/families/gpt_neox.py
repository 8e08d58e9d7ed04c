"""GPT-NeoX and Pythia (GPTNeoXForCausalLM): parallel attention and feed-forward, each with a norm, and rope in a part
of each head."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.names import PRE_NORMS, QKV, Names, weights
from serve_llm.engine.model.families.rope import DEFAULT_BASE
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

FFN = {"mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
NAMES = {"attention.query_key_value": QKV, "attention.dense": "attention.output"}
OUTSIDE = Names("gpt_neox.", "gpt_neox.layers", "gpt_neox.embed_in", "gpt_neox.final_layer_norm", "embed_out")


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (GPTNeoXConfig)."""
    bias = config.flag("attention_bias", True)
    base = config.number("rotary_emb_base", DEFAULT_BASE)
    share = config.number("rotary_pct", 0.25)
    # transformers 4 also wrote these, equal to the two above; alone they had no effect there
    for key, known in (("rope_theta", base), ("partial_rotary_factor", share)):
        if config.number(key, known) != known:
            raise ModelError(f"config.json: {key} contradicts rotary_emb_base {base} and rotary_pct {share}")
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu")
    spec = read_decoder(
        config,
        "GPTNeoXForCausalLM",
        default_kv_heads=None,
        default_max_position=2048,
        default_rope_base=base,
        partial_rotary=share,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5)),
        ffn=MLPSpec(config.integer("intermediate_size"), activation, bias=True),
        qkv_bias=bias,
        output_bias=bias,
        norm_position="parallel_two_norms" if config.flag("use_parallel_residual", True) else "pre",
    )
    config.ignore("hidden_dropout", "hidden_dropout_prob", "attention_probs_dropout_prob")
    config.done()
    return spec, weights(spec, PRE_NORMS | NAMES | FFN, OUTSIDE, qkv_groups=spec.layers[0].attention.num_kv_heads)
