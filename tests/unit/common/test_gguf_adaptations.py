"""Settings of GGUF files that are more than a renamed metadata key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.errors import ModelError
from serve_llm.common.gguf.adaptations import ADAPTATIONS
from serve_llm.common.gguf.architectures import ARCHITECTURES
from serve_llm.common.gguf.config import build_config, read_pooling
from serve_llm.common.gguf.file import STORAGE_TYPES, GGUFFile, StoredTensor
from serve_llm.engine.model.registry import read_model

SIZES = {"context_length": 64, "embedding_length": 64, "block_count": 3, "feed_forward_length": 256}
SIZES |= {"attention.head_count": 4}
F32 = next(one for one in STORAGE_TYPES.values() if one.name == "F32")
DEEPSEEK = {"rope.dimension_count": 8, "attention.key_length": 24, "attention.value_length": 16}
KEYS = (  # keys that the adaptations read
    "attention.causal attention.clamp_kqv attention.key_length attention.key_length_mla attention.max_alibi_bias "
    "attention.value_length attention.value_length_mla block_count expert_count expert_gating_func expert_group_count "
    "expert_group_used_count expert_shared_feed_forward_length nextn_predict_layers pooling_type rope.dimension_count "
    "rope.scaling.yarn_log_multiplier tensor_data_layout feed_forward_length attention.head_count_kv "
    "attention.temperature_scale rope.scaling.type attention.layer_norm_rms_epsilon ssm.inner_size ssm.time_step_rank"
).split()


def make_file(architecture: str, tensors: tuple[str, ...] = (), **more: object) -> GGUFFile:
    """Write a file. more: metadata keys of the architecture, with "__" for each dot."""
    values = SIZES | {key.replace("__", "."): value for key, value in more.items()}
    metadata = {"general.architecture": architecture} | {f"{architecture}.{key}": one for key, one in values.items()}
    stored = StoredTensor(F32, (32, 64), 0, 0)
    return GGUFFile(Path("a.gguf"), metadata, dict.fromkeys(("token_embd.weight", *tensors), stored))


def test_groups_of_experts_of_files_that_lack_them() -> None:
    for experts, sigmoid, expected in ((256, True, (8, 4)), (160, False, (8, 3)), (64, False, (1, 1))):
        gating = {"expert_gating_func": 2} if sigmoid else {}
        config = build_config(make_file("deepseek2", expert_count=experts, **DEEPSEEK, **gating))
        assert (config["n_group"], config["topk_group"]) == expected
        assert config["architectures"] == [f"DeepseekV{3 if sigmoid else 2}ForCausalLM"]
    groups = {"expert_group_count": 4, "expert_group_used_count": 2}
    assert build_config(make_file("deepseek2", expert_count=256, **DEEPSEEK, **groups))["n_group"] == 4


def test_sizes_of_heads_in_old_and_new_files() -> None:
    """New files also state the sizes of the latent vector."""
    new = {"attention.key_length": 520, "attention.value_length": 512}
    new |= {"attention.key_length_mla": 24, "attention.value_length_mla": 16}
    for sizes in ({}, new):
        config = build_config(make_file("deepseek2", **(DEEPSEEK | sizes)))
        assert [config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")] == [16, 8, 16]


def test_settings_of_yarn() -> None:
    yarn = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 16}
    more = {
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "rope.scaling.yarn_ext_factor": 1.0,
    }
    plain = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    assert build_config(make_file("qwen2", **yarn))["rope_scaling"] == plain
    betas = {"beta_fast": 32.0, "beta_slow": 1.0}
    assert build_config(make_file("qwen2", **yarn, **more))["rope_scaling"] == plain | betas
    scaled = build_config(make_file("deepseek2", **DEEPSEEK, **yarn, rope__scaling__yarn_log_multiplier=0.1))
    assert scaled["rope_scaling"] == plain | {"mscale": 1.0, "mscale_all_dim": 1.0}
    with pytest.raises(ModelError, match=r"qwen2\.rope\.scaling\.yarn_attn_factor 2\.0 is not supported"):
        build_config(make_file("qwen2", **yarn, rope__scaling__yarn_attn_factor=2.0))


def test_queries_of_mistral3() -> None:
    yarn = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 16384,
        "rope.scaling.yarn_log_multiplier": 1.0,
    }
    scaled = build_config(make_file("mistral3", **yarn, attention__temperature_scale=0.5))
    assert scaled["rope_scaling"] == {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 16384,
    } | {
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.5,
    }
    assert build_config(make_file("mistral3"))["rope_scaling"] == {"rope_type": "default"}
    assert "mscale" not in str(build_config(make_file("mistral3", **yarn | {"rope.scaling.yarn_log_multiplier": 0.0})))


def test_layers_that_predict_several_tokens_are_not_used() -> None:
    config = build_config(make_file("glm4moe", nextn_predict_layers=1))
    assert config["num_hidden_layers"] == 2
    stored = config["quantization_config"]
    assert isinstance(stored, dict) and stored["unused_layers"] == 1


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35", "qwen35moe"])
def test_sizes_of_linear_attention(architecture: str) -> None:
    sizes = {"ssm.inner_size": 64, "ssm.time_step_rank": 4, "ssm.group_count": 2, "ssm.state_size": 8}
    config = build_config(make_file(architecture, **sizes, nextn_predict_layers=1))
    assert [config[f"linear_{key}"] for key in ("value_head_dim", "num_value_heads", "num_key_heads")] == [16, 4, 2]
    assert (config["linear_key_head_dim"], config["num_hidden_layers"]) == (8, 2)


def test_the_norms_of_modernbert_have_one_epsilon_in_two_keys() -> None:
    norms = {"attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5}
    config = build_config(make_file("modern-bert", **norms))
    assert config["norm_eps"] == 1e-5 and "rms_norm_eps" not in config
    assert config["global_rope_theta"] == 160_000.0


def test_layouts_of_falcon() -> None:
    seven = build_config(make_file("falcon", attention__head_count_kv=1))
    assert seven["multi_query"] is True and "new_decoder_architecture" not in seven
    forty = build_config(make_file("falcon", ("blk.0.attn_norm_2.weight",), attention__head_count_kv=2))
    assert (forty["num_kv_heads"], forty["num_ln_in_parallel_attn"]) == (2, 2)


@pytest.mark.parametrize(
    ("architecture", "more", "message"),
    [
        ("deepseek2", {}, r"deepseek2\.rope\.dimension_count must be a number above 0, but is None"),
        ("deepseek2", DEEPSEEK | {"attention.key_length": 8}, r"attention\.key_length .* fit rope\.dimension_count 8"),
        ("glm4moe", {"expert_gating_func": 1}, r"glm4moe\.expert_gating_func 1 is not supported \(supported: 2\)"),
        ("falcon", {"tensor_data_layout": "other"}, r"falcon\.tensor_data_layout 'other' is not supported"),
        ("mpt", {}, r"mpt\.attention\.max_alibi_bias None is not supported: the positions must be those of ALiBi"),
        (
            "mpt",
            {"attention.max_alibi_bias": 8.0, "feed_forward_length": 100},
            r"mpt\.feed_forward_length 100 is not a",
        ),
        (
            "mistral3",
            {"attention.temperature_scale": 0.1},
            r"mistral3\.attention\.temperature_scale 0\.1 is not supported without yarn scaling",
        ),
        (
            "qwen35",
            {"ssm.inner_size": 100, "ssm.time_step_rank": 3},
            r"qwen35\.ssm\.inner_size 100 is not a multiple of ssm\.time_step_rank",
        ),
        ("eurobert", {"attention.causal": True}, r"eurobert\.attention\.causal True is not supported"),
        ("bert", {"attention.causal": True}, r"bert\.attention\.causal True is not supported \(supported: false\)"),
    ],
)
def test_what_is_not_served_is_named(architecture: str, more: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        build_config(make_file(architecture, **more))


VALUES = st.one_of(
    st.integers(-2, 300),
    st.floats(-10, 10),
    st.booleans(),
    st.text(max_size=3),
    st.lists(st.integers(0, 3), max_size=3),
)


@given(st.sampled_from(sorted({*ADAPTATIONS, *ARCHITECTURES})), st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_any_values_are_an_error_or_a_config(architecture: str, more: dict[str, object]) -> None:
    file = make_file(architecture, ("position_embd.weight", "token_types.weight"), **more)
    for read in (build_config, read_pooling):
        try:
            read(file)
        except ModelError as error:
            assert "a.gguf" in str(error)


def test_keys_of_gemma_3_as_ollama_writes_them() -> None:
    heads = {"attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16}
    more = {
        "rope.local.freq_base": 1e4,
        "rope.global.freq_base": 1e6,
        "vision.patch_size": 14,
        "mm.tokens_per_image": 4,
    }
    config = build_config(make_file("gemma3", ("v.blk.0.attn_q.weight",), **heads, **more))
    assert (config["rope_local_base_freq"], config["rope_theta"]) == (1e4, 1e6)
    _, weights = read_model(config)
    assert any(re.fullmatch(pattern, "v.blk.0.attn_q.weight") for pattern in weights.ignored)
