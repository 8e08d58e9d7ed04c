"""Conversions between number types as on a GPU, for Triton's interpreter.

Measured in 3.9: the interpreter truncates to bfloat16 where a GPU rounds to nearest, and when converting to 8 bits it
rounds halves up and loses the carry of a fraction that is all ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch


def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
    """Replaces the interpreter's `_convert_float`: converts numbers of a Triton type, as numpy's unsigned integers, to
    another type. Rounds to nearest, halves to even, whatever `rounding` says: no kernel here asks for less."""
    bits = np.ascontiguousarray(values).view(f"uint{source.primitive_bitwidth}")
    converted = torch.from_numpy(bits).view(_dtype(source)).to(_dtype(target))
    return converted.view(getattr(torch, f"uint{target.primitive_bitwidth}")).numpy()


def _dtype(triton_type: Any) -> torch.dtype:
    names = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
    names |= {"fp8e4nv": "float8_e4m3fn", "fp8e5": "float8_e5m2"}
    dtype: torch.dtype = getattr(torch, names[triton_type.name])
    return dtype
