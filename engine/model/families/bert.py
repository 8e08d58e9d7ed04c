"""BERT, RoBERTa and XLM-RoBERTa: learned positions, token types, layer norms after each addition."""

from __future__ import annotations

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.encoder import build_encoder, read_classifier
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.pooled import Read
from serve_llm.engine.model.spec import LearnedPositions, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.model.weight_map import WeightMap

ATTENTION = {
    "attention.self.query": "attention.q",
    "attention.self.key": "attention.k",
    "attention.self.value": "attention.v",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention_norm",
}
LAYER = {
    **ATTENTION,
    "intermediate.dense": "ffn.up",
    "output.dense": "ffn.down",
    "output.LayerNorm": "ffn_norm",
}
# In files of models derived from Google's Chinese and multilingual BERT; transformers does not read them.
UNREAD = (
    *("directionality", "pooler_fc_size", "pooler_num_attention_heads", "pooler_num_fc_layers"),
    *("pooler_size_per_head", "pooler_type"),
)
TYPES_AND_NORM = {"embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "embedding_norm"}
BERT_CLASSIFIER = {"bert.pooler.dense": "pooler.dense", "classifier": "pooler.classifier"}
TOKEN_CLASSIFIER = {"classifier": "pooler.classifier"}
ROBERTA_CLASSIFIER = {"classifier.dense": "pooler.dense", "classifier.out_proj": "pooler.classifier"}


def read_bert(architecture: str) -> Read:
    """Defaults of absent keys are transformers' own (BertConfig)."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        length = config.integer("max_position_embeddings", 512)
        spec = _read(config, architecture, LearnedPositions(length), length, default_eps=1e-12, default_types=2)
        return spec, _build_weights(spec, "bert", "cls", BERT_CLASSIFIER)

    return read


def read_roberta(architecture: str) -> Read:
    """Defaults of absent keys are transformers' own (RobertaConfig, XLMRobertaConfig). Positions begin after the
    padding token's."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        first = config.integer("pad_token_id", 1, lowest=0) + 1
        rows = config.integer("max_position_embeddings", 512)
        if rows <= first:
            raise ModelError(f"config.json: max_position_embeddings {rows} leaves no position after pad_token_id")
        positions = LearnedPositions(rows, offset=first)
        spec = _read(config, architecture, positions, rows - first, default_eps=1e-12, default_types=2)
        return spec, _build_weights(spec, "roberta", "lm_head", ROBERTA_CLASSIFIER)

    return read


def _read(
    config: ConfigReader,
    architecture: str,
    positions: LearnedPositions,
    max_position: int,
    *,
    default_eps: float,
    default_types: int,
) -> ModelSpec:
    config.only("position_embedding_type", "absolute", None)
    spec = build_encoder(
        config,
        architecture,
        max_position=max_position,
        ffn=MLPSpec(config.integer("intermediate_size"), config.choice("hidden_act", ACTIVATIONS, "gelu"), bias=True),
        norm=NormSpec("layer", config.number("layer_norm_eps", default_eps)),
        ropes=[None] * config.layers("num_hidden_layers"),
        positions=positions,
        token_types=config.integer("type_vocab_size", default_types),
        pooler=read_classifier(config, architecture),
    )
    config.ignore("output_past", "gradient_checkpointing")
    config.ignore(*UNREAD)
    config.done()
    return spec


def _build_weights(spec: ModelSpec, base: str, head: str, classifier: dict[str, str]) -> WeightMap:
    """classifier: names of the layers of a classifier of whole texts."""
    classifies_tokens = spec.pooler is not None and spec.pooler.classifies_tokens
    return build_weights(
        spec,
        LAYER,
        base=base,
        embedding_parts={"embeddings.position_embeddings": "positions", **TYPES_AND_NORM},
        head=head,
        pooler=TOKEN_CLASSIFIER if classifies_tokens else classifier,
    )
