"""Each shape of a model's linear layers is tried, and a shape whose results depend on the batch is reported."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.cli.check import invariance_worker
from serve_llm.cli.check.invariance import check_invariance
from serve_llm.kernels import linear
from serve_llm.kernels.cpu import library
from serve_llm.kernels.cpu.linear import Packer
from support.tiny import make_checkpoint

pytestmark = pytest.mark.skipif(library.find() is None, reason="no C++ compiler at installation")


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    make_checkpoint(tmp_path, "llama", hidden_size=96, intermediate_size=200, vocab_size=500, **sizes)
    return tmp_path


def test_all_shapes_are_tried(checkpoint: Path) -> None:
    found = check_invariance(checkpoint)
    assert found.error == "" and found.slow == found.differing == []
    assert found.num_shapes == 5 + 4  # qkv, output, gate and up, down; the head is never int8


def test_a_kernel_that_depends_on_the_batch_is_reported(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Packer.pack

    def fake(self: Packer, weight: Tensor, bias: Tensor | None = None, merged: Sequence[Tensor] = ()) -> linear.Linear:
        layer = real(self, weight, bias, merged)
        return lambda x: layer(x) if len(x) > 1 or len(weight) != 400 else layer(x) * 2

    monkeypatch.setattr(Packer, "pack", fake)
    with torch.inference_mode():
        found = invariance_worker.try_layers(str(checkpoint))
    assert found.slow == ["400 x 96 in float32 (32 rows at a time)"] and found.differing == []


def test_why_nothing_could_be_tried(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["NeverHeardOf"]}')
    assert "NeverHeardOf" in check_invariance(tmp_path).error
