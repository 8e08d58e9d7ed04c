"""Jina's encoders: v2 (JinaBERT) is BERT with ALiBi and a gated feed-forward network, v3 is XLM-RoBERTa with rope."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.alibi import compute_slopes
from serve_llm.engine.model.families.bert import ROBERTA_CLASSIFIER
from serve_llm.engine.model.families.encoder import build_encoder, build_first_token_classifier, read_heads
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.pooled import Read, read_num_labels
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.spec import Activation, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

V2_LAYER = {
    "attention.self.query": "attention.q",
    "attention.self.key": "attention.k",
    "attention.self.value": "attention.v",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
    "mlp.gated_layers": "ffn.gate ffn.up",
    "mlp.wo": "ffn.down",
    "mlp.layernorm": "ffn_norm",
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


def read_jina_bert(architecture: str) -> Read:
    """JinaBERT (arXiv:2310.19923), whose ALiBi lowers the scores of tokens on both sides. Defaults of absent keys are
    those of the model's own code."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        _, heads, _ = read_heads(config)
        config.only("position_embedding_type", "alibi")
        activation = config.choice("feed_forward_type", V2_ACTIVATIONS, "original")
        config.ignore("hidden_act", "emb_pooler", "attn_implementation")
        spec = build_encoder(
            config,
            architecture,
            max_position=config.integer("max_position_embeddings", 512),
            ffn=MLPSpec(config.integer("intermediate_size"), activation, gated=True, down_bias=True),
            norm=NormSpec("layer", config.number("layer_norm_eps", 1e-12)),
            ropes=[None] * config.layers("num_hidden_layers"),
            token_types=config.integer("type_vocab_size", 2),
            alibi_slopes=compute_slopes(heads),
        )
        config.done()
        weights = build_weights(
            spec,
            V2_LAYER,
            prefix="bert.",
            layers="bert.encoder.layer",
            embedding="bert.embeddings.word_embeddings",
            embedding_parts={
                "bert.embeddings.token_type_embeddings": "token_types",
                "bert.embeddings.LayerNorm": "embedding_norm",
            },
            head="cls",
        )
        return spec, weights

    return read


def read_jina_v3(architecture: str) -> Read:
    """Defaults of absent keys are transformers' own (JinaEmbeddingsV3Config)."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        width, _, head_dim = read_heads(config)
        activation = config.choice("hidden_act", ACTIVATIONS, "gelu")
        length = config.integer("max_position_embeddings", 8194)
        rope, length = read_rope(config, length, head_dim, default_base=20_000.0)
        pooler = None
        if architecture.endswith("ForSequenceClassification"):
            pooler = build_first_token_classifier(width, read_num_labels(config))
        spec = build_encoder(
            config,
            architecture,
            max_position=length,
            ffn=MLPSpec(config.integer("intermediate_size"), activation, bias=True),
            norm=NormSpec("layer", config.number("layer_norm_eps", 1e-5)),
            ropes=[rope] * config.layers("num_hidden_layers"),
            token_types=config.integer("type_vocab_size", 1),
            pooler=pooler,
        )
        config.done()
        weights = build_weights(
            spec,
            V3_LAYER,
            prefix="roberta.",
            layers="roberta.encoder.layers",
            embedding="roberta.embeddings.word_embeddings",
            embedding_parts={
                "roberta.embeddings.token_type_embeddings": "token_types",
                "roberta.emb_ln": "embedding_norm",
            },
            head="lm_head",
            pooler=ROBERTA_CLASSIFIER if pooler is not None else None,
        )
        return spec, weights

    return read
