"""Layers quantised to 4 bits while loading: close to the float model, on any ranks, with equal bits in any batch."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.errors import OptionError
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.quantization import int4
from support.engine import generate, greedy, make_engine
from support.forward import Harness, load_whole, read_spec
from support.matrix import mostly_slow
from support.packed import HEADS, SIZES, Packing, make_packed
from support.reference import reference_logprobs
from support.tiny import FAMILIES, WITH_EXPERTS, make_checkpoint


def random_requests(vocab_size: int) -> list[EngineCoreRequest]:
    rng = random.Random(4)
    return [
        greedy(number, [rng.randrange(vocab_size) for _ in range(length)], 6, logprobs=0)
        for number, length in enumerate((1, 9, 26, 40))
    ]


@pytest.mark.parametrize("family", mostly_slow(family for family in FAMILIES if family not in WITH_EXPERTS))
def test_close_to_the_float_model(family: str, tmp_path: Path) -> None:
    """Includes odd sizes, whose groups stay in the model's dtype if they do not fit into words."""
    vocab_size = make_checkpoint(tmp_path, family, std=0.1)
    rng = random.Random(5)
    prompts = [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 16, 40)]
    spec, weight_map = read_spec(tmp_path)
    spec = spec.with_int4(32)
    decoder = load_whole(tmp_path, spec, weight_map)
    ours = torch.cat(Harness(spec, decoder, torch.float32).logprobs(prompts))
    exact = torch.cat([reference_logprobs(tmp_path, prompt) for prompt in prompts])
    spread = exact - exact.mean(-1, keepdim=True)
    assert 0.001 < (ours - exact).norm() / spread.norm() < 0.35


@pytest.mark.pairs("int4 + TP", "int4 + PP")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_several_ranks(dtype: str, tmp_path: Path) -> None:
    """Stages change nothing; with tensor parallelism, groups begin with each rank's share."""
    sizes = SIZES[""] | HEADS | {"tie_word_embeddings": True}
    wanted = random_requests(make_checkpoint(tmp_path, "llama", std=0.1, dtype=dtype, **sizes))
    one = generate(make_engine(tmp_path, quantization="int4-g32"), wanted)
    two_stages = generate(make_engine(tmp_path, quantization="int4-g32", pipeline=2), wanted)
    for number, result in one.items():
        assert two_stages[number].token_ids == result.token_ids
        assert two_stages[number].logprobs == result.logprobs  # to the last bit
    for grid in ({"tensor": 2}, {"tensor": 3}):
        many = generate(make_engine(tmp_path, quantization="int4-g32", **grid), wanted)
        for number, result in one.items():
            assert abs(many[number].logprobs[0].logprob - result.logprobs[0].logprob) < 0.5


def write_rounded(directory: Path, target: Path, group_size: int, untouched: str) -> None:
    """Copy a checkpoint with all matrices rounded to 4 bits, except those whose names contain `untouched`."""
    target.mkdir()
    shutil.copy(directory / "config.json", target)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.ndim == 2 and untouched not in name:
            tensors[name] = int4.quantise(tensor, group_size).dequantise()
    save_file({name: tensor.float() for name, tensor in tensors.items()}, target / "model.safetensors")


@pytest.mark.parametrize("is_tied", [True, False])
def test_the_head_is_rounded_like_the_layers(is_tied: bool, tmp_path: Path) -> None:
    """In bfloat16, the model is close to transformers with rounded weights."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}
    original = tmp_path / "original"
    vocab_size = make_checkpoint(original, "llama", std=0.1, dtype="bfloat16", tie_word_embeddings=is_tied, **sizes)
    write_rounded(original, tmp_path / "rounded", 32, "no matrix" if is_tied else "embed_tokens")
    spec, weight_map = read_spec(original)
    spec = spec.with_int4(32).with_packed_tables(rounds=True)
    decoder = load_whole(original, spec, weight_map, dtype=torch.bfloat16)
    prompt = [token % vocab_size for token in range(5, 45)]
    ours = Harness(spec, decoder, torch.bfloat16).logprobs([prompt])[0].float()
    rounded, unrounded = (reference_logprobs(tmp_path / name, prompt) for name in ("rounded", "original"))
    spread = (rounded - rounded.mean(-1, keepdim=True)).norm()
    assert (ours - rounded).norm() < 0.05 * spread < 0.5 * (ours - unrounded).norm()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rows_bits_do_not_depend_on_its_company(dtype: str, tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path, "qwen3_moe", dtype=dtype, **SIZES["qwen3_moe"])
    rng = random.Random(8)
    sampling = Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2)
    wanted = EngineCoreRequest(id=0, prompt_ids=[rng.randrange(vocab_size) for _ in range(19)], sampling=sampling)
    alone = generate(make_engine(tmp_path, quantization="int4"), [wanted])[0]
    for budget in (64, 7):
        engine = make_engine(tmp_path, max_num_batched_tokens=budget, quantization="int4")
        others = [greedy(n, [rng.randrange(vocab_size) for _ in range(11 + n)], 5) for n in range(1, 5)]
        result = generate(engine, [wanted, *others], [rng.randrange(6) for _ in range(5)])[0]
        assert result.token_ids == alone.token_ids
        assert result.logprobs == alone.logprobs  # to the last bit


def test_a_quantised_checkpoint_is_not_quantised_again(tmp_path: Path) -> None:
    make_packed(tmp_path, "llama", Packing("gptq"))
    with pytest.raises(OptionError, match="--quantization: the checkpoint is quantised already"):
        make_engine(tmp_path / "packed", quantization="int4")


def test_the_log_says_int4(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama")
    with caplog.at_level("INFO"):
        make_engine(tmp_path, quantization="int4")
    assert "as float32 with layers in int4 on cpu" in caplog.text
