"""ModernBERT: norms before attention and feed-forward, rope, gated gelu, and local attention in most layers."""

from __future__ import annotations

from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.families.decoder import read_layer_kinds
from serve_llm.engine.model.families.encoder import build_encoder, read_heads
from serve_llm.engine.model.families.encoder_names import build_weights
from serve_llm.engine.model.families.gpt2 import ACTIVATIONS
from serve_llm.engine.model.families.pooled import Read, read_num_labels
from serve_llm.engine.model.families.rope import read_rope
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import MLPSpec, ModelSpec, NormSpec, PoolerLayer, PoolerSpec, PoolingType
from serve_llm.engine.model.weight_map import WeightMap

LAYER = {
    "attn.Wqkv": "attention.q attention.k attention.v",
    "attn.Wo": "attention.output",
    "attn_norm": "attention_norm",
    "mlp.Wi": "ffn.gate ffn.up",
    "mlp.Wo": "ffn.down",
    "mlp_norm": "ffn_norm",
}
CLASSIFIER = {"head.dense": "pooler.dense", "head.norm": "pooler.dense_norm", "classifier": "pooler.classifier"}
CLASSIFIER_POOLING: dict[str, PoolingType] = {"cls": "cls", "mean": "mean"}
UNUSED = (
    "initializer_cutoff_factor embedding_dropout mlp_dropout decoder_bias deterministic_flash_attn sparse_prediction "
    "sparse_pred_ignore_index reference_compile repad_logits_with_grad cls_token_id layer_norm_eps"
).split()


def read_modernbert(architecture: str) -> Read:
    """Defaults of absent keys are transformers' own (ModernBertConfig)."""

    def read(config: ConfigReader) -> tuple[ModelSpec, WeightMap]:
        width, _, head_dim = read_heads(config)
        norm = NormSpec("layer", config.number("norm_eps", 1e-5), bias=config.flag("norm_bias", False))
        num_layers = config.layers("num_hidden_layers")
        every = config.integer("global_attn_every_n_layers", 3)
        slides = read_layer_kinds(config, num_layers) or [index % every != 0 for index in range(num_layers)]
        near, far = _read_ropes(config, head_dim)
        window = config.integer("local_attention", 128) // 2 + 1  # tokens on each side, plus the token itself
        pooler = _read_classifier(config, architecture, width, norm)
        mlp_bias = config.flag("mlp_bias", False)
        activation = config.choice("hidden_activation", ACTIVATIONS, "gelu")
        spec = build_encoder(
            config,
            architecture,
            max_position=config.integer("max_position_embeddings", 8192),
            ffn=MLPSpec(config.integer("intermediate_size"), activation, gated=True, bias=mlp_bias),
            norm=norm,
            ropes=[near if slide else far for slide in slides],
            windows=[window if slide else None for slide in slides],
            bias=config.flag("attention_bias", False),
            norm_position="pre",
            pooler=pooler,
        )
        first, *others = spec.layers
        spec = replace(spec, layers=(replace(first, has_attention_norm=False), *others))
        config.only("position_embedding_type", "absolute", "sans_pos", None)
        config.ignore("classifier_pooling", "classifier_bias", "classifier_activation", "classifier_dropout", *UNUSED)
        config.done()
        return spec, _build_weights(spec)

    return read


def _build_weights(spec: ModelSpec) -> WeightMap:
    weights = build_weights(
        spec,
        LAYER,
        base="model",
        layers="layers",
        embedding="embeddings.tok_embeddings",
        embedding_parts={"embeddings.norm": "embedding_norm", "final_norm": "final_norm"},
        head="decoder",
        pooler=CLASSIFIER,
        ignored=() if spec.pooler is not None else (r"(model\.)?head\..*",),
    )
    later = tuple(range(1, len(spec.layers)))  # the embedding's norm serves as the first layer's
    rules = (replace(rule, layers=later) if ".attn_norm." in rule.source else rule for rule in weights.rules)
    return replace(weights, rules=tuple(rules))


def _read_ropes(config: ConfigReader, head_dim: int) -> tuple[RopeSpec, RopeSpec]:
    """The rope of layers with local attention, and that of the others."""
    parameters = config.inner("rope_parameters")
    config.empty("rope_scaling")
    ropes = []
    for kind, key, default in (
        ("sliding_attention", "local_rope_theta", 10_000.0),
        ("full_attention", "global_rope_theta", 160_000.0),
    ):
        base = config.number(key, default)
        section = None if parameters is None else parameters.inner(kind)
        if section is None:
            ropes.append(RopeSpec(base))
        else:
            rope, _ = read_rope(ConfigReader({}), 1, head_dim, default_base=base, scaling=section)
            ropes.append(rope)
    if parameters is not None:
        parameters.done()
    if any(rope.scaling is not None for rope in ropes):
        raise ModelError("config.json: rope_parameters: scaled rope is not supported in ModernBERT")
    return ropes[0], ropes[1]


def _read_classifier(config: ConfigReader, architecture: str, width: int, norm: NormSpec) -> PoolerSpec | None:
    if not architecture.endswith("Classification"):
        return None
    activation = config.choice("classifier_activation", ACTIVATIONS, "gelu")
    dense = PoolerLayer("dense", width, bias=config.flag("classifier_bias", False), activation=activation, norm=norm)
    layers = (dense, PoolerLayer("classifier", read_num_labels(config)))
    pooling = config.choice("classifier_pooling", CLASSIFIER_POOLING, "cls")
    classifies_tokens = architecture.endswith("ForTokenClassification")
    return PoolerSpec((pooling,), layers, is_classifier=True, classifies_tokens=classifies_tokens)
