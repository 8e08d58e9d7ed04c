"""Names of the tensors of decoders with gated DeltaNet in some layers and gated attention in the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.families.names import ATTENTION, weights
from serve_llm.engine.model.spec import AttentionSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

GATED_ATTENTION = ATTENTION | {"self_attn.q_proj": "attention.q attention.gate"}
OTHERS = {"A_log": "decay", "dt_bias": "decay_bias", "norm.weight": "norm.weight", "out_proj.weight": "output.weight"}


def build_weights(
    spec: ModelSpec, names: Mapping[str, str], inputs: Mapping[str, str], *, by_key_head: bool
) -> WeightMap:
    """names: as in `names.weights`. inputs: projections of the linear layers -> the parameters that they fill.
    by_key_head: whether the rows of each are grouped by key head."""
    linear = {
        index: one.attention for index, one in enumerate(spec.layers) if isinstance(one.attention, GatedDeltaNetSpec)
    }
    full = {index: one.attention for index, one in enumerate(spec.layers) if isinstance(one.attention, AttentionSpec)}
    mixer = next(iter(linear.values()))
    attention = next(iter(full.values()))
    whole = replace(spec, layers=tuple(replace(layer, attention=attention) for layer in spec.layers))
    found = weights(whole, {**names, **GATED_ATTENTION}, norms="plus_one")
    rules = [_in_full_layers(rule, attention, tuple(full)) for rule in found.rules]
    keys = mixer.num_kv_heads * mixer.key_dim
    values = mixer.num_heads * mixer.value_dim
    heads = mixer.num_heads
    sizes = {"q": keys, "k": keys, "v": values, "z": values, "beta": heads, "alpha": heads}

    def add(tensor: str, parameters: list[str], split: tuple[int, ...] = (), groups: int = 1) -> None:
        filled = tuple(f"layers.{{layer}}.attention.{name}" for name in parameters)
        source = f"model.layers.{{layer}}.linear_attn.{tensor}"
        rules.append(WeightRule(source, filled, sizes=split, groups=groups, layers=tuple(linear)))

    for module, joined in inputs.items():
        parts = joined.split()
        split = tuple(sizes[part] for part in parts) if len(parts) > 1 else ()
        add(f"{module}.weight", [f"{part}.weight" for part in parts], split, mixer.num_kv_heads if by_key_head else 1)
    add("conv1d.weight", ["conv.q", "conv.k", "conv.v"], (keys, keys, values))
    for tensor, parameter in OTHERS.items():
        add(tensor, [parameter])
    return replace(found, rules=tuple(rules), ignored=(*found.ignored, r"(model\.)?mtp\..*"))


def _in_full_layers(rule: WeightRule, attention: AttentionSpec, layers: tuple[int, ...]) -> WeightRule:
    if not rule.parameters[0].startswith("layers.{layer}.attention."):
        return rule
    is_gated = len(rule.parameters) > 1  # each head's query, then its gate
    return replace(rule, layers=layers, sizes=(), groups=attention.num_heads if is_gated else 1)
