"""The scales by which AutoAWQ divides the activation's output in a feed-forward network. Torch-free.

In networks without a gate, it multiplies the inputs of the last weight by them, which reduces the rounding error.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import replace

from serve_llm.engine.model.spec import MLPSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

ACTIVATIONS = {  # architecture -> the module of a layer that AutoAWQ replaces
    "BloomForCausalLM": "transformer.h.{layer}.mlp.gelu_impl",
    "FalconForCausalLM": "transformer.h.{layer}.mlp.act",
    "GPTJForCausalLM": "transformer.h.{layer}.mlp.act",
    "GPTNeoXForCausalLM": "gpt_neox.layers.{layer}.mlp.act",
    "MptForCausalLM": "transformer.blocks.{layer}.ffn.act",
    "Starcoder2ForCausalLM": "model.layers.{layer}.mlp.act",
}


def add_activation_scales(spec: ModelSpec, weights: WeightMap) -> tuple[ModelSpec, WeightMap]:
    """Add the scales that AutoAWQ writes for these architectures."""
    module = ACTIVATIONS.get(spec.architecture)
    if module is None:
        return spec, weights
    rule = WeightRule(f"{module}.scales", ("layers.{layer}.ffn.activation_scales",))
    return _change_ffn(spec, lambda ffn: replace(ffn, activation_scales=True)), replace(
        weights, rules=(*weights.rules, rule)
    )


def drop_absent_scales(spec: ModelSpec, weights: WeightMap, stored: Container[str]) -> tuple[ModelSpec, WeightMap]:
    """Drop the scales if the checkpoint has none, as other AWQ writers omit them. stored: names of tensors."""
    source = f"{ACTIVATIONS.get(spec.architecture, '')}.scales"
    kept = tuple(rule for rule in weights.rules if rule.source != source)
    is_stored = any(source.format(layer=index) in stored for index in range(len(spec.layers)))
    if is_stored or len(kept) == len(weights.rules):
        return spec, weights
    return _change_ffn(spec, lambda ffn: replace(ffn, activation_scales=False)), replace(weights, rules=kept)


def _change_ffn(spec: ModelSpec, change: Callable[[MLPSpec], MLPSpec]) -> ModelSpec:
    layers = [
        replace(layer, ffn=change(layer.ffn)) if isinstance(layer.ffn, MLPSpec) else layer for layer in spec.layers
    ]
    return replace(spec, layers=tuple(layers))
