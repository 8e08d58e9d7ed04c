"""`repr` of a decoder shows the tree of its parts, with shapes, dtypes and the rank's shares."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor

from serve_llm.engine.model.build import ModelBuilder, WeightSlice
from serve_llm.engine.model.decoder import build_decoder
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.tree import ModelTree
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.kernels.registry import PORTABLE
from support.forward import load
from support.ranks import Ranks
from support.tiny import config_of, make_checkpoint

QWEN3 = """\
Qwen3ForCausalLM, rank 1 of 2: layers 0 to 2 of 3, tensor-parallel rank 1 of 2
  (embedding): VocabParallelEmbedding
    (weight): 165 of 331 x 60, bfloat16
  (layers):
    (0-2): 3 x PreNormLayer
      (attention): Attention(3 of 6 heads, 2 of 3 KV heads, head_dim 14)
        (q+k+v): ColumnParallelLinear(60 -> 98 of 168, bfloat16)
        (output): RowParallelLinear(42 of 84 -> 60, bfloat16)
        (q_norm): RMSNorm(14, bfloat16)
        (k_norm): RMSNorm(14, bfloat16)
      (ffn): MLP(silu, gated)
        (gate+up): ColumnParallelLinear(60 -> 96 of 194, bfloat16)
        (down): RowParallelLinear(48 of 97 -> 60, bfloat16)
      (attention_norm): RMSNorm(60, bfloat16)
      (ffn_norm): RMSNorm(60, bfloat16)
  (final_norm): RMSNorm(60, bfloat16)
  (head): VocabParallelLMHead (tied to the embedding)"""


def load_parameter(
    name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    sizes = list(shape)
    if part is not None:
        sizes[part.dimension] = len(part.range)
    return torch.empty(sizes, dtype=dtype or torch.bfloat16, device="meta")


def test_shapes_dtypes_and_shares_of_a_rank() -> None:
    spec, _ = read_model(config_of("qwen3"))
    ranks = Ranks(spec, ParallelLayout(2))
    builder = ModelBuilder(load_parameter, PORTABLE, ranks.shards[1], ranks.neighbours[1])
    assert repr(build_decoder(spec, builder, torch.device("meta"))) == QWEN3


def test_it_is_logged_once_at_debug_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "qwen3")
    with caplog.at_level(logging.DEBUG, logger="serve_llm.engine.weights.load"):
        _, decoder = load(tmp_path)
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.DEBUG] == [
        f"Model:\n{decoder!r}"
    ]


def test_only_consecutive_numbers_share_lines() -> None:
    tree = ModelTree()
    for name, what in (("0", "A"), ("1", "A"), ("2", "B"), ("3", "A"), ("norm", "A"), ("other", "A")):
        tree.add(f"layers.{name}", what)
    assert str(tree).splitlines()[1:] == [
        "  (layers):",
        "    (0-1): 2 x A",
        "    (2): B",
        "    (3): A",
        "    (norm): A",
        "    (other): A",
    ]
