"""A checkpoint in fp8 blocks is the model that transformers builds from the same numbers, on any ranks."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

from serve_llm.common.errors import ModelError
from serve_llm.engine.quantization.fp8_blocks import build_matrix
from serve_llm.kernels.cpu.linear_grouped import GroupQuantPacker
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load
from support.quantised import is_linear
from support.reference import reference_logprobs
from support.tiny import make_checkpoint

GRIDS: list[dict[str, int]] = [{}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2}]


def quantised(weight: Tensor, rows: int, columns: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return the numbers in fp8, the scales of their blocks, and the values that they represent."""
    height, width = weight.shape
    scales = torch.stack(
        [
            torch.stack([part.abs().amax().clamp(min=1e-6) / 448 for part in band.split(columns, 1)])
            for band in weight.split(rows, 0)
        ]
    ).to(scale_dtype)
    whole = scales.float().repeat_interleave(rows, 0)[:height].repeat_interleave(columns, 1)[:, :width]
    numbers = (weight / whole).clamp(-448, 448).to(torch.float8_e4m3fn)
    return numbers, scales, numbers.float() * whole


def make_pair(
    family: str, plain: Path, packed: Path, block: tuple[int, int], scale_dtype: torch.dtype, **sizes: object
) -> int:
    """Write the same model twice: with its linear layers in fp8 blocks, and in float32."""
    vocab_size = make_checkpoint(plain, family, **sizes)
    shutil.copytree(plain, packed)
    tensors = load_file(plain / "model.safetensors")
    stored = dict(tensors)
    for name in filter(is_linear, list(tensors)):
        numbers, scales, tensors[name] = quantised(tensors[name].float(), *block, scale_dtype)
        stored |= {name: numbers, f"{name}_scale_inv": scales}
    assert len(stored) > len(tensors)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    save_file(stored, packed / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((packed / "config.json").read_text())
    quantization = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block}
    (packed / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    return vocab_size


@pytest.mark.parametrize(
    ("family", "block", "scale_dtype"),
    [
        # Ranks and fused products begin in the middle of blocks.
        pytest.param("llama", (12, 20), torch.float32, marks=pytest.mark.slow),
        ("qwen3_moe", (128, 128), torch.bfloat16),  # a single block
        pytest.param("deepseek_v3", (16, 8), torch.float32, marks=pytest.mark.slow),
        ("qwen3_next", (12, 20), torch.bfloat16),  # one weight interleaves its queries, keys, values and gates
    ],
)
def test_the_whole_model_on_any_ranks(
    family: str,
    block: tuple[int, int],
    scale_dtype: torch.dtype,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vocab_size = make_pair(family, tmp_path / "plain", tmp_path / "packed", block, scale_dtype)
    rng = random.Random(3)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 17, 60)]
    spec, decoder = load(tmp_path / "packed")
    for prompt, ours in zip(prompts, Harness(spec, decoder, torch.float32).logprobs(prompts), strict=True):
        # In float32, transformers' own qwen3_next is off by 2.9e-4 on a Xeon with AMX, compared with float64.
        assert (ours - reference_logprobs(tmp_path / "plain", prompt)).abs().max() < 1e-3
    wanted = [greedy(number, prompt, 8, logprobs=0) for number, prompt in enumerate(prompts)]
    for grid in GRIDS:
        expected = generate(make_engine(tmp_path / "plain", **grid), wanted)
        results = generate(make_engine(tmp_path / "packed", **grid), wanted)
        assert [results[n].token_ids for n in results] == [expected[n].token_ids for n in expected]
        with monkeypatch.context() as patch:  # the torch definition, which GPUs use
            patch.setattr(GroupQuantPacker, "packs", lambda packer, weight: False)
            results = generate(make_engine(tmp_path / "packed", **grid), wanted)
        assert [results[n].token_ids for n in results] == [expected[n].token_ids for n in expected]
        assert [results[n].logprobs for n in results] == [expected[n].logprobs for n in expected], "to the bit"


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16])
def test_numbers_are_those_of_transformers(scale_dtype: torch.dtype) -> None:
    weight = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    numbers, scales, whole = quantised(weight, 16, 32, scale_dtype)
    theirs = Fp8Dequantize(None)._dequantize_one(numbers, scales, torch.float32)
    assert torch.equal(whole, theirs) and (whole - weight).abs().max() < 0.07 * weight.abs().max()
    part = build_matrix(numbers[21:70, 40:], scales[1:5, 1:], (16, 32), (5, 8)).dequantise()
    assert torch.equal(part, theirs[21:70, 40:])


@pytest.mark.parametrize(
    ("name", "tensor", "message"),
    [
        ("scale_inv", None, r"q_proj\.weight is stored as torch\.float8_e4m3fn, but .* or it lacks scales"),
        (
            "scale_inv",
            torch.ones(2, 2),
            r"q_proj\.weight_scale_inv has shape \[2, 2\], but .* \[6, 3\]",
        ),
        (
            "",
            torch.ones(60, 60),
            r"q_proj\.weight is stored as torch\.float32, but .*quantization_config asks for torch\.float8_e4m3fn",
        ),
    ],
)
def test_what_does_not_fit_is_named(name: str, tensor: Tensor | None, message: str, tmp_path: Path) -> None:
    make_pair("llama", tmp_path / "plain", tmp_path / "packed", (16, 20), torch.float32)
    path = tmp_path / "packed" / "model.safetensors"
    tensors = load_file(path)
    changed = f"model.layers.1.self_attn.q_proj.weight{name and '_' + name}"
    shape = tensors.pop(changed).shape
    if tensor is not None:
        tensors[changed] = tensor if name else torch.ones(shape)
    save_file(tensors, path)
    with pytest.raises(ModelError, match=message):
        load(tmp_path / "packed")


def test_a_checkpoint_that_does_not_say_so(tmp_path: Path) -> None:
    make_pair("llama", tmp_path / "plain", tmp_path / "packed", (16, 20), torch.float32)
    shutil.copy(tmp_path / "plain" / "config.json", tmp_path / "packed" / "config.json")
    with pytest.raises(ModelError, match=r"no parameter of a LlamaForCausalLM uses .*weight_scale_inv"):
        load(tmp_path / "packed")
