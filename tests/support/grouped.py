"""Random grouped weights of 4 and 8 bits, in every form found in checkpoints, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from serve_llm.kernels.linear_grouped import FLOAT8_NAN, GroupQuantWeight, build_e2m1_table

FORMS = ("int4", "int4 zeros", "int4 minimums", "int8", "table", "mxfp4", "nvfp4", "fp8")


def make_weight(form: str, outputs: int, inputs: int, group_size: int, offset: int = 0) -> GroupQuantWeight:
    """Return random weights. form: one of FORMS. Numbers have a magnitude of about 1 / sqrt(inputs)."""
    generator = torch.Generator().manual_seed(outputs + inputs)
    bits = 8 if form in ("int8", "fp8") else 4
    shape = outputs, -(-(inputs + offset) // group_size)
    codes = torch.randint(0, 2**bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    if form == "fp8":
        codes -= (codes & FLOAT8_NAN == FLOAT8_NAN).byte()
    size = {"int8": 64.0, "fp8": 100.0, "nvfp4": 3.0, "mxfp4": 3.0}.get(form, 5.0) * inputs**0.5
    scales = (0.5 + torch.rand(shape, generator=generator)) / size
    weight = GroupQuantWeight(codes, bits, scales, group_size, is_float8=form == "fp8", offset=offset)
    if form == "int4 zeros":
        return replace(weight, zeros=torch.randint(-8, 8, shape, generator=generator).float())
    if form == "int4 minimums":
        return replace(weight, minimums=torch.rand(shape, generator=generator) / inputs**0.5)
    if form == "table":
        return replace(weight, table=torch.randn(16, generator=generator) * 4)
    if form == "mxfp4":
        return replace(weight, scales=scales.to(torch.float8_e8m0fnu), table=build_e2m1_table(codes.device))
    if form == "nvfp4":
        small = (0.5 + torch.rand(shape, generator=generator)).to(torch.float8_e4m3fn)
        divisors = torch.full((outputs,), size)
        return replace(weight, scales=small, divisors=divisors, table=build_e2m1_table(codes.device))
    return weight
