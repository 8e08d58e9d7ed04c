"""Nemotron and Minitron (NemotronForCausalLM): Llama with layer norms whose weights are stored minus 1, a plain
feed-forward with a squared relu, and rope in a part of each head."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import Activation, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

ACTIVATIONS: dict[str, Activation] = {"relu2": "relu2"}


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (NemotronConfig)."""
    bias = config.flag("attention_bias", False)
    activation = config.choice("hidden_act", ACTIVATIONS, "relu2")
    spec = read_decoder(
        config,
        "NemotronForCausalLM",
        default_kv_heads=None,
        default_max_position=4096,
        partial_rotary=0.5,
        windows=[None] * config.layers("num_hidden_layers"),
        norm=NormSpec("layer", config.number("norm_eps", 1e-5)),
        ffn=MLPSpec(config.integer("intermediate_size"), activation, bias=config.flag("mlp_bias", False)),
        qkv_bias=bias,
        output_bias=bias,
    )
    config.ignore("kv_channels", "layer_norm_eps")  # in published files; transformers does not read them
    config.done()
    names = PRE_NORMS | ATTENTION | {"mlp.up_proj": "ffn.up", "mlp.down_proj": "ffn.down"}
    return spec, weights(spec, names, norms="plus_one")
