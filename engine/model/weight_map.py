"""Which tensors of a checkpoint fill which parameters of a model, as data. No torch; see `weights.load`.

A parameter is one matrix or vector of the model before any merging ("layers.3.attention.q.weight"), so how layers are
split over ranks or merged never depends on how a checkpoint stores them.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, replace
from typing import Literal

from serve_llm.engine.model.quantization_spec import Int8Spec, find_linear_layer
from serve_llm.engine.model.weight_format import QuantizedModules, WeightFormat

# plus_one: the checkpoint stores the weight minus 1. minus_exp: it stores -exp(weight). per_head: each parameter is a
# number for each KV head, or one for all.
Transform = Literal["none", "transpose", "plus_one", "minus_exp", "per_head"]


@dataclass(frozen=True)
class WeightRule:
    """One tensor of the checkpoint and the parameters that it fills.

    `{layer}` stands for the number of each layer, `{member}` for the number of each expert or head.

    Several parameters: the tensor, once transformed, is split along its first dimension in this order, by `sizes` or
    else evenly. Several groups: the tensor consists of that many equal groups of rows, each of which is split so; a
    parameter is its rows of the first group, then those of the second, and so on. If only the parameters contain
    `{member}`, the tensor is a stack of one such tensor per member.
    """

    source: str
    parameters: tuple[str, ...]
    transform: Transform = "none"
    sizes: tuple[int, ...] = ()  # rows of each parameter, of all groups together
    groups: int = 1
    layers: tuple[int, ...] | None = None  # the layers that have this tensor; None: all
    members: int = 0  # number of experts or heads
    scales: str = ""  # the tensor of the scales if this one stores blocks of `quantization.mxfp4`
    module: str = ""  # the quantised module's name in the checkpoint; `format` says which tensors it has
    format: WeightFormat | None = None

    def expand_members(self) -> list[WeightRule]:
        """One rule per member. For a stack: one rule with the parameters of all members, still with `members`."""
        if self.members == 0:
            return [self]
        parameters_by_member = [
            tuple(name.replace("{member}", str(number)) for name in self.parameters) for number in range(self.members)
        ]
        if "{member}" not in self.source:
            return [replace(self, parameters=tuple(name for names in parameters_by_member for name in names))]
        return [
            replace(self, source=self.source.replace("{member}", str(number)), parameters=names, members=0)
            for number, names in enumerate(parameters_by_member)
        ]


@dataclass(frozen=True)
class WeightMap:
    """The rules of one model. Strict both ways: every source must be in the checkpoint, which may contain nothing else
    except `ignored`."""

    rules: tuple[WeightRule, ...]  # all but those of the embedding and the LM head
    embedding: str  # source of embedding.weight
    head: str  # source of head.weight; tied embeddings are stored under one of the two names, or both and equal
    prefix: str  # prefix of the base model's tensors; checkpoints of the bare base model lack it
    outside: tuple[str, ...] = ()  # how the names of other tensors outside the base model begin, such as "classifier."
    ignored: tuple[str, ...] = ()  # regular expressions for the full names of unused tensors
    quantized: QuantizedModules | None = None
    prefixes: tuple[tuple[str, str], ...] = ()  # prefix of names in the checkpoint -> prefix of names here
    other_words: tuple[tuple[str, str], ...] = ()  # parts of names in some checkpoints -> their equivalents here
    # Stacked tensors that some checkpoints have instead of one per member, or vice versa.
    stacks: tuple[WeightRule, ...] = ()
    other_parts: tuple[str, ...] = ()  # modules of the model that are not served, among `ignored`
    is_gguf: bool = False  # the checkpoint is a GGUF file, whose tensors have names of their own

    def list_spellings(self, name: str) -> list[str]:
        """List the names that a tensor or module may have in the checkpoint. name: as in `rules`."""
        return [name] + [
            stored + name.removeprefix(prefix) for stored, prefix in self.prefixes if name.startswith(prefix)
        ]

    def choose_stacks(self, rules: dict[str, WeightRule], num_layers: int, stored: Container[str]) -> None:
        """Replace rules, as `expand` returned them, by those of `stacks` whose tensors are stored. stored: names as in
        `rules`."""
        expanded = replace(self, rules=self.stacks).expand(num_layers)
        found = {source: rule for source, rule in expanded.items() if source in stored}
        filled = {parameter for rule in found.values() for parameter in rule.parameters}
        for source in [source for source, rule in rules.items() if not filled.isdisjoint(rule.parameters)]:
            del rules[source]
        rules |= found

    def expand(self, num_layers: int, int8: Int8Spec | None = None) -> dict[str, WeightRule]:
        """Source -> rule with layers and members written out, without embedding and LM head.

        int8: if the checkpoint stores int8 weights, their scales have rules too.
        """
        result: dict[str, WeightRule] = {}
        for rule in (expanded for compact in self.rules for expanded in compact.expand_members()):
            layers = range(num_layers) if rule.layers is None else rule.layers
            for layer in layers if "{layer}" in rule.source else (0,):
                source = rule.source.format(layer=layer)
                parameters = tuple(parameter.format(layer=layer) for parameter in rule.parameters)
                scales = rule.scales.format(layer=layer)
                result[source] = replace(rule, source=source, parameters=parameters, scales=scales)
                if scales:
                    result[scales] = WeightRule(scales, ())
                elif _is_stored_int8(parameters, int8):
                    scale_parameters = tuple(f"{name}_scale" for name in parameters)
                    result[f"{source}_scale"] = WeightRule(
                        f"{source}_scale", scale_parameters, sizes=rule.sizes, groups=rule.groups
                    )
        return result


def _is_stored_int8(parameters: tuple[str, ...], int8: Int8Spec | None) -> bool:
    if int8 is None or not int8.in_checkpoint:
        return False
    linear_layers = [find_linear_layer(parameter) for parameter in parameters]
    return all(layer is not None and int8.is_quantised(layer) for layer in linear_layers)
