"""Names of an encoder's tensors in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from serve_llm.engine.model.spec import AttentionSpec, MLPSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

_LAYER_NORMS = ("attention_norm", "attention_post_norm", "ffn_norm", "embedding_norm", "final_norm")


def build_weights(
    spec: ModelSpec,
    names: Mapping[str, str],
    *,
    base: str,
    layers: str = "encoder.layer",
    embedding: str = "embeddings.word_embeddings",
    embedding_parts: Mapping[str, str],
    head: str,
    pooler: Mapping[str, str] | None = None,
    ignored: Sequence[str] = (),
) -> WeightMap:
    """Build the weight map of an encoder, with biases where the spec has them.

    names: module of a layer in the checkpoint -> the parameters that it fills, separated by spaces. base: the base
    model's name in checkpoints with a head. layers, embedding, embedding_parts: modules in it: the list of layers, the
    embedding, and others -> parameters. head: how the names of a language model's head begin, which is ignored. pooler:
    modules of a classifier -> layers of the pooler; unused if the spec has none.
    """
    prefix = f"{base}."
    if spec.pooler is None:
        pooler = None
    biased = _find_biases(spec)

    def build_rules(source: str, joined: str) -> list[WeightRule]:
        parameters = joined.split()
        kind_of = parameters[0].removeprefix("layers.{layer}.")
        kinds = ("weight", "bias") if biased.get(kind_of) else ("weight",)
        return [WeightRule(f"{source}.{kind}", tuple(f"{one}.{kind}" for one in parameters)) for kind in kinds]

    rules: list[WeightRule] = []
    for module, joined in names.items():
        in_layers = " ".join(f"layers.{{layer}}.{one}" for one in joined.split())
        rules += build_rules(f"{prefix}{layers}.{{layer}}.{module}", in_layers)
    for module, parameter in embedding_parts.items():
        rules += build_rules(f"{prefix}{module}", parameter)
    for module, parameter in (pooler or {}).items():
        rules += build_rules(module, parameter)
    outside = {f"{module.partition('.')[0]}." for module in pooler or () if not module.startswith(prefix)}
    return WeightMap(
        rules=tuple(rules),
        embedding=f"{prefix}{embedding}.weight",
        head=f"{head}.decoder.weight",
        prefix=prefix,
        outside=(f"{head}.", *sorted(outside)),
        ignored=(rf"{head}\..*", r".*\.position_ids", rf"{prefix}pooler\.dense\.(weight|bias)", *ignored),
    )


def _find_biases(spec: ModelSpec) -> dict[str, bool]:
    """Return the parameters, without the layer's number, that have a bias."""
    layer = spec.layers[-1]
    attention = layer.attention
    ffn = layer.ffn
    assert isinstance(attention, AttentionSpec) and isinstance(ffn, MLPSpec)
    biased = dict.fromkeys(("attention.q", "attention.k", "attention.v"), attention.qkv_bias)
    biased["attention.output"] = attention.output_bias
    has_qk_bias = attention.qk_projection_norm is not None and attention.qk_projection_norm.has_bias
    biased |= dict.fromkeys(("attention.q_norm", "attention.k_norm"), has_qk_bias)
    biased |= {"ffn.gate": ffn.bias, "ffn.up": ffn.bias, "ffn.down": ffn.has_down_bias}
    biased |= dict.fromkeys(_LAYER_NORMS, layer.norm.has_bias)
    for head in spec.pooler.layers if spec.pooler is not None else ():
        biased[f"pooler.{head.name}"] = head.bias
        biased[f"pooler.{head.name}_norm"] = head.norm is not None and head.norm.has_bias
    return biased
