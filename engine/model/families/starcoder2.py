"""StarCoder2 (Starcoder2ForCausalLM): Llama's attention with biases and a window, layer norms, a plain feed-forward."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_decoder
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.names import ATTENTION, PRE_NORMS, weights
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap


def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
    """Defaults of absent keys are transformers' own (Starcoder2Config)."""
    bias = config.flag("use_bias", True)
    activation = config.choice("hidden_act", ACTIVATIONS, "gelu_pytorch_tanh")
    window = config.integer("sliding_window", 0)
    spec = read_decoder(
        config,
        "Starcoder2ForCausalLM",
        default_kv_heads=2,
        default_max_position=4096,
        default_tied=True,
        windows=[window or None] * config.layers("num_hidden_layers"),
        norm=NormSpec("layer", config.number("norm_epsilon", 1e-5)),
        ffn=MLPSpec(config.integer("intermediate_size"), activation, bias=bias),
        qkv_bias=bias,
        output_bias=bias,
    )
    config.ignore("residual_dropout", "embedding_dropout")
    config.choice("mlp_type", {"default": "default"}, "default")
    config.choice("norm_type", {"layer_norm": "layer_norm"}, "layer_norm")
    # in published files; transformers does not read them
    config.ignore("rms_norm_eps", "layer_norm_epsilon", "activation_function")
    config.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights")
    config.done()
    return spec, weights(spec, PRE_NORMS | ATTENTION | {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"})
