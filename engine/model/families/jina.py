"""Jina's encoders: v2 (JinaBERT) is BERT with ALiBi and a gated feed-forward network, v3 is XLM-RoBERTa with rope."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.alibi import compute_slopes
from serve_llm.engine.model.families.bert import ATTENTION, BERT_CLASSIFIER, ROBERTA_CLASSIFIER, TYPES_AND_NORM
from serve_llm.engine.model.families.encoder import build_encoder, read_classifier, read_heads
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.pooled import Read
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.spec import Activation, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

V2_LAYER = {
    **ATTENTION,
    "mlp.gated_layers": "ffn.gate ffn.up",
    "mlp.wo": "ffn.down",
    "mlp.layernorm": "ffn_norm",
}
V2_QK_NORM_CODE = "jinaai/jina-bert-v2-qk-post-norm"
V2_QK_NORM_LAYER = {
    **ATTENTION,
    "attention.self.layer_norm_q": "attention.q_norm",
    "attention.self.layer_norm_k": "attention.k_norm",
    "layer_norm_1": "attention_post_norm",
    "mlp.up_gated_layer": "ffn.up ffn.gate",
    "mlp.down_layer": "ffn.down",
    "layer_norm_2": "ffn_norm",
}
V2_ACTIVATIONS: dict[str, Activation] = {"geglu": "gelu", "reglu": "relu"}
V3_LAYER = {
    "mixer.Wqkv": "attention.q attention.k attention.v",
    "mixer.out_proj": "attention.output",
    "norm1": "attention_norm",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
    "norm2": "ffn_norm",
}
V3_EMBEDDING = {"embeddings.token_type_embeddings": "token_types", "emb_ln": "embedding_norm"}


def read_jina_bert(architecture: str) -> Read:
    """JinaBERT (arXiv:2310.19923), whose ALiBi lowers the scores of tokens on both sides. A second form, such as
    jina-embeddings-v2-base-code, norms queries and keys and adds attention's input twice; only the name of its code
    repository distinguishes it. Defaults of absent keys are those of the model's own code."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        _, heads, _ = read_heads(config)
        config.only("position_embedding_type", "alibi")
        activation = config.choice("feed_forward_type", V2_ACTIVATIONS, "original")
        config.ignore("hidden_act", "emb_pooler", "attn_implementation")
        norm = NormSpec("layer", config.number("layer_norm_eps", 1e-12))
        has_qk_norm = config.names_code(V2_QK_NORM_CODE)
        spec = build_encoder(
            config,
            architecture,
            max_position=config.integer("max_position_embeddings", 512),
            ffn=MLPSpec(config.integer("intermediate_size"), activation, gated=True, down_bias=True),
            norm=norm,
            norm_position="post_twice" if has_qk_norm else "post",
            qk_projection_norm=norm if has_qk_norm else None,
            ropes=[None] * config.layers("num_hidden_layers"),
            token_types=config.integer("type_vocab_size", 2),
            alibi_slopes=compute_slopes(heads),
            pooler=read_classifier(config, architecture),
        )
        config.done()
        weights = build_weights(
            spec,
            V2_QK_NORM_LAYER if has_qk_norm else V2_LAYER,
            base="bert",
            embedding_parts=TYPES_AND_NORM,
            head="cls",
            pooler=BERT_CLASSIFIER,
        )
        return spec, weights

    return read


def read_jina_v3(architecture: str) -> Read:
    """Defaults of absent keys are transformers' own (JinaEmbeddingsV3Config)."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        _, _, head_dim = read_heads(config)
        activation = config.choice("hidden_act", ACTIVATIONS, "gelu")
        length = config.integer("max_position_embeddings", 8194)
        rope, length = read_rope(config, length, head_dim, default_base=20_000.0)
        spec = build_encoder(
            config,
            architecture,
            max_position=length,
            ffn=MLPSpec(config.integer("intermediate_size"), activation, bias=True),
            norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5)),
            ropes=[rope] * config.layers("num_hidden_layers"),
            token_types=config.integer("type_vocab_size", 1),
            pooler=read_classifier(config, architecture),
        )
        config.done()
        weights = build_weights(
            spec,
            V3_LAYER,
            base="roberta",
            layers="encoder.layers",
            embedding_parts=V3_EMBEDDING,
            head="lm_head",
            pooler=ROBERTA_CLASSIFIER,
        )
        return spec, weights

    return read
