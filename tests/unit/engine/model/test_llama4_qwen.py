"""config.json of Llama 4 and Qwen 1: what is read, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.quantization_spec import FLOAT8
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec, MoESpec
from support.multimodal import multimodal_config_of
from support.packed_floats import CONFIGS

LLAMA: dict[str, Any] = {
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
LLAMA4 = {**LLAMA, "architectures": ["Llama4ForCausalLM"], "num_key_value_heads": 3}
QWEN1 = {**LLAMA, "architectures": ["QWenLMHeadModel"], "intermediate_size": 194, "kv_channels": 10}
ROUNDED = replace(FLOAT8, rounds_inputs=True)


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_model(config)[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_experts_per_tok": 2}, "num_experts_per_tok other than 1 is not supported, but it is 2"),
        ({"layer_types": ["sliding_attention"] * 3}, "layer_types must name full_attention or chunked_attention for"),
        ({"layer_types": ["full_attention"]}, "for each of the 3 layers, but it is full_attention"),
        ({"attention_chunk_size": None}, "attention_chunk_size is null, but some layers attend within chunks"),
        ({"attn_temperature_tuning": 3}, "attn_temperature_tuning must be true, false or 4"),
        ({"moe_layers": [3]}, "moe_layers must be a list of integers from 0 to 2"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_type other than default and llama3"),
    ],
)
def test_refused_of_llama_4(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model({**LLAMA4, **change})


def test_layers_of_llama_4() -> None:
    layers = spec_of({**LLAMA4, "no_rope_layers": [], "num_hidden_layers": 4, "interleave_moe_layer_step": 2}).layers
    assert [isinstance(layer.ffn, MoESpec) for layer in layers] == [False, True, False, True]
    assert [layer.attention.rope is None for layer in layers] == [False, False, False, True]
    plain = {**LLAMA4, "attention_chunk_size": None, "layer_types": ["full_attention"] * 3}
    assert not any(layer.attention.sliding_window for layer in spec_of(plain).layers)


@pytest.mark.parametrize("prefix", ["", "language_model.", "model.language_model."])
def test_fbgemm_leaves_out_what_it_lists_in_any_spelling(prefix: str) -> None:
    module = "layers.1.self_attn" if prefix.startswith("model.") else "model.layers.1.self_attn"
    stored = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [prefix + module, "router"]}
    config = multimodal_config_of("Llama4ForConditionalGeneration") | {"quantization_config": stored}
    grouped = spec_of(config).grouped
    assert grouped is not None
    found = [grouped.find_form(f"layers.{layer}.{name}") for layer, name in ((0, "attention.q"), (1, "attention.q"))]
    assert found == [ROUNDED, None]
    assert grouped.find_form("layers.1.ffn.experts.2.down") == ROUNDED


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "seq_length is missing"),
        ({"seq_length": 64, "kv_channels": 12}, "hidden_size must be num_attention_heads 6 times kv_channels 12"),
        ({"seq_length": 64, "intermediate_size": 97}, "intermediate_size must be even, but it is 97"),
        ({"seq_length": 64, "rotary_pct": 0.35}, "even head size, but it is 3 of 10"),
        ({"seq_length": 64, "scale_attn_weights": False}, "scale_attn_weights False is not supported"),
        ({"seq_length": 64, "visual": {"layers": 1}}, "unknown keys.*: visual"),  # Qwen-VL
    ],
)
def test_refused_of_qwen_1(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model({**QWEN1, **change})


def test_the_context_of_qwen_1_ends_where_its_angles_would_follow_the_prompts_length() -> None:
    whole = {**QWEN1, "seq_length": 64, "max_position_embeddings": 512}
    assert spec_of(whole).max_position == 64
    assert spec_of({**whole, "use_dynamic_ntk": False}).max_position == 64
    assert spec_of({**whole, "use_dynamic_ntk": False, "use_logn_attn": False}).max_position == 512


def test_experts_of_quantised_llama_4_inside_a_model_of_images() -> None:
    raw = multimodal_config_of("Llama4ForConditionalGeneration")
    stored = CONFIGS["fp8-channel"] | {"ignore": ["re:.*lm_head", "re:.*self_attn", "re:.*router", "re:vision_model.*"]}
    spec, weights = read_model(raw | {"quantization_config": stored})
    sources = weights.expand(len(spec.layers))
    assert "model.layers.1.feed_forward.experts.4.gate_proj.weight" in sources
    assert spec.grouped is not None
    assert spec.grouped.find_form("layers.1.ffn.experts.4.gate") == ROUNDED
    assert spec.grouped.find_form("layers.1.attention.q") is None
