"""Blocks of every GGUF type represent the numbers that the gguf package decodes."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from serve_llm.common.gguf.file import OTHER_TYPES, STORAGE_TYPES
from serve_llm.engine.model.gguf_config import FORMS
from serve_llm.engine.quantization.gguf_blocks import unpack_blocks
from support.gguf_files import pack


def test_sizes_and_numbers_of_types() -> None:
    for number, stored in STORAGE_TYPES.items():
        kind = gguf.GGMLQuantizationType[stored.name]
        assert (number, (stored.block, stored.block_bytes)) == (kind.value, gguf.GGML_QUANT_SIZES[kind])
    for number, name in OTHER_TYPES.items():
        assert gguf.GGMLQuantizationType[name].value == number


@pytest.mark.parametrize("name", FORMS)
def test_every_type(name: str) -> None:
    generator = np.random.default_rng(1)
    kind = gguf.GGMLQuantizationType[name]
    values = generator.standard_normal((6, 768), dtype=np.float32)
    packed = pack(values, kind, generator)
    expected = torch.from_numpy(quants.dequantize(packed, kind))
    num_bytes = gguf.GGML_QUANT_SIZES[kind][1]
    weight = unpack_blocks(torch.from_numpy(packed).view(6, -1, num_bytes), name)
    torch.testing.assert_close(weight.dequantise(), expected, rtol=1e-6, atol=float(expected.abs().max()) * 1e-6)
    part = weight.narrow_columns(37, 300).dequantise()
    assert torch.equal(part, weight.dequantise()[:, 37:337])
    assert weight.narrow_columns(64, 0).dequantise().shape == (6, 0)
    form = FORMS[name]
    has_second = weight.zeros is not None or weight.minimums is not None
    assert (weight.bits, weight.group_size, has_second) == (form.bits, form.group_size, form.has_zeros)
    assert (weight.table is not None) == form.has_table
