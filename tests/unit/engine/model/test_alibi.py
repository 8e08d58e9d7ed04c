"""The families with ALiBi: slopes, published config.json files, and refusals."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.families.alibi import compute_slopes
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import AttentionSpec

BLOOM_560M = """{"apply_residual_connection_post_layernorm": false, "attention_dropout": 0.0,
"attention_softmax_in_fp32": true, "architectures": ["BloomForCausalLM"], "bias_dropout_fusion": true,
"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "hidden_dropout": 0.0, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true, "model_type": "bloom", "n_embed": 1024, "n_inner": null,
"n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pretraining_tp": 1, "seq_length": 2048,
"skip_bias_add": true, "skip_bias_add_qkv": false, "slow_but_exact": false, "transformers_version": "4.20.0",
"unk_token_id": 0, "use_cache": true, "vocab_size": 250880}"""
BLOOM_176B = """{"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": false,
"attention_dropout": 0.0, "attention_softmax_in_fp32": true, "bias_dropout_fusion": true, "bos_token_id": 1,
"eos_token_id": 2, "pad_token_id": 3, "unk_token_id": 0, "hidden_dropout": 0.0, "initializer_range": 0.02,
"layer_norm_epsilon": 1e-05, "masked_softmax_fusion": true, "model_type": "bloom", "n_embed": 14336, "n_layer": 70,
"num_attention_heads": 112, "pretraining_tp": 4, "slow_but_exact": false, "transformers_version": "4.21.0.dev0",
"use_cache": true, "vocab_size": 250880}"""
MPT_7B_STORYWRITER = """{"architectures": ["MPTForCausalLM"], "attn_config": {"alibi": true, "alibi_bias_max": 16,
"attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention", "attn_uses_sequence_id": false,
"clip_qkv": 6, "prefix_lm": false, "qk_ln": false, "softmax_scale": null}, "auto_map": {"AutoConfig": "x"},
"d_model": 4096, "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"init_gain": 0,
"name": "kaiming_normal_", "verbose": 0}, "init_device": "cpu", "learned_pos_emb": true, "logit_scale": null,
"max_seq_len": 65536, "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": true,
"norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b",
"torch_dtype": "bfloat16", "transformers_version": "4.28.1", "use_cache": false, "verbose": 0, "vocab_size": 50432}"""
MPT = json.loads(MPT_7B_STORYWRITER)
BLOOM = json.loads(BLOOM_560M)


@pytest.mark.parametrize("heads", [1, 2, 3, 6, 7, 16, 20, 40, 64, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    ours = torch.tensor(compute_slopes(heads))
    for bias in (build_alibi_tensor(torch.ones(1, 2), heads, torch.float32), build_mpt_alibi_tensor(heads, 2)):
        rows = bias.view(heads, 2)
        torch.testing.assert_close(ours, rows[:, 1] - rows[:, 0])


def test_another_largest_exponent() -> None:
    assert compute_slopes(4, 16.0) == (2.0**-4, 2.0**-8, 2.0**-12, 2.0**-16)
    assert compute_slopes(3, 16.0) == (2.0**-8, 2.0**-16, 2.0**-4)


@pytest.mark.parametrize(
    ("text", "num_layers", "heads", "head_dim", "context"),
    [
        (BLOOM_560M, 24, 16, 64, 2048),
        (BLOOM_176B, 70, 112, 128, 2048),
        (MPT_7B_STORYWRITER, 32, 32, 128, 65536),
    ],
)
def test_published_configs(text: str, num_layers: int, heads: int, head_dim: int, context: int) -> None:
    spec, _ = read_model(json.loads(text))
    (group,) = spec.kv_groups
    assert group.layers == tuple(range(num_layers))
    assert (group.num_kv_heads, group.head_dim) == (heads, head_dim)
    assert (spec.max_position, spec.tie_word_embeddings) == (context, True)
    assert (spec.embedding_norm is not None) == (spec.architecture == "BloomForCausalLM")


def test_two_spellings_of_mpt() -> None:
    assert read_model(MPT) == read_model(MPT | {"architectures": ["MptForCausalLM"]})


def test_numbers_of_mpt() -> None:
    """transformers does not read the first two; MosaicML's code does."""

    def attention(**changes: Any) -> AttentionSpec:
        found = read_model({**MPT, "attn_config": {**MPT["attn_config"], **changes}})[0].layers[0].attention
        assert isinstance(found, AttentionSpec)
        return found

    wider = read_model({**MPT, "expansion_ratio": 3})[0].layers[0].ffn
    assert getattr(wider, "intermediate_size", None) == 3 * 4096
    assert attention().alibi_slopes == compute_slopes(32, 16.0)
    assert (attention().qkv_clip, attention(clip_qkv=None).qkv_clip) == (6.0, None)
    assert (attention().scale, attention(softmax_scale=0.5).scale) == (128**-0.5, 0.5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_bias": False}, r"no_bias False is not supported \(supported: True\)"),
        ({"norm_type": "rmsnorm"}, "norm_type 'rmsnorm' is not supported"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale is not supported"),
        ({"n_heads": 31}, "d_model 4096 is not a multiple of n_heads 31"),
        ({"n_heads": 2**20}, "n_heads must be an integer of at most 65536"),
        ({"expansion_ratio": 0}, "expansion_ratio must be an integer of at least 1"),
        ({"attn_config": {"alibi": False}}, r"attn_config: alibi False is not supported \(supported: True\)"),
        ({"attn_config": {"attn_type": "multiquery_attention"}}, "attn_type 'multiquery_attention' is not supported"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm is not supported"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln is not supported"),
        ({"attn_config": {"attn_uses_sequence_id": True}}, "attn_uses_sequence_id is not supported"),
        ({"attn_config": {"clip_qkv": -1}}, "attn_config: clip_qkv must be a number above 0"),
        ({"attn_config": {"rope": True}}, "attn_config: unknown keys.*: rope"),
    ],
)
def test_refused_of_mpt(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(MPT | change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm is not supported",
        ),
        ({"num_attention_heads": 15}, "hidden_size 1024 is not a multiple of n_head 15"),
        ({"n_head": 8}, "n_head and num_attention_heads contradict each other"),
        ({"n_inner": 5}, r"n_inner 5 is not supported \(supported: 4096\)"),
        ({"n_embed": None}, "hidden_size is missing"),
        ({"alibi": False}, "unknown keys.*: alibi"),
    ],
)
def test_refused_of_bloom(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        read_model(BLOOM | change)
