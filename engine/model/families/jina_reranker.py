"""jina-reranker-v2: XLM-RoBERTa's classifier, whose tensors are named as in jina-embeddings-v3."""

from __future__ import annotations

from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.bert import ROBERTA_CLASSIFIER, read_roberta
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.jina import V3_EMBEDDING, V3_LAYER
from serve_llm.engine.model.families.pooled import Read
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap

CONFIG_CLASS = "XLMRobertaFlashConfig"


def read_xlm_roberta_classifier(architecture: str) -> Read:
    """Read the config in transformers' form or in that of Jina's own code; `auto_map` distinguishes them."""
    read_plain = read_roberta(architecture)

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        if not config.names_code_class(CONFIG_CLASS):
            return read_plain(config)
        config.only("lora_adaptations", None)
        config.only("load_trained_adapters", False, None)
        config.ignore("use_flash_attn", "emb_pooler", "matryoshka_dimensions", "truncate_dim")
        config.ignore("lora_rank", "lora_dropout_p", "lora_alpha", "lora_main_params_trainable")
        spec, _ = read_plain(config)
        weights = build_weights(
            spec,
            V3_LAYER,
            base="roberta",
            layers="encoder.layers",
            embedding_parts={"embeddings.position_embeddings": "positions", **V3_EMBEDDING},
            head="lm_head",
            pooler=ROBERTA_CLASSIFIER,
        )
        return spec, weights

    return read
