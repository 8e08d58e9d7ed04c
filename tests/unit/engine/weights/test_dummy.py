"""Random weights in the formats of quantised checkpoints: about as large as others, and the same on any ranks."""

from __future__ import annotations

import pytest
import torch

from serve_llm.engine.model.build import WeightSlice
from serve_llm.engine.model.gguf_config import FORMS
from serve_llm.engine.model.quantization_spec import MXFP4, GroupQuantForm, GroupQuantSpec
from serve_llm.engine.model.weight_format import BitsAndBytes4, NvFp4, ScaledNumbers
from serve_llm.engine.weights.dummy import build_dummy_group_loader

NAME, SHAPE = "layers.0.ffn.down.weight", (48, 512)
FLOAT8 = ScaledNumbers("fp8", "block", (128, 128)).form
ALL = [*FORMS.values(), MXFP4, FLOAT8, NvFp4().form, BitsAndBytes4("nf4", False).form]


@pytest.mark.parametrize("form", [*ALL, GroupQuantForm(4, 128, has_zeros=True, has_order=True)], ids=str)
def test_parts_of_one_weight(form: GroupQuantForm) -> None:
    load = build_dummy_group_loader(3, GroupQuantSpec(in_checkpoint=True, default=form), torch.device("cpu"))
    whole = load(NAME, SHAPE, WeightSlice(0, range(48)))
    assert whole is not None
    weight = whole.dequantise()
    assert weight.std() == pytest.approx(0.02, rel=0.2) and weight.mean().abs() < 0.005
    rows = load(NAME, SHAPE, WeightSlice(0, range(16, 32)))
    assert rows is not None and torch.equal(rows.dequantise(), weight[16:32])
    columns = load(NAME, SHAPE, WeightSlice(1, range(80, 200)))
    if form.has_order:
        assert columns is None
    else:
        assert columns is not None and torch.equal(columns.dequantise(), weight[:, 80:200])


def test_blocks_of_8_bit_floats_share_scales() -> None:
    form = ScaledNumbers("fp8", "block", (128, 128), inputs="dynamic").form
    load = build_dummy_group_loader(3, GroupQuantSpec(in_checkpoint=True, default=form), torch.device("cpu"))
    weight = load(NAME, (300, 512), WeightSlice(0, range(300)))
    assert weight is not None and weight.rounds_inputs
    blocks = weight.scales.split(128)
    assert all(torch.equal(block, block[:1].expand_as(block)) for block in blocks)
    assert len({float(block[0, 0]) for block in blocks}) == 3


def test_what_is_in_floating_point() -> None:
    spec = GroupQuantSpec(in_checkpoint=True, default=MXFP4, others={"layers.0.ffn.down": None})
    load = build_dummy_group_loader(3, spec, torch.device("cpu"))
    assert load(NAME, SHAPE, WeightSlice(0, range(48))) is None
    assert load("layers.0.ffn.router.weight", SHAPE, WeightSlice(0, range(48))) is None
