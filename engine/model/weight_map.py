"""How a checkpoint's tensors fill a model's parameters, as data. No torch; `weights/place.py` carries it out.

A parameter is one matrix or vector of the model before any fusing ("layers.3.attention.q.weight"), so that what is
split over ranks, or fused into one product, never depends on how a checkpoint happened to store it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from serve_llm.engine.model.spec import Int8, product_of

Transform = Literal["none", "transpose", "plus_one"]  # plus_one: stored as the distance from 1


@dataclass(frozen=True)
class Row:
    """One tensor of the checkpoint and the parameters that it fills; `{layer}` stands for each layer's number, and
    `{member}` for each expert's, or each head's.

    More than one parameter: the tensor, once transformed, is cut along its first dimension in this order, by `sizes` or
    else evenly. More than one group: it is that many equal groups of rows, each of which is cut so; a parameter is its
    rows of the first group, then those of the second, and so on. Where only the parameters say `{member}`, the tensor
    is a stack of one such tensor for each of them.
    """

    source: str
    parameters: tuple[str, ...]
    transform: Transform = "none"
    sizes: tuple[int, ...] = ()  # rows of each parameter, of all groups
    groups: int = 1
    layers: tuple[int, ...] | None = None  # that have such a tensor; None: all
    members: int = 0  # how many experts or heads there are
    scales: str = ""  # the tensor of its scales, where this one holds blocks of `quant.mxfp4`, or
    block: tuple[int, int] | None = None  # 8-bit floats, of which so many rows and columns have one scale

    def of_members(self) -> list[Row]:
        """With the members written out; what is still a stack has `members`."""
        if self.members == 0:
            return [self]
        filled = [
            tuple(name.replace("{member}", str(number)) for name in self.parameters) for number in range(self.members)
        ]
        if "{member}" not in self.source:
            return [replace(self, parameters=tuple(name for names in filled for name in names))]
        return [
            replace(self, source=self.source.replace("{member}", str(number)), parameters=names, members=0)
            for number, names in enumerate(filled)
        ]


@dataclass(frozen=True)
class WeightMap:
    """One family's rows. Strict both ways: every source must be in the checkpoint, and nothing else but `ignored`."""

    rows: tuple[Row, ...]  # all but the two below
    embedding: str  # source of embedding.weight
    head: str  # source of head.weight; a model with a tied head has one of the two, or both and equal
    prefix: str  # of the base model's tensors; checkpoints of the bare base model lack it
    ignored: tuple[str, ...] = ()  # regular expressions, matched whole: tensors known to be of no use
    block: tuple[int, int] | None = None  # as a row's, of each whose scales are in the checkpoint

    def expanded(self, num_layers: int, int8: Int8 | None = None) -> dict[str, Row]:
        """Source name -> row, with the layers written out; without embedding and head.

        int8: where the checkpoint stores int8 weights, so that each has a row of scales as well.
        """
        result: dict[str, Row] = {}
        for row in (one for whole in self.rows for one in whole.of_members()):
            layers = range(num_layers) if row.layers is None else row.layers
            for layer in layers if "{layer}" in row.source else (0,):
                source = row.source.format(layer=layer)
                parameters = tuple(parameter.format(layer=layer) for parameter in row.parameters)
                result[source] = replace(
                    row, source=source, parameters=parameters, scales=row.scales.format(layer=layer)
                )
                if row.scales:
                    scales_source = result[source].scales
                    result[scales_source] = Row(scales_source, ())
                    continue
                products = [product_of(parameter) for parameter in parameters]
                if int8 is not None and int8.stored and all(product and int8.takes(product) for product in products):
                    scales = tuple(f"{name}_scale" for name in parameters)
                    result[f"{source}_scale"] = Row(f"{source}_scale", scales, sizes=row.sizes, groups=row.groups)
        return result
