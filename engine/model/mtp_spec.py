"""Multi-token prediction (MTP) layers (DeepSeek-V3, arXiv:2412.19437, section 2.2): which checkpoints have one.

No torch. An MTP layer is a decoder layer like the model's last one, stored after the model's own. It predicts ids from
hidden states of the served model.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule

ARCHITECTURES = ("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM")
COUNT = "num_nextn_predict_layers"
# The parts of an MTP layer that a decoder layer lacks: module in the checkpoint -> parameter.
MODULES = {
    "enorm": "mtp.embedding_norm",
    "hnorm": "mtp.hidden_norm",
    "eh_proj": "mtp.projection",
    "shared_head.norm": "mtp.final_norm",
}
COPIES = ("embed_tokens", "shared_head.head")  # skipped: the layer uses the model's own


@dataclass(frozen=True)
class MTPSpec:
    """An MTP layer, as the last layer of its model."""

    model: ModelSpec  # the served model with the MTP layer as its last layer
    weights: WeightMap  # includes the parts that a decoder layer lacks

    @property
    def layer(self) -> int:
        """The layer's index in `model` and in the checkpoint."""
        return len(self.model.layers) - 1

    @property
    def draft(self) -> ModelSpec:
        """The MTP layer as a model of one layer."""
        return replace(self.model, layers=self.model.layers[-1:])


def read_mtp(raw: Mapping[str, object], allowed: Iterable[str] = ()) -> MTPSpec:
    """raw: the served model's config.json. allowed: as in `read_model`. Raises ModelError if it has no MTP layer."""
    named = raw.get("architectures")
    architecture = named[0] if isinstance(named, list) and named else None
    if architecture not in ARCHITECTURES:
        raise ModelError(f"MTP layers of {architecture} are not supported; those of {', '.join(ARCHITECTURES)} are")
    count = raw.get(COUNT)
    if not isinstance(count, int) or count < 1:
        raise ModelError(f"config.json: {COUNT} is {count}: the checkpoint has no MTP layer")
    served, _ = read_model(raw, allowed)
    layer = len(served.layers)
    model, weights = read_model({**raw, "num_hidden_layers": layer + 1, COUNT: count - 1}, allowed)
    prefix = f"model.layers.{layer}"
    rules = tuple(WeightRule(f"{prefix}.{name}.weight", (f"{own}.weight",)) for name, own in MODULES.items())
    copies = tuple(re.escape(f"{prefix}.{name}.weight") for name in COPIES)
    return MTPSpec(model, replace(weights, rules=weights.rules + rules, ignored=weights.ignored + copies))
