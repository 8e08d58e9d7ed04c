"""Products of weights that a checkpoint stores as 8-bit floats, with inputs rounded to 8 bits as well.

The checkpoint's authors evaluated the model this way, and GPUs multiply 8-bit floats faster than they unpack them.
Torch's product is used where it exists for the form of the scales; other weights are multiplied by inputs that are not
rounded (`kernels.linear_grouped`). One log line says which of the two is used, and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from serve_llm.kernels import linear_fp8, linear_fp8_blocks, linear_grouped
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_fp8 import Quantise, quantise_rows
from serve_llm.kernels.linear_fp8_blocks import BLOCK, QuantiseBlocks, has_square_blocks, quantise_blocks
from serve_llm.kernels.linear_grouped import GroupQuantWeight

logger = logging.getLogger(__name__)


def pack_stored_fp8(
    weight: GroupQuantWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    pack_grouped: Callable[[GroupQuantWeight, Tensor | None, torch.dtype], Linear] = linear_grouped.pack_grouped,
    quantise_rows: Quantise = quantise_rows,
    quantise_blocks: QuantiseBlocks = quantise_blocks,
) -> Linear:
    """Build the layer x @ weight.T + bias, with x rounded to 8-bit floats if torch has such a product on the weight's
    device, else by `pack_grouped`, whose contract it has otherwise. weight: its `rounds_inputs` is true.
    """
    if weight.codes.numel() == 0:
        return pack_grouped(weight, bias, dtype)
    scales = weight.scales.float()
    has_groups = scales.shape[1] > 1
    is_square = has_groups and has_square_blocks(scales)
    form = "a scale per 128 x 128 block" if is_square else "a scale per 128 inputs" if has_groups else "a scale per row"
    obstacle = find_obstacle(weight, dtype)
    if not obstacle:
        device = weight.codes.device
        works = linear_fp8_blocks.is_supported(device, is_square) if has_groups else linear_fp8.is_supported(device)
        obstacle = "" if works else "this GPU and this build of torch do not multiply them"
    if obstacle:
        _log_once(f"fp8 weights with {form} are multiplied by inputs that are not rounded to 8 bits: {obstacle}")
        return pack_grouped(weight, bias, dtype)
    _log_once(f"fp8 weights with {form} are multiplied by inputs that are rounded to 8 bits")
    numbers = weight.codes.contiguous().view(linear_fp8.DTYPE)
    if has_groups:
        return linear_fp8_blocks.pack_fp8_blocks(numbers, scales, bias, quantise=quantise_blocks)
    return linear_fp8.pack_fp8(numbers, scales, bias, input_scale=weight.input_scale, quantise=quantise_rows)


def find_obstacle(weight: GroupQuantWeight, dtype: torch.dtype) -> str:
    """Return why torch has no product for the weight on any device; "" if it has one. dtype: of the inputs."""
    if dtype != torch.bfloat16:
        return f"they are {str(dtype).removeprefix('torch.')}, not bfloat16"
    if weight.scales.shape[1] == 1:
        return ""
    if weight.group_size != BLOCK:
        return f"blocks cover {weight.group_size} inputs, not {BLOCK}"
    if weight.offset or weight.order is not None:
        return "a rank's inputs begin inside a block"
    return ""


@cache
def _log_once(message: str) -> None:
    logger.info("%s", message)
