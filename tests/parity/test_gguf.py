"""GGUF files are the models that transformers builds from the same numbers, on any ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.hosts import fingerprint
from serve_llm.common.hub import resolve_model
from support.engine import generate, greedy, make_engine
from support.forward import load
from support.gguf_files import FAMILIES, make_gguf
from support.matrix import mostly_slow
from support.parity import check_greedy, check_logprobs, random_prompts

STORAGES = (
    "F16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4 IQ1_S IQ1_M IQ2_XXS IQ2_XS IQ2_S "
    "IQ3_XXS IQ3_S".split()  # each with at least one family
)
PAIRS = [
    *zip(FAMILIES, (*STORAGES[1:], *STORAGES), strict=False),
    ("qwen3", "F16"),
    ("qwen3_moe", "MXFP4"),  # as in files named MXFP4_MOE
    ("gpt_oss", "MXFP4"),
]
FAST_FAMILIES = ("llama", "mixtral", "ministral3", "qwen2", "qwen2_moe", "gemma3_text", "phi3", "olmo2", "gpt_oss")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def check(directory: Path, vocab_size: int) -> None:
    """Compare with transformers."""
    prompts = random_prompts(vocab_size)
    check_logprobs(resolve_model(str(directory / "model.gguf")), directory / "plain", prompts)


@pytest.mark.parametrize(
    ("family", "storage"), mostly_slow(PAIRS, [pair for pair in PAIRS if pair[0] in FAST_FAMILIES])
)
def test_families(family: str, storage: str, tmp_path: Path) -> None:
    check(tmp_path, make_gguf(tmp_path, family, storage))


@pytest.mark.parametrize(
    ("family", "architecture"), [("qwen2", "qwen2vl"), ("qwen3", "qwen3vl"), ("qwen3_moe", "qwen3vlmoe")]
)
def test_text_parts(family: str, architecture: str, tmp_path: Path) -> None:
    """Files of multimodal models name another architecture and have keys about coordinates and images."""
    check(tmp_path, make_gguf(tmp_path, family, architecture=architecture))


def compare_engines(directory: Path, prompts: list[list[int]], *grids: dict[str, Any]) -> None:
    """Compare the greedy tokens of engines with these ranks with those of the same numbers in floating point."""
    check_greedy(resolve_model(str(directory / "model.gguf")), directory / "plain", prompts, grids)


@pytest.mark.parametrize("storage", mostly_slow(STORAGES, ["Q4_K", "IQ4_XS"]))
def test_every_type_keeps_its_numbers_in_any_part(storage: str, tmp_path: Path) -> None:
    """Ranks begin in the middle of blocks and groups; values, head and embedding have other types."""
    prompts = random_prompts(make_gguf(tmp_path, "llama", storage, num_attention_heads=4))
    compare_engines(tmp_path, prompts, {}, {"tensor": 2}, {"tensor": 3}, {"pipeline": 2})


def test_a_model_in_several_files(tmp_path: Path) -> None:
    vocab_size = make_gguf(tmp_path, "qwen3_moe", "Q8_0", tensors_per_file=5)
    parts = sorted(tmp_path.glob("model-*.gguf"))
    assert len(parts) > 3 and not (tmp_path / "model.gguf").exists()
    directory = resolve_model(str(parts[0]))
    assert resolve_model(str(tmp_path)) == directory == resolve_model(str(parts[2]))
    wanted = [greedy(number, prompt, 6) for number, prompt in enumerate(random_prompts(vocab_size))]
    expected = generate(make_engine(tmp_path / "plain", dtype="float32"), wanted)
    found = generate(make_engine(directory, dtype="float32", tensor=2), wanted)
    assert [found[n].token_ids for n in found] == [expected[n].token_ids for n in expected]
    weights_hash = fingerprint(directory).weights
    parts[1].write_bytes(parts[1].read_bytes() + bytes(32))
    assert fingerprint(directory).weights != weights_hash


@pytest.mark.parametrize("storage", mostly_slow(["Q4_K", "MXFP4"], ["Q4_K"]))
def test_experts_on_several_ranks(storage: str, tmp_path: Path) -> None:
    prompts = random_prompts(make_gguf(tmp_path, "qwen3_moe", storage))
    whole_experts = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    compare_engines(tmp_path, prompts, {"tensor": 3}, whole_experts)


@pytest.mark.parametrize(("family", "storage"), [("qwen3_moe", "Q4_K"), ("mixtral", "Q8_0"), ("qwen2_moe", "IQ2_S")])
def test_gate_and_up_of_experts_in_one_tensor(family: str, storage: str, tmp_path: Path) -> None:
    """As llama.cpp's converter writes them with --fuse-gate-up-exps."""
    prompts = random_prompts(make_gguf(tmp_path, family, storage, fuses_experts=True))
    check_logprobs(resolve_model(str(tmp_path / "model.gguf")), tmp_path / "plain", prompts)
    whole_experts = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    compare_engines(tmp_path, prompts, {"tensor": 3}, {"pipeline": 2}, whole_experts)


def test_gpt_oss_on_several_ranks(tmp_path: Path) -> None:
    """Checkpoints of gpt-oss in other formats store gate and up in one stack."""
    prompts = random_prompts(make_gguf(tmp_path, "gpt_oss", "MXFP4"))
    whole_experts = {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}
    compare_engines(tmp_path, prompts, {"tensor": 3}, {"pipeline": 2}, whole_experts)


def test_types_that_differ_and_a_packed_head(tmp_path: Path) -> None:
    """As in files named Q4_K_M, the value and down projections, the head and the embedding have types of their own."""
    others = {"v_proj.weight": "Q6_K", "down_proj.weight": "Q8_0", "lm_head.weight": "Q6_K", "tokens.weight": "Q4_K"}
    metadata = {"mradermacher.quantize_version": 2, "quantize.imatrix.entries_count": 7}  # keys without effect
    check(tmp_path, make_gguf(tmp_path, "llama", "Q4_K", others=others, metadata=metadata))


def test_keys_of_the_image_part(tmp_path: Path) -> None:
    """As in files of Google and Ollama, which name rope's bases differently, too."""
    metadata = {"gemma3.mm.tokens_per_image": 256, "gemma3.vision.block_count": 27}
    check(tmp_path, make_gguf(tmp_path, "gemma3_text", metadata=metadata))


@pytest.mark.parametrize("rope", ["linear", "yarn", "llama3"])
def test_scaled_rope(rope: str, tmp_path: Path) -> None:
    check(tmp_path, make_gguf(tmp_path, "llama", "Q8_0", rope=rope))


def test_longrope(tmp_path: Path) -> None:
    factors = {"short_factor": [1.0 + 0.01 * i for i in range(32)], "long_factor": [1.0 + 0.1 * i for i in range(32)]}
    scaling = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, **factors}
    more = {"original_max_position_embeddings": 32, "partial_rotary_factor": 1.0}
    prompts = random_prompts(make_gguf(tmp_path, "phi3", "Q8_0", rope_parameters={**scaling, "factor": 8.0}, **more))
    compare_engines(tmp_path, prompts, {})  # the longest prompt uses the long factors


def test_other_quantisation_while_loading(tmp_path: Path) -> None:
    make_gguf(tmp_path, "qwen2", "F16")
    directory = resolve_model(str(tmp_path / "model.gguf"))
    engine = make_engine(directory, quantization="int4")
    assert generate(engine, [greedy(0, [1, 2, 3], 4)])[0].token_ids


def test_code_of_transformers_is_refused(tmp_path: Path) -> None:
    make_gguf(tmp_path, "qwen2", "F16")
    with pytest.raises(OptionError, match=r"--model-impl: .* not from GGUF"):
        make_engine(resolve_model(str(tmp_path / "model.gguf")), model_impl="transformers")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    make_gguf(tmp_path, "llama", "Q8_0", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"the checkpoint lacks blk\.1\.ffn_up\.weight"):
        load(resolve_model(str(tmp_path / "model.gguf")))
