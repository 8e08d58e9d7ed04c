"""Quantising weights to 4 bits while loading, with a scale and a zero point per group of inputs.

It sees one rank's share of a linear layer. So in a row-parallel layer the groups of each rank begin with its share.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from serve_llm.kernels.linear_grouped import GroupQuantWeight
from serve_llm.kernels.quantise_int4 import MIDDLE, quantise_int4

BITS = 4
QuantiseInt4 = Callable[[Tensor, int], tuple[Tensor, Tensor, Tensor]]


def quantise(weight: Tensor, group_size: int | None, quantise_groups: QuantiseInt4 = quantise_int4) -> GroupQuantWeight:
    """weight: (outputs, inputs), any float dtype. group_size: None for one group of all inputs. quantise_groups: a
    version of `quantise_int4`."""
    size = group_size or max(weight.shape[1], 1)
    codes, scales, zeros = quantise_groups(weight, size)
    return GroupQuantWeight(codes, BITS, scales, size, zeros=zeros - MIDDLE)
