"""config.json of models with linear attention: what is read, and what is refused."""

from __future__ import annotations

import json
import re

import pytest

from serve_llm.cli.plan.weights import weight_bytes
from serve_llm.common.errors import ModelError
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import AttentionSpec, MoESpec
from serve_llm.engine.parallel.layout import ParallelLayout
from support.tiny import HYBRIDS, config_of

QWEN3_NEXT_80B = """{"architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0.0,
"bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645, "full_attention_interval": 4, "head_dim": 256,
"hidden_act": "silu", "hidden_size": 2048, "initializer_range": 0.02, "intermediate_size": 5120,
"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
"linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [], "model_type": "qwen3_next",
"moe_intermediate_size": 512, "norm_topk_prob": true, "num_attention_heads": 16, "num_experts": 512,
"num_experts_per_tok": 10, "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
"partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null, "rope_theta": 10000000,
"router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512, "tie_word_embeddings": false,
"torch_dtype": "bfloat16", "transformers_version": "4.57.0.dev0", "use_cache": true, "use_sliding_window": false,
"vocab_size": 151936}"""


def test_qwen3_next() -> None:
    spec, _ = read_model(json.loads(QWEN3_NEXT_80B))
    mixers = [layer.attention for layer in spec.layers]
    full = [index for index, mixer in enumerate(mixers) if isinstance(mixer, AttentionSpec)]
    assert full == list(range(3, 48, 4))
    attention, linear, ffn = mixers[3], mixers[0], spec.layers[0].ffn
    assert isinstance(attention, AttentionSpec) and isinstance(linear, GatedDeltaNetSpec) and isinstance(ffn, MoESpec)
    assert attention.rope == RopeSpec(10000000.0, rotary_dim=64)
    assert (attention.num_heads, attention.num_kv_heads, attention.output_gate) == (16, 2, True)
    assert (linear.num_heads, linear.num_kv_heads, linear.key_dim, linear.value_dim) == (32, 16, 128, 128)
    assert (ffn.router.num_experts, ffn.router.top_k, ffn.router.renormalise, ffn.shared_expert_gate) == (
        512,
        10,
        True,
        True,
    )
    assert spec.max_position == 262144
    shard = build_shard(spec, ParallelLayout(), 0)
    assert shard.count_state_bytes(spec) == pytest.approx(75.375 * 2**20)
    assert weight_bytes(spec, shard, 2, "cuda").held / 2e9 == pytest.approx(79.67, abs=0.01)


@pytest.mark.parametrize("family", HYBRIDS[1:])
def test_qwen3_5_has_keys_for_what_is_always_so(family: str) -> None:
    plain = config_of(family)
    more = {"attn_output_gate": True, "mamba_ssm_dtype": "float32", "mtp_num_hidden_layers": 1}
    assert read_model({**plain, **more}) == read_model(plain)
    sections = {"mrope_interleaved": True, "mrope_section": [11, 11, 10]}
    assert read_model({**plain, "rope_parameters": {**plain["rope_parameters"], **sections}}) == read_model(plain)


@pytest.mark.parametrize(
    ("family", "change", "words"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"] * 3}, "layer_types must name linear_attention or"),
        ("qwen3_next", {"layer_types": ["linear_attention"] * 3}, "both at least once"),
        ("qwen3_next", {"linear_num_key_heads": 4}, "6 value heads cannot share 4 key heads evenly"),
        ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3_next", {"linear_key_gate": 2}, "unknown keys, which may mean another computation: linear_key_gate"),
        ("qwen3_5_text", {"attn_output_gate": False}, "attn_output_gate False is not supported"),
        ("qwen3_5_moe_text", {"norm_topk_prob": False}, "norm_topk_prob False is not supported"),
        ("qwen3_5_moe_text", {"mlp_only_layers": [1]}, "mlp_only_layers is not supported"),
    ],
)
def test_what_is_refused(family: str, change: dict[str, object], words: str) -> None:
    with pytest.raises(ModelError, match=re.escape(words)):
        read_model({**config_of(family), **change})
