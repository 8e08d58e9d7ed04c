"""Random weights, to try sizes and speed without a checkpoint.

A parameter depends only on a seed, its name and the kind of device, not on the part that is read.
"""

from __future__ import annotations

import zlib
from dataclasses import replace

import torch
from torch import Tensor

from serve_llm.engine.model.build import GroupQuantWeightLoader, WeightLoader, WeightSlice, is_float32
from serve_llm.engine.model.quantization_spec import GroupQuantForm, GroupQuantSpec, find_linear_layer
from serve_llm.kernels.linear_grouped import FLOAT8_NAN, GroupQuantWeight, build_e2m1_table

DEVIATION = 0.02  # standard deviation in a matrix
_SCALE_DTYPES = {  # by the bytes of a scale, and whether a number divides it
    (1, False): torch.float8_e8m0fnu,
    (1, True): torch.float8_e4m3fn,
    (2, False): torch.float16,
    (4, False): torch.float32,
}


def build_dummy_loader(seed: int, model_dtype: torch.dtype, device: torch.device) -> WeightLoader:
    """Return a loader of random weights. Weights of norms, and scales that divide activations, are close to 1."""

    def load(
        name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        values = torch.randn(shape, generator=_seeded(seed, name, device), device=device) * DEVIATION
        if part is not None:
            values = values.narrow(part.dimension, part.range.start, len(part.range)).clone()
        if name.endswith(("norm.weight", ".activation_scales", "_cache_scale")):
            values = values + 1.0
        return values.to(torch.float32 if is_float32(name) else dtype or model_dtype)

    return load


def build_dummy_group_loader(seed: int, spec: GroupQuantSpec, device: torch.device) -> GroupQuantWeightLoader:
    """Return a loader of random weights in the forms in which the checkpoint's weights stay in memory."""

    def load(name: str, shape: tuple[int, int], part: WeightSlice) -> GroupQuantWeight | None:
        layer = find_linear_layer(name)
        outside = {"embedding.weight": spec.embedding, "head.weight": spec.head}
        form = outside.get(name) if layer is None else spec.find_form(layer)
        if form is None or (form.has_order and part.dimension == 1 and len(part.range) < shape[1]):
            return None
        weight = _build_weight(form, shape, _seeded(seed, name, device), device)
        if part.dimension == 1:
            weight = weight.narrow_columns(part.range.start, len(part.range))
        else:
            weight = weight.map_rows(lambda tensor: tensor[part.range.start : part.range.stop])
        if form.has_order:
            weight = replace(weight, order=torch.arange(shape[1], device=device))
        return weight

    return load


def _seeded(seed: int, name: str, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(zlib.crc32(name.encode()) ^ seed)


def _build_weight(
    form: GroupQuantForm, shape: tuple[int, int], generator: torch.Generator, device: torch.device
) -> GroupQuantWeight:
    outputs, inputs = shape
    size = form.group_size or inputs
    groups = outputs, -(-inputs // size)
    codes = torch.randint(0, 2**form.bits, shape, dtype=torch.uint8, generator=generator, device=device)
    if form.is_float8:
        codes -= ((codes & FLOAT8_NAN) == FLOAT8_NAN).byte()  # the next number towards zero
    table = build_e2m1_table(device) if form.has_table else None
    # Slightly different, so that no narrower type than the form's can hold them.
    factors = 1 + 0.1 * torch.rand(groups, generator=generator, device=device)
    if form.block_outputs > 1:
        factors = factors[:: form.block_outputs].repeat_interleave(form.block_outputs, 0)[:outputs]
    unscaled = GroupQuantWeight(
        codes,
        form.bits,
        torch.ones(groups, device=device),
        size,
        zeros=torch.zeros(groups, device=device) if form.has_zeros else None,
        table=table,
        is_float8=form.is_float8,
        rounds_inputs=form.rounds_inputs,
    )
    scales = factors * (DEVIATION / float(unscaled.dequantise().std()))
    divisors = None
    if form.has_divisors:
        scales, divisors = factors, torch.full((outputs,), float(factors.mean() / scales.mean()), device=device)
    scales = scales.to(_SCALE_DTYPES[form.scale_bytes, form.has_divisors])
    return replace(unscaled, scales=scales.float() if form.scale_bytes == 2 else scales, divisors=divisors)
