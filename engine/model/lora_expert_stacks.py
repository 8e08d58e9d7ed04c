"""Experts' weights as transformers 5 stores them: one parameter for a linear layer of all experts of a layer, which an
adapter changes as a whole (PEFT's target_parameters). No torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serve_llm.engine.model.weight_map import WeightRule

_EXPERT = re.compile(r"(layers\.\d+\.ffn\.experts)\.(\d+)\.(gate|up|down)\.weight")
_SOURCE_OF_MEMBER = re.compile(r"(.*\.experts)\.\d+\.[^.]+\.weight")
_STACK = r"experts\.(?:gate_up_proj|down_proj)|(?:input|output)_linear"
_SOURCE_OF_STACK = re.compile(rf"(.*\.)(?:{_STACK})(?:_blocks|\.weight)?")


@dataclass(frozen=True)
class StackedWeight:
    """The location of one expert's weight in a parameter of all experts."""

    parameter: str  # its name in transformers' model, such as "model.layers.3.mlp.experts.gate_up_proj"
    member: int
    rule: WeightRule  # its rows in the expert's part of the parameter


def list_stacked_weights(rules: Iterable[WeightRule]) -> dict[str, StackedWeight]:
    """List stacked weights by their names here. rules: with layers and members written out."""
    found: dict[str, StackedWeight] = {}
    for rule in rules:
        for name in rule.parameters:
            weight = _find(rule, name)
            if weight is not None:
                found[name] = weight
    return found


def _find(rule: WeightRule, name: str) -> StackedWeight | None:
    match = _EXPERT.fullmatch(name)
    if match is None:
        return None
    layer, member, kind = match.groups()
    source = (_SOURCE_OF_STACK if rule.members else _SOURCE_OF_MEMBER).fullmatch(rule.source)
    if source is None:
        return None
    module = f"{source[1]}experts" if rule.members else source[1]
    kinds = ("down",) if kind == "down" else ("gate", "up")
    parts = tuple(f"{layer}.{member}.{one}.weight" for one in kinds)
    if rule.members:
        parts = tuple(part for part in rule.parameters if part in parts)
    parameter = f"{module}.{'down_proj' if kind == 'down' else 'gate_up_proj'}"
    whole = replace(rule, source=parameter, parameters=parts, transform="none", members=0, scales="", format=None)
    return StackedWeight(parameter, int(member), whole)


def list_spellings(module: str) -> list[str]:
    """List the names of a module with experts in different versions of transformers."""
    spellings = [module, module.replace(".router.layer", ".router")]
    spellings += [spelling.replace(".block_sparse_moe.", ".mlp.") for spelling in spellings]
    return list(dict.fromkeys(spellings))


def count_members(weights: Mapping[str, StackedWeight]) -> dict[str, int]:
    """Count the experts of each parameter."""
    counts: dict[str, int] = {}
    for weight in weights.values():
        counts[weight.parameter] = max(counts.get(weight.parameter, 0), weight.member + 1)
    return counts
