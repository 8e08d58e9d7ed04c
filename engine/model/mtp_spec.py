"""Multi-token prediction (MTP) layers (DeepSeek-V3, arXiv:2412.19437, section 2.2): which checkpoints have one.

No torch. An MTP layer is a decoder layer that predicts ids from hidden states of the served model. Here it is the
model's last layer; DeepSeek-V3 and GLM-4.5 also store it there, Qwen3-Next and Qwen3.5 under names of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

STACKED = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")  # the layer is stored after the model's own
HYBRID = (  # it has full attention and is stored next to the model
    "Qwen3NextForCausalLM",
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
ARCHITECTURES = (*STACKED, *HYBRID)
COUNT = "num_nextn_predict_layers"
HYBRID_COUNT = "mtp_num_hidden_layers"  # absent for Qwen3-Next, whose checkpoints have one layer
# The parts of an MTP layer that a decoder layer lacks: module in the checkpoint -> parameter.
MODULES = {
    "enorm": "mtp.embedding_norm",
    "hnorm": "mtp.hidden_norm",
    "eh_proj": "mtp.projection",
    "shared_head.norm": "mtp.final_norm",
}
HYBRID_MODULES = {
    "pre_fc_norm_embedding": "mtp.embedding_norm",
    "pre_fc_norm_hidden": "mtp.hidden_norm",
    "fc": "mtp.projection",
    "norm": "mtp.final_norm",
}
COPIES = ("embed_tokens", "shared_head.head")  # skipped: the layer uses the model's own


@dataclass(frozen=True)
class MTPSpec:
    """An MTP layer, as the last layer of its model."""

    model: ModelSpec  # the served model with the MTP layer as its last layer
    weights: WeightMap  # includes the parts that a decoder layer lacks

    @property
    def layer(self) -> int:
        """The layer's index in `model`."""
        return len(self.model.layers) - 1

    @property
    def draft(self) -> ModelSpec:
        """The MTP layer as a model of one layer."""
        return replace(self.model, layers=self.model.layers[-1:])


def read_mtp(raw: Mapping[str, object], allowed: Iterable[str] = ()) -> MTPSpec:
    """raw: the served model's config.json. allowed: as in `read_model`. Raises ModelError if it has no MTP layer."""
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture in STACKED:
        return _read_stacked(raw, allowed)
    if architecture in HYBRID:
        return _read_hybrid(raw, allowed)
    raise ModelError(f"MTP layers of {architecture} are not supported; those of {', '.join(ARCHITECTURES)} are")


def _check_count(config: Mapping[str, object], key: str, default: int | None) -> int:
    count = config.get(key, default)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"config.json: {key} is {count}: the checkpoint has no MTP layer")
    return count


def _read_stacked(raw: Mapping[str, object], allowed: Iterable[str]) -> MTPSpec:
    count = _check_count(raw, COUNT, None)
    served, _ = read_model(raw, allowed)
    layer = len(served.layers)
    model, weights = read_model({**raw, "num_hidden_layers": layer + 1, COUNT: count - 1}, allowed)
    prefix = f"model.layers.{layer}"
    rules = tuple(WeightRule(f"{prefix}.{name}.weight", (f"{own}.weight",)) for name, own in MODULES.items())
    copies = tuple(re.escape(f"{prefix}.{name}.weight") for name in COPIES)
    return MTPSpec(model, replace(weights, rules=weights.rules + rules, ignored=weights.ignored + copies))


def _read_hybrid(raw: Mapping[str, object], allowed: Iterable[str]) -> MTPSpec:
    text = raw.get("text_config", raw)
    assert isinstance(text, Mapping), "read_model has refused it"
    _check_count(text, HYBRID_COUNT, 1)
    if text.get("mtp_use_dedicated_embeddings"):
        raise ModelError("config.json: an MTP layer with an embedding of its own is not supported")
    served, _ = read_model(raw, allowed)
    layer = len(served.layers)
    is_linear = [isinstance(one.attention, GatedDeltaNetSpec) for one in served.layers]
    kinds = ["linear_attention" if linear else "full_attention" for linear in is_linear]
    more = {"num_hidden_layers": layer + 1, "layer_types": [*kinds, "full_attention"]}
    extended = {**raw, "text_config": {**text, **more}} if "text_config" in raw else {**raw, **more}
    model, weights = read_model(extended, allowed, partial(_rename_last_layer, layer=layer))
    return MTPSpec(model, weights)


def _rename_last_layer(weights: WeightMap, layer: int) -> WeightMap:
    """Name the tensors of the model's last layer as those of an MTP layer, and add its other parts."""
    parts = tuple(
        WeightRule(f"mtp.{name}.weight", (f"{own}.weight",), "plus_one" if own.endswith("norm") else "none")
        for name, own in HYBRID_MODULES.items()
    )
    return replace(
        weights,
        rules=_split_last_layer(weights.rules, layer) + parts,
        stacks=_split_last_layer(weights.stacks, layer),
        outside=(*weights.outside, "mtp."),
    )


def _split_last_layer(rules: Iterable[WeightRule], layer: int) -> tuple[WeightRule, ...]:
    """Return the rules with one more for each tensor of the layer, which is the last one."""
    found = []
    for rule in rules:
        layers = tuple(range(layer + 1)) if rule.layers is None else rule.layers
        if "{layer}" not in rule.source or layer not in layers:
            found.append(rule)
            continue
        found.append(replace(rule, layers=tuple(one for one in layers if one != layer)))
        source = rule.source.replace("model.layers.{layer}", "mtp.layers.0")
        parameters = tuple(name.replace("{layer}", str(layer)) for name in rule.parameters)
        found.append(replace(rule, source=source, parameters=parameters, layers=None))
    return tuple(found)
