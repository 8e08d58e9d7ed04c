"""config.json as a closed world: what is read, what is refused, and how clearly."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from serve_llm.common.errors import ModelError, OptionError, UnsupportedModel
from serve_llm.engine.model.registry import FAMILIES as ARCHITECTURES
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.rope_spec import LinearScaling, RopeSpec, YarnScaling
from serve_llm.engine.model.spec import KVGroup, ModelSpec
from support.tiny import FAMILIES, SIZES, config_of, make_checkpoint

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}
QWEN2 = {**LLAMA, "architectures": ["Qwen2ForCausalLM"], "num_key_value_heads": 3}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"], "num_key_value_heads": 3}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return read_model(config)[0]


def windows(config: dict[str, Any]) -> list[int | None]:
    return [layer.attention.sliding_window for layer in spec_of(config).layers]


def test_unsupported_architecture_is_one_line_that_lists_the_supported_ones() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        read_model({**LLAMA, "architectures": ["MambaForCausalLM"]})
    message = str(caught.value)
    assert "\n" not in message and "MambaForCausalLM" in message
    assert all(name in message for name in ARCHITECTURES)
    assert message.endswith("; --model-impl transformers serves many others, slowly")


HOSTILE = [
    None,
    True,
    -1,
    0,
    1,
    2**31,
    2**70,
    1.5,
    float("nan"),
    float("inf"),
    "",
    "x",
    [],
    [1],
    ["x"],
    {},
    {"type": "x"},
]
GPT2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 331, "n_embd": 60, "n_head": 6, "n_layer": 3}
OPT = LLAMA | {"architectures": ["OPTForCausalLM"], "ffn_dim": 97, "word_embed_proj_dim": 60}


@pytest.mark.parametrize(
    "config", [LLAMA, QWEN2, MISTRAL, GPT2, OPT], ids=lambda config: str(config["architectures"][0])
)
def test_any_value_of_any_key_is_read_or_is_the_models_error(config: dict[str, Any]) -> None:
    """Errors are also quick: an impossible number of layers does not fill memory."""
    keys = [
        *config,
        "head_dim",
        "rope_theta",
        "rope_scaling",
        "sliding_window",
        "layer_types",
        "max_position_embeddings",
    ]
    for key in [*keys, "quantization_config", "tie_word_embeddings", "rms_norm_eps", "hidden_act", "auto_map"]:
        for value in HOSTILE:
            with contextlib.suppress(ModelError):
                assert len(read_model(config | {key: value})[0].layers) <= 3 or value == 1


@pytest.mark.parametrize("architectures", [None, [], "LlamaForCausalLM", [3]])
def test_no_architecture(architectures: object) -> None:
    with pytest.raises(UnsupportedModel, match="names no architecture"):
        read_model({**LLAMA, "architectures": architectures})


def test_defaults_are_those_of_transformers() -> None:
    spec = spec_of(LLAMA)
    mixer = spec.layers[0].attention
    assert (mixer.num_kv_heads, mixer.head_dim, mixer.sliding_window, mixer.qkv_bias) == (6, 10, None, False)
    assert (spec.max_position, spec.tie_word_embeddings, spec.layers[0].norm.eps) == (2048, False, 1e-6)
    assert mixer.rope is not None and mixer.rope.base == 10000.0 and mixer.rope.scaling is None
    assert spec_of({**MISTRAL, "num_key_value_heads": None}).layers[0].attention.num_kv_heads == 6


@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_that_transformers_writes_is_known(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    config = json.loads((tmp_path / "config.json").read_text())
    spec = spec_of(config)
    assert spec.vocab_size == SIZES[family]["vocab_size"]
    for unknown in ("layer_multiplier", "layer_scale"):
        with pytest.raises(ModelError, match=rf"config.json: unknown keys.*: {unknown}; .*-config {unknown}$"):
            read_model({**config, unknown: 2.0})
        assert read_model({**config, unknown: 2.0}, [unknown])[0] == spec
    assert spec_of({**config, "layer_scale": None}) == spec  # null counts as absent
    assert spec_of({**config, "do_sample": True, "torch_dtype": "float16", "_name_or_path": "x"}) == spec


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_keys_mean_what_they_mean_to_transformers(family: str) -> None:
    """Otherwise the file is refused because of the missing keys."""

    def outcome(config: dict[str, Any]) -> ModelSpec | str:
        try:
            return spec_of(config)
        except ModelError as error:
            return str(error)

    whole = config_of(family)
    for key in whole.keys() - {"architectures", "model_type"}:
        config = {name: value for name, value in whole.items() if name != key}
        found = outcome(config)
        if found not in (f"config.json: {key} is missing", "config.json: rope_scaling is missing"):
            resolved = json.loads(AutoConfig.for_model(**config).to_json_string())
            assert found == outcome(resolved | {"architectures": whole["architectures"]}), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"quantization_config": {"quant_method": "exl3"}}, "quantization_config: quant_method 'exl3'"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder asks for encoder-decoder"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_key_value_heads": 4}, "6 attention heads cannot share 4"),
        ({"head_dim": 7}, "even head size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": "60"}, "hidden_size must be an integer of at least 1, but it is '60'"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a number"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps must be a number"),
        (
            {"architectures": ["GraniteForCausalLM"], "residual_multiplier": 1e-300},
            "residual_multiplier must be a number",
        ),
        ({"rope_theta": 10**400}, "rope_theta must be a number"),
        ({"attention_bias": 1}, "attention_bias must be true or false"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling: long_factor is missing"),
        ({"rope_scaling": {"rope_type": "su", "long_factor": [1.0]}}, "long_factor must be a list of 5 numbers"),
        ({"rope_scaling": {"rope_type": "longrope", "long_factor": [1, 2, 3, 4, "5"]}}, r"long_factor\[4\] must be"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 1]}}, "unknown keys.*mrope_section"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling: factor is missing"),
        ({"rope_scaling": 2.0}, "rope_scaling must be an object"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}}, "unknown keys.*partial_rotary"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "unknown keys.*full_attention"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization says that MLX quantised the checkpoint"),
    ],
)
def test_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=f"config.json:.*{message}"):
        read_model({**LLAMA, **change})


def test_windows_by_a_pattern() -> None:
    cohere2 = {**LLAMA, "architectures": ["Cohere2ForCausalLM"], "num_hidden_layers": 9, "sliding_window": 30}

    def windows(**change: object) -> list[int | None]:
        return [layer.attention.sliding_window for layer in spec_of({**cohere2, **change}).layers]

    assert windows() == [30, 30, 30, None, 30, 30, 30, None, 30]
    assert windows(sliding_window_pattern=2) == [30, None] * 4 + [30]
    assert windows(layer_types=["full_attention"] * 8 + ["sliding_attention"]) == [None] * 8 + [30]
    assert windows(sliding_window_pattern=1, sliding_window=None) == [None] * 9
    with pytest.raises(ModelError, match="sliding_window is null, but some layers have"):
        windows(sliding_window=None)
    with pytest.raises(ModelError, match="layer_types must name full_attention or sliding_attention for each of the 9"):
        windows(layer_types=["full_attention"])


def test_unknown_keys_that_are_allowed_and_no_others() -> None:
    odd = {**LLAMA, "a": 1, "b": 2, "rope_scaling": {"type": "linear", "factor": 2.0, "c": 3}}
    allowed = ["a", "b", "rope_scaling.c"]
    plain = spec_of({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}})
    assert read_model(odd, allowed)[0] == plain
    with pytest.raises(ModelError, match=r"unknown keys.*: a, b; .*--allow-unknown-config a --allow-unknown-config b$"):
        read_model(odd, ["rope_scaling.c"])
    with pytest.raises(ModelError, match=r"rope_scaling: unknown keys.*: c; .*-config rope_scaling\.c$"):
        read_model(odd, ["a", "b", "c"])
    for name, why in {
        "d": "there is no such key in config.json",
        "rope_scaling.a": "there is no such key in config.json: rope_scaling",
        "rope_parameters.c": "there is no such key",
        "head_dim": "there is no such key",
        "hidden_size": "this program knows that key",
        "rope_scaling.factor": "this program knows that key",
    }.items():
        with pytest.raises(OptionError, match=f"--allow-unknown-config: {re.escape(name)}: {why}"):
            read_model(odd, [*allowed, name])
    with pytest.raises(ModelError, match="is_encoder_decoder asks"):
        read_model({**LLAMA, "is_encoder_decoder": True}, ["is_encoder_decoder"])


GEMMA3 = {**LLAMA, "architectures": ["Gemma3ForCausalLM"], "num_key_value_heads": 3}


def test_gemma3_ropes_as_either_version_writes_them() -> None:
    scaling = {"rope_type": "linear", "factor": 8.0}
    local = {"rope_type": "default", "rope_theta": 500.0}
    new = {"rope_parameters": {"sliding_attention": local, "full_attention": {**scaling, "rope_theta": 7000.0}}}
    old = {"rope_theta": 7000.0, "rope_local_base_freq": 500.0, "rope_scaling": scaling}
    assert spec_of({**GEMMA3, **new}) == spec_of({**GEMMA3, **old})
    assert spec_of({**GEMMA3, **old}).max_position == 131072  # as in the file, scaling included
    for change, message in (
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is not served in Gemma 3"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ({"hidden_activation": "gelu"}, "hidden_activation 'gelu' is not supported"),
        ({"rope_parameters": {"sliding_attention": {**scaling}}}, "rope_type 'linear' is not supported"),
        ({"rope_parameters": {"sliding_attention": {**local, "a": 1}}}, "sliding_attention: unknown keys.*: a"),
        ({"rope_parameters": {"chunked_attention": local}}, "rope_parameters: unknown keys.*: chunked_attention"),
    ):
        with pytest.raises(ModelError, match=message):
            spec_of({**GEMMA3, **change})
    with pytest.raises(ModelError, match="text_config is missing"):
        spec_of({**GEMMA3, "architectures": ["Gemma3ForConditionalGeneration"]})


@pytest.mark.parametrize(
    ("architecture", "change", "message"),
    [
        ("Qwen2ForCausalLM", {"layer_types": ["full_attention"]}, "layer_types must name"),
        ("Qwen2ForCausalLM", {"layer_types": ["linear_attention"] * 3}, "layer_types must name"),
        ("Qwen3ForCausalLM", {"layer_types": ["sliding_attention"] * 3}, "use_sliding_window does not"),
        ("Qwen3ForCausalLM", {"layer_types": "full_attention"}, "layer_types must be a list"),
        ("Qwen2ForCausalLM", {"use_mrope": True}, "use_mrope asks for multimodal"),
    ],
)
def test_refused_of_qwen(architecture: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model({**QWEN2, "architectures": [architecture], **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True, "sliding_window": 9}, "use_sliding_window is not supported"),
        ({"layer_types": ["sliding_attention"] * 3}, "sliding windows of SmolLM3 are not served"),
        ({"no_rope_layers": [1, 0]}, "no_rope_layers has 2 entries for 3 layers"),
        ({"no_rope_layers": [1, 0, 2]}, "no_rope_layers must be a list of integers from 0 to 1"),
    ],
)
def test_refused_of_smollm3(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model({**LLAMA, "architectures": ["SmolLM3ForCausalLM"], "num_key_value_heads": 3, **change})


def test_phi3_refuses_biases_and_another_number_of_factors() -> None:
    phi3 = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "partial_rotary_factor": 0.8}
    with pytest.raises(ModelError, match="lm_head_bias is not supported"):
        read_model({**phi3, "lm_head_bias": True})
    with pytest.raises(ModelError, match="rope_scaling: long_factor must be a list of 4 numbers"):
        read_model({**phi3, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 5, "short_factor": [1.0] * 5}})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi": True}, "alibi is not supported"),
        ({"alibi": []}, "alibi must be true or false"),
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported",
        ),
        ({"num_ln_in_parallel_attn": 2}, "do not go together"),
        ({"new_decoder_architecture": True, "parallel_attn": False}, "do not go together"),
        ({"multi_query": False, "num_kv_heads": 3}, "num_kv_heads 3 needs multi_query or new_decoder_architecture"),
        ({"new_decoder_architecture": True, "num_kv_heads": 4}, "6 attention heads cannot share 4"),
        ({"activation": "silu"}, "activation 'silu' is not supported"),
        ({"n_head": 6}, r"unknown keys.*: n_head"),
    ],
)
def test_refused_of_falcon(change: dict[str, Any], message: str) -> None:
    falcon = {key: value for key, value in LLAMA.items() if key != "intermediate_size"}
    with pytest.raises(ModelError, match=message):
        read_model({**falcon, "architectures": ["FalconForCausalLM"], **change})


def test_rotary_sizes_that_cannot_be() -> None:
    with pytest.raises(ModelError, match="even head size, but it is 64 of 10"):
        read_model({**GPT2, "architectures": ["GPTJForCausalLM"]})
    with pytest.raises(ModelError, match="even head size, but it is 3 of 10"):
        read_model({**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "rotary_pct": 0.35})


def test_gpt_neox_has_names_of_its_own_for_rope() -> None:
    neox = {**LLAMA, "architectures": ["GPTNeoXForCausalLM"], "rotary_emb_base": 500, "rotary_pct": 0.4}
    spec = spec_of(neox)
    assert spec.layers[0].attention.rope == RopeSpec(500.0, rotary_dim=4)
    assert spec_of({**neox, "rope_theta": 500.0, "partial_rotary_factor": 0.4}) == spec
    for contradiction in ({"rope_theta": 10000.0}, {"partial_rotary_factor": 1.0}):
        with pytest.raises(ModelError, match=f"{next(iter(contradiction))} contradicts rotary_emb_base 500.0 and"):
            spec_of({**neox, **contradiction})


def test_gpt2_and_opt_refuse_what_they_cannot_do() -> None:
    gpt2 = {"architectures": ["GPT2LMHeadModel"], "vocab_size": 331, "n_embd": 57, "n_layer": 1, "n_head": 3}
    with pytest.raises(ModelError, match="add_cross_attention asks for cross-attention"):
        read_model({**gpt2, "add_cross_attention": True})
    with pytest.raises(ModelError, match="n_embd 57 is not a multiple of n_head 4"):
        read_model({**gpt2, "n_head": 4})
    with pytest.raises(ModelError, match="activation_function 'silu' is not supported"):
        read_model({**gpt2, "activation_function": "silu"})
    opt = {**LLAMA, "architectures": ["OPTForCausalLM"], "ffn_dim": 97}
    with pytest.raises(ModelError, match=r"unknown keys.*intermediate_size"):
        read_model(opt)


def test_windows() -> None:
    assert windows(MISTRAL) == [4096] * 3
    assert windows({**MISTRAL, "sliding_window": 9}) == [9] * 3
    assert windows({**MISTRAL, "sliding_window": None}) == [None] * 3
    sliding = {**QWEN2, "use_sliding_window": True, "sliding_window": 9}
    assert windows({**sliding, "use_sliding_window": False, "max_window_layers": 0}) == [None] * 3
    assert windows({**sliding, "max_window_layers": 2}) == [None, None, 9]
    assert windows({**sliding, "max_window_layers": 0}) == [9] * 3
    assert windows({**sliding, "sliding_window": None, "max_window_layers": 0}) == [None] * 3
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows({**sliding, "layer_types": kinds}) == [9, None, 9]


def test_kv_groups() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    spec = spec_of({**QWEN2, "use_sliding_window": True, "sliding_window": 9, "layer_types": kinds})
    assert spec.kv_groups == (KVGroup((0, 2), 3, 10, 9), KVGroup((1,), 3, 10, None))
    assert spec.with_max_length(10).kv_groups == spec.kv_groups
    assert spec.with_max_length(9).kv_groups == (KVGroup((0, 1, 2), 3, 10, None),)


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({}, 2048),
        ({"rope_theta": 5e5, "rope_scaling": None}, 2048),
        ({"rope_scaling": {"type": "linear", "factor": 2.5}}, 5120),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2}}, 4096),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}}, 4096),
        ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", "original_max_position_embeddings": 512}}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}}, 2048),
    ],
)
def test_context_length(rope: dict[str, Any], context: int) -> None:
    assert spec_of({**LLAMA, **rope}).max_position == context


def test_old_and_new_form_of_rope_are_the_same() -> None:
    old = {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}}
    new = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}}
    spec = spec_of({**LLAMA, **old})
    assert spec == spec_of({**LLAMA, **new})
    rope = spec.layers[0].attention.rope
    assert rope is not None and rope.base == 5e5 and rope.scaling == LinearScaling(2.0)


def test_yarn_temperature() -> None:
    def factor(**keys: object) -> float:
        rope = spec_of({**LLAMA, "rope_scaling": {"type": "yarn", "factor": 4.0, **keys}}).layers[0].attention.rope
        assert rope is not None and isinstance(rope.scaling, YarnScaling)
        return rope.scaling.attention_factor

    assert factor() == pytest.approx(1.1386294)
    assert factor(mscale=0.7, mscale_all_dim=0.7) == 1.0
    assert factor(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(1.1386294 / 1.0693147)
    assert factor(attention_factor=1.5) == 1.5
    assert factor(attn_factor=1, extrapolation_factor=1.0) == factor(), (
        "vLLM's keys, with the values that change nothing"
    )
    with pytest.raises(ModelError, match="attn_factor and extrapolation_factor of yarn must be 1"):
        factor(attn_factor=1.3)
    with pytest.raises(ModelError, match="yarn must be 1"):
        factor(extrapolation_factor=2)


def test_importing_it_needs_no_torch() -> None:
    code = "import sys, serve_llm.engine.model.registry; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
