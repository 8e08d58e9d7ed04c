"""config.json of encoders as their authors publish them, where that differs from transformers' format."""

from __future__ import annotations

import pytest

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.rope_spec import LinearScaling
from serve_llm.engine.model.spec import AttentionSpec, MLPSpec

NOMIC = {
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "attn_pdrop": 0.0,
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 2048,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "model_type": "nomic_bert",
    "n_embd": 96,
    "n_head": 4,
    "n_inner": 128,
    "n_layer": 2,
    "n_positions": 8192,
    "prenorm": False,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "use_rms_norm": False,
    "vocab_size": 512,
}
NEW = {
    "architectures": ["NewModel"],
    "hidden_act": "gelu",
    "hidden_size": 96,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-12,
    "layer_norm_type": "layer_norm",
    "logn_attention_scale": False,
    "max_position_embeddings": 8192,
    "model_type": "new",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "pack_qkv": True,
    "position_embedding_type": "rope",
    "rope_scaling": {"factor": 8.0, "type": "ntk"},
    "rope_theta": 20000,
    "type_vocab_size": 1,
    "unpad_inputs": False,
    "use_memory_efficient_attention": False,
    "vocab_size": 512,
}
OLD_MODERNBERT = {
    "architectures": ["ModernBertModel"],
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "hidden_activation": "gelu",
    "hidden_size": 96,
    "intermediate_size": 128,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-05,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "position_embedding_type": "absolute",
    "reference_compile": True,
    "vocab_size": 512,
}


def attention_of(config: dict[str, object], layer: int) -> AttentionSpec:
    spec, _ = read_model(config)
    attention = spec.layers[layer].attention
    assert isinstance(attention, AttentionSpec) and not attention.causal
    return attention


def test_nomic_bert() -> None:
    spec, weights = read_model(NOMIC)
    assert (spec.hidden_size, spec.max_position, len(spec.layers), spec.lm_head) == (96, 2048, 2, False)
    assert spec.layers[0].ffn == MLPSpec(128, "silu", gated=True)
    rope = attention_of(NOMIC, 0).rope
    assert rope is not None and rope.base == 1000.0
    assert "nomic_bert.encoder.layers.1.attn.Wqkv.weight" in weights.expand(2)


@pytest.mark.parametrize("key", ["causal", "prenorm", "qkv_proj_bias", "rotary_emb_interleaved"])
def test_nomic_bert_of_another_kind_is_refused(key: str) -> None:
    with pytest.raises(ModelError):
        read_model(NOMIC | {key: True})


def test_gte_scales_rope_for_all_lengths() -> None:
    rope = attention_of(NEW, 0).rope
    assert rope is not None and rope.base == 160_000.0
    assert rope.scaling == LinearScaling(8.0 ** (2 / 24))
    _, weights = read_model(NEW | {"architectures": ["NewForSequenceClassification"]})
    assert "new.pooler.dense.weight" in weights.expand(2)


def test_modernbert() -> None:
    windows = [attention_of(OLD_MODERNBERT, layer).sliding_window for layer in range(4)]
    assert windows == [None, 65, 65, None]
    bases = [rope.base for layer in range(2) if (rope := attention_of(OLD_MODERNBERT, layer).rope) is not None]
    assert bases == [160_000.0, 10_000.0]


def test_an_embedder_that_is_not_causal_is_refused() -> None:
    config = {"architectures": ["Qwen2Model"], "is_causal": False, "hidden_size": 96, "vocab_size": 512}
    with pytest.raises(ModelError, match="is_causal"):
        read_model(config)


JINA = {
    "architectures": ["JinaEmbeddingsV3Model"],
    "hidden_size": 96,
    "intermediate_size": 128,
    "model_type": "jina_embeddings_v3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}


def test_jina() -> None:
    spec, weights = read_model(JINA)
    assert spec.max_position == 8194 and spec.learned_positions is None
    rope = attention_of(JINA, 0).rope
    assert rope is not None and rope.base == 20_000.0
    assert "roberta.encoder.layers.1.mixer.Wqkv.weight" in weights.expand(2)


@pytest.mark.parametrize(
    ("fields", "position"),
    [
        ({"_name_or_path": "jinaai/jina-bert-v2-qk-post-norm"}, "post_twice"),
        ({"auto_map": {"AutoModel": "jinaai/jina-bert-v2-qk-post-norm--modeling_bert.JinaBertModel"}}, "post_twice"),
        ({"auto_map": {"AutoModel": "jinaai/jina-bert-implementation--modeling_bert.JinaBertModel"}}, "post"),
        ({"auto_map": "none", "_name_or_path": None}, "post"),
        ({}, "post"),
    ],
    ids=range(5),
)
def test_jina_bert_is_told_apart_by_its_code(fields: dict[str, object], position: str) -> None:
    config = {**JINA, "architectures": ["JinaBertModel"], "model_type": "bert", "feed_forward_type": "geglu"}
    spec, _ = read_model({**config, "position_embedding_type": "alibi", **fields})
    assert {layer.norm_position for layer in spec.layers} == {position}
    assert (spec.layers[0].attention.qk_projection_norm is not None) == (position == "post_twice")


def test_jina_reranker_v2_has_names_of_its_own() -> None:
    config = {
        **JINA,
        "architectures": ["XLMRobertaForSequenceClassification"],
        "auto_map": {"AutoConfig": "configuration_xlm_roberta.XLMRobertaFlashConfig"},
        "emb_pooler": None,
        "id2label": {"0": "LABEL_0"},
        "layer_norm_eps": 1e-5,
        "lora_adaptations": None,
        "lora_rank": 4,
        "max_position_embeddings": 1026,
        "model_type": "xlm-roberta",
        "pad_token_id": 1,
        "position_embedding_type": "absolute",
        "type_vocab_size": 1,
        "use_flash_attn": True,
    }
    spec, weights = read_model(config)
    assert spec.max_position == 1024 and spec.pooler is not None and spec.pooler.vector_size(96) == 1
    assert "roberta.encoder.layers.1.mixer.Wqkv.weight" in weights.expand(2)
    _, weights = read_model(config | {"auto_map": {}})
    assert "roberta.encoder.layer.1.attention.self.query.weight" in weights.expand(2)


EMBEDDING_GEMMA = {
    "architectures": ["Gemma3TextModel"],
    "head_dim": 24,
    "hidden_size": 96,
    "intermediate_size": 128,
    "layer_types": ["sliding_attention", "full_attention"],
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 1,
    "sliding_window": 512,
    "vocab_size": 512,
}


def test_embedding_gemma_has_windows_on_both_sides() -> None:
    config = EMBEDDING_GEMMA | {"use_bidirectional_attention": True}
    assert [attention_of(config, layer).sliding_window for layer in range(2)] == [257, None]
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        read_model(EMBEDDING_GEMMA)
    with pytest.raises(ModelError, match="use_bidirectional_attention"):
        read_model(config | {"architectures": ["Gemma3ForCausalLM"]})


def test_a_key_that_was_taken_out_leaves_the_others_as_they_are() -> None:
    """null stays null, and keys that were read earlier stay read."""
    config = EMBEDDING_GEMMA | {"use_bidirectional_attention": True}
    with pytest.raises(ModelError, match="sliding_window"):
        read_model(config | {"sliding_window": None})
    spec, _ = read_model(config | {"num_key_value_heads": None})
    assert spec.layers[0].attention.num_kv_heads == 4


def test_eurobert_averages_hidden_states_before_the_head() -> None:
    sizes = {name: JINA[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")}
    config = sizes | {"architectures": ["EuroBertForSequenceClassification"], "num_hidden_layers": 2}
    spec, _ = read_model(config | {"classifier_pooling": "bos"})
    assert spec.pooler is not None and spec.pooler.pooling_types == ("cls",)
    published = {"clf_pooling": "bos", "bos_token": "<|begin_of_text|>", "mask_token": "<|mask|>", "mask_token_id": 7}
    spec, _ = read_model(config | published)
    assert spec.pooler is not None and spec.pooler.pooling_types == ("cls",)
    with pytest.raises(ModelError, match=r"classifier_pooling 'late' is not supported \(supported: bos, mean\)"):
        read_model(config)


def test_bert_may_have_keys_of_an_unused_pooler() -> None:
    """As in bert-base-chinese, and in bge, m3e and others that were trained from it."""
    bert: dict[str, object] = {
        "architectures": ["BertModel"],
        "vocab_size": 512,
        "hidden_size": 96,
        "intermediate_size": 128,
    }
    bert |= {"num_attention_heads": 4, "num_hidden_layers": 2}
    pooler: dict[str, object] = {"pooler_fc_size": 768, "pooler_num_attention_heads": 12, "pooler_num_fc_layers": 3}
    pooler |= {"pooler_size_per_head": 128, "pooler_type": "first_token_transform", "directionality": "bidi"}
    assert read_model(bert | pooler) == read_model(bert)
