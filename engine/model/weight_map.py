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
    """One tensor of the checkpoint and the parameters that it fills; `{layer}` stands for each layer's number.

    More than one parameter: the tensor, once transformed, is cut along its first dimension in this order, by `sizes` or
    else evenly. More than one group: it is that many equal groups of rows, each of which is cut so; a parameter is its
    rows of the first group, then those of the second, and so on.
    """

    source: str
    parameters: tuple[str, ...]
    transform: Transform = "none"
    sizes: tuple[int, ...] = ()  # rows of each parameter, of all groups
    groups: int = 1


@dataclass(frozen=True)
class WeightMap:
    """One family's rows. Strict both ways: every source must be in the checkpoint, and nothing else but `ignored`."""

    rows: tuple[Row, ...]  # all but the two below
    embedding: str  # source of embedding.weight
    head: str  # source of head.weight; a model with a tied head has one of the two, or both and equal
    prefix: str  # of the base model's tensors; checkpoints of the bare base model lack it
    ignored: tuple[str, ...] = ()  # regular expressions, matched whole: tensors known to be of no use

    def expanded(self, num_layers: int, int8: Int8 | None = None) -> dict[str, Row]:
        """Source name -> row, with the layers written out; without embedding and head.

        int8: where the checkpoint stores int8 weights, so that each has a row of scales as well.
        """
        result: dict[str, Row] = {}
        for row in self.rows:
            for layer in range(num_layers) if "{layer}" in row.source else (0,):
                source = row.source.format(layer=layer)
                parameters = tuple(parameter.format(layer=layer) for parameter in row.parameters)
                result[source] = replace(row, source=source, parameters=parameters)
                products = [product_of(parameter) for parameter in parameters]
                if int8 is not None and int8.stored and all(product and int8.takes(product) for product in products):
                    scales = tuple(f"{name}_scale" for name in parameters)
                    result[f"{source}_scale"] = Row(f"{source}_scale", scales, sizes=row.sizes, groups=row.groups)
        return result
