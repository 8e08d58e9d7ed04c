"""gpt-oss with experts stored as MXFP4 is the model that transformers builds from the same blocks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from serve_llm.common.errors import ModelError
from serve_llm.engine.quantization.mxfp4 import build_weight
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.mxfp4_files import STORED, make_mxfp4, random_blocks
from support.reference import reference_logprobs
from support.tiny import make_checkpoint


def test_numbers_are_those_of_transformers() -> None:
    blocks, scales = random_blocks(3, 7, 96)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for expert in range(3):
        assert torch.equal(build_weight(blocks[expert], scales[expert]).dequantise(), theirs[expert].T)
        assert torch.equal(theirs[expert].bfloat16().float(), theirs[expert])
    lowest, none = torch.tensor([[0]], dtype=torch.uint8), torch.tensor([[255]], dtype=torch.uint8)
    assert build_weight(blocks[0, :1, :1], lowest).dequantise().abs().max() <= 6 * 2.0**-127
    assert build_weight(blocks[0, :1, :1], none).dequantise().isnan().all()


def test_the_whole_model_on_any_ranks(tmp_path: Path) -> None:
    vocab_size = make_mxfp4(tmp_path)
    rng = random.Random(3)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 17, 60)]
    spec, decoder = load(tmp_path / "packed")
    for prompt, ours in zip(prompts, Harness(spec, decoder, torch.float32).logprobs(prompts), strict=True):
        assert (ours - reference_logprobs(tmp_path / "plain", prompt)).abs().max() < 2e-4
    wanted = [greedy(number, prompt, 8, logprobs=0) for number, prompt in enumerate(prompts)]
    expected = generate(make_engine(tmp_path / "plain"), wanted)
    for grid in ({}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2}):
        results = generate(make_engine(tmp_path / "packed", **grid), wanted)
        assert [results[n].token_ids for n in results] == [expected[n].token_ids for n in expected]
    whole = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    results = generate(make_engine(tmp_path / "packed", **whole), wanted)
    assert [results[n].token_ids for n in results] == [expected[n].token_ids for n in expected]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp.experts.down_proj_scales": None}, r"lacks model\.layers\.1\.mlp\.experts\.down_proj_scales"),
        ({"mlp.experts.down_proj_scales": slice(2)}, r"down_proj_scales has shape \[5, 64, 2\], but .* \[5, 64, 3\]"),
        ({"mlp.experts.gate_up_proj_blocks": slice(8)}, r"blocks has shape \[5, 192, 2, 8\], but .* \[5, 192, 2, 16\]"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, slice | None], message: str, tmp_path: Path) -> None:
    make_mxfp4(tmp_path)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    for name, kept in change.items():
        whole = tensors.pop(f"model.layers.1.{name}")
        if kept is not None:
            tensors[f"model.layers.1.{name}"] = whole[..., kept].contiguous()
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")


def test_sizes_that_are_no_whole_blocks(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "gpt_oss")
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        tensors |= {f"{name}_blocks": tensors[name], f"{name}_scales": tensors.pop(name).clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": STORED}))
    with pytest.raises(ModelError, match="rows of 60 numbers, which are not whole blocks of MXFP4"):
        load(tmp_path)
