"""Layers in int8: against transformers with the same rounding, against the float model, on several ranks, and in other
batches."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from reference import linear_int8 as reference
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.model.build import ModelBuilder
from serve_llm.engine.model.decoder import build_decoder
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.files import Checkpoint
from serve_llm.engine.weights.load import match_tensors
from serve_llm.engine.weights.parameters import CheckpointLoader
from serve_llm.kernels.registry import choose
from support.engine import generate, greedy, make_engine
from support.forward import CPU, Harness, load, load_whole
from support.matrix import mostly_slow
from support.quantised import edit_config, int8_logprobs, quantise_checkpoint
from support.reference import reference_logprobs
from support.tiny import FAMILIES, HYBRIDS, WITH_EXPERTS, make_checkpoint

# llm-compressor quantises torch's Linear modules, but GPT-2 and Falcon have none, nor have experts in transformers 5.
SCATTERED = ("qwen3_next", "qwen3_5_moe_text")  # random routers choose other experts for a tenth of the tokens
STORED = [family for family in FAMILIES if family not in ("gpt2", "falcon", *WITH_EXPERTS, *HYBRIDS)]
ROUTERS = [
    rf"re:model\.layers\.\d+\.{name}$" for name in ("block_sparse_moe.gate", "mlp.gate", "mlp.shared_expert_gate")
]


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(5)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in (1, 2, 15, 16, 17, 40, 150)]


def logprobs(
    directory: Path,
    chosen: list[list[int]],
    int8: bool = False,
    max_chunk: int | None = None,
    int8_lm_head: bool = True,
) -> list[Tensor]:
    spec, decoder = load(directory, int8=int8, int8_lm_head=int8_lm_head)
    return Harness(spec, decoder, torch.float32).logprobs(chosen, max_chunk)


def check_against_transformers(ours: list[Tensor], theirs: list[Tensor]) -> None:
    """Compare with transformers.

    Float32 sums differ in their last bits, so occasionally a number near a half is rounded differently, and the rest of
    its sequence sees one activation changed by 1/127. Such a flip affects one sequence: hence the median over the
    sequences of their medians, and a bound on the rest.
    """
    errors = [(left - right).abs().amax(-1) for left, right in zip(ours, theirs, strict=True)]
    assert torch.stack([error.median() for error in errors]).median() < 1e-4
    assert max(float(error.max()) for error in errors) < 0.5
    same = torch.cat([left.argmax(-1) == right.argmax(-1) for left, right in zip(ours, theirs, strict=True)])
    assert same.float().mean() > 0.97


@pytest.mark.parametrize("family", mostly_slow(STORED))
def test_stored_weights(family: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path / "float", family))
    head = ("embed_out",) if family == "gpt_neox" else ("lm_head",)
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=head)
    ours = logprobs(tmp_path / "int8", chosen)
    check_against_transformers(ours, int8_logprobs(plain, chosen, head))
    at_load = logprobs(tmp_path / "float", chosen, int8=True, int8_lm_head=False)
    assert all(torch.equal(left, right) for left, right in zip(ours, at_load, strict=True))
    chunked = logprobs(tmp_path / "int8", chosen, max_chunk=37)
    assert all(torch.equal(left, right) for left, right in zip(ours, chunked, strict=True))


@pytest.mark.parametrize("family", ["llama", "gptj"])  # heads without and with a bias
def test_the_lm_head_is_int8_too(family: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path / "float", family, tie_word_embeddings=False))
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", heads=["lm_head"])
    ours = logprobs(tmp_path / "float", chosen, int8=True)
    check_against_transformers(ours, int8_logprobs(plain, chosen, heads=["lm_head"]))
    float_head = logprobs(tmp_path / "float", chosen, int8=True, int8_lm_head=False)
    assert not any(torch.equal(left, right) for left, right in zip(ours, float_head, strict=True))


def test_a_tied_lm_head_is_int8_and_the_embedding_is_not(tmp_path: Path) -> None:
    """The reference stores the same weights separately: its embedding is a table of its own."""
    chosen = prompts(make_checkpoint(tmp_path / "tied", "qwen2", tie_word_embeddings=True))
    make_checkpoint(tmp_path / "apart", "qwen2", tie_word_embeddings=False)
    weights = load_file(tmp_path / "tied" / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "apart" / "model.safetensors", {"format": "pt"})
    tied, apart = (logprobs(tmp_path / name, chosen, int8=True) for name in ("tied", "apart"))
    assert all(torch.equal(left, right) for left, right in zip(tied, apart, strict=True))
    assert load(tmp_path / "tied", int8=True)[0].tie_word_embeddings


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_stored_experts(family: str, tmp_path: Path) -> None:
    """Stored int8 experts equal those quantised while loading, which `test_close_to_the_float_model` compares with
    transformers."""
    chosen = prompts(make_checkpoint(tmp_path / "float", family))
    quantise_checkpoint(tmp_path / "float", tmp_path / "int8", ignore=["lm_head", *ROUTERS])
    ours = logprobs(tmp_path / "int8", chosen)
    at_load = logprobs(tmp_path / "float", chosen, int8=True, int8_lm_head=False)
    for again in (at_load, logprobs(tmp_path / "int8", chosen, max_chunk=37)):
        assert all(torch.equal(left, right) for left, right in zip(ours, again, strict=True))


def test_scales_in_bfloat16_and_modules_that_are_ignored(tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path / "float", "qwen2"))
    ignore = ["lm_head", "model.layers.1.mlp.down_proj", *(f"model.layers.2.self_attn.{n}_proj" for n in "qkv")]
    plain = quantise_checkpoint(tmp_path / "float", tmp_path / "int8", scale_dtype=torch.bfloat16, ignore=ignore)
    theirs = int8_logprobs(plain, chosen, ignore)
    check_against_transformers(logprobs(tmp_path / "int8", chosen), theirs)
    path = tmp_path / "int8" / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["ignore"] = ["re:.*head", *ignore[1:2], r"re:model\.layers\.2\.self_attn\.[qkv]_proj"]
    path.write_text(json.dumps(config))
    check_against_transformers(logprobs(tmp_path / "int8", chosen), theirs)


@pytest.mark.parametrize("family", mostly_slow(family for family in FAMILIES if family not in SCATTERED))
def test_close_to_the_float_model(family: str, tmp_path: Path) -> None:
    """Random weights: the measured error of logprobs is 1.6 to 3.5 % of their spread, greedy agreement 94 to 98 %."""
    chosen = prompts(make_checkpoint(tmp_path, family, std=0.1))
    ours = torch.cat(logprobs(tmp_path, chosen, int8=True, int8_lm_head=False))
    whole = torch.cat(logprobs(tmp_path, chosen, int8=True))
    exact = torch.cat([reference_logprobs(tmp_path, prompt) for prompt in chosen])
    spread = exact - exact.mean(-1, keepdim=True)
    # Random routers choose by small differences, these by the smallest: some experts differ from the float model's.
    limit = 0.15 if family in ("deepseek_v3", "glm4_moe", "gpt_oss") else 0.06
    assert 0.001 < (ours - exact).norm() / spread.norm() < limit
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() > 0.88
    assert 0.001 < (whole - ours).norm() / spread.norm() < 0.02  # the error that the LM head adds


# Experts are weighted by float products, which differ in their last bits.
@pytest.mark.parametrize("family", mostly_slow(family for family in FAMILIES if family not in WITH_EXPERTS))
def test_the_reference_of_the_product_gives_the_same_model(family: str, tmp_path: Path) -> None:
    chosen = prompts(make_checkpoint(tmp_path, family))[:6]
    spec, weight_map = read_model(json.loads((tmp_path / "config.json").read_text()))
    spec = spec.with_int8()
    checkpoint = Checkpoint(tmp_path)
    sources = match_tensors(checkpoint, spec, weight_map, str(tmp_path))[1]
    read = CheckpointLoader(checkpoint, sources, torch.float32, CPU)
    _, decoder = load(tmp_path, int8=True)
    fastest = choose(CPU, torch.float32, {group.head_dim for group in spec.kv_groups})
    kernels = replace(fastest, pack_int8=reference.pack_int8)
    plain = build_decoder(
        spec, ModelBuilder(read, kernels, build_shard(spec, ParallelLayout(), 0), ProcessGroups(), spec.int8), CPU
    )
    for left, right in zip(
        Harness(spec, plain, torch.float32).logprobs(chosen),
        Harness(spec, decoder, torch.float32).logprobs(chosen),
        strict=True,
    ):
        assert (left - right).abs().max() < 1e-5


def requests(vocab_size: int, num_tokens: int = 6) -> list[EngineCoreRequest]:
    rng = random.Random(4)
    return [
        greedy(number, [rng.randrange(vocab_size) for _ in range(length)], num_tokens, logprobs=0)
        for number, length in enumerate((1, 9, 26, 12, 40))
    ]


@pytest.mark.pairs("int8 + TP", "int8 + PP")
@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("family", mostly_slow(["llama", "opt"], ["llama"]))
def test_several_ranks(family: str, stored: bool, tmp_path: Path) -> None:
    """Stages change nothing. With tensor parallelism, each rank rounds its own part of a row-parallel product's input,
    so logprobs differ by rounding errors, here less than 0.2, and close races may choose other tokens."""
    wanted = requests(make_checkpoint(tmp_path / "float", family, std=0.1))
    directory = tmp_path / "float"
    how: dict[str, object] = {"quantization": "int8"}
    if stored:
        quantise_checkpoint(tmp_path / "float", tmp_path / "int8")
        directory, how = tmp_path / "int8", {}
    one = generate(make_engine(directory, **how), wanted)
    two_stages = generate(make_engine(directory, pipeline=2, **how), wanted)
    for number, result in one.items():
        assert two_stages[number].token_ids == result.token_ids
        assert two_stages[number].logprobs == result.logprobs  # to the last bit
    for grid in ({"tensor": 2}, {"tensor": 3}, {"tensor": 2, "pipeline": 2}, {"tensor": 8}):
        many = generate(make_engine(directory, **grid, **how), wanted)
        for number, result in one.items():
            ours, theirs = many[number].logprobs[0], result.logprobs[0]
            assert abs(ours.logprob - theirs.logprob) < 0.2


@pytest.mark.parametrize(
    ("dtype", "grid"), mostly_slow([("float32", {}), ("bfloat16", {}), ("bfloat16", {"tensor": 3})], [("bfloat16", {})])
)
def test_a_rows_bits_do_not_depend_on_its_company(dtype: str, grid: dict[str, int], tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama", dtype=dtype)
    rng = random.Random(8)
    sampling = Sampling(max_tokens=9, seed=5, temperature=1.0, logprobs=2)
    wanted = EngineCoreRequest(id=0, prompt_ids=[rng.randrange(vocab_size) for _ in range(19)], sampling=sampling)
    how = {"block_size": 8, "quantization": "int8", **grid}
    alone = generate(make_engine(tmp_path, **how), [wanted])[0]
    for budget, caching in ((64, True), (7, True), (64, False)):
        engine = make_engine(tmp_path, max_num_batched_tokens=budget, enable_prefix_caching=caching, **how)
        for _ in range(4):
            others = [
                greedy(number, [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 9))
                for number in range(1, rng.randrange(2, 7))
            ]
            result = generate(engine, [wanted, *others], [rng.randrange(6) for _ in range(len(others) + 1)])[0]
            assert result.token_ids == alone.token_ids
            assert result.logprobs == alone.logprobs  # to the last bit


def test_dummy_weights(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float", "llama")
    quantise_checkpoint(tmp_path / "float", tmp_path / "int8")
    """The layers of a checkpoint that stores int8 weights are those that are quantised while loading."""
    made, stored = (read_model(json.loads((tmp_path / name / "config.json").read_text())) for name in ("float", "int8"))
    layers_only = replace(made[0].with_int8(), int8_lm_head=False)
    results = [
        Harness(spec, load_whole(tmp_path, spec, weight_map, load_format="dummy"), torch.float32).logprobs([[1, 2, 3]])
        for spec, weight_map in ((layers_only, made[1]), stored)
    ]
    assert torch.equal(results[0][0], results[1][0])
    engine = make_engine(tmp_path / "float", load_format="dummy", quantization="int8")
    assert len(generate(engine, [greedy(0, [1, 2, 3], 3)])[0].token_ids) == 3


def test_scales_of_the_kv_cache_have_no_effect(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "float", "llama")
    quantise_checkpoint(tmp_path / "float", tmp_path / "int8")
    expected = logprobs(tmp_path / "int8", [[1, 2, 3]])[0]
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    edit_config(tmp_path / "int8", lambda config: config.update(kv_cache_scheme=scheme))
    path = tmp_path / "int8" / "model.safetensors"
    scales = {f"model.layers.1.self_attn.{name}_scale": torch.ones(1) for name in "kv"}
    save_file(load_file(path) | scales, path)
    assert torch.equal(logprobs(tmp_path / "int8", [[1, 2, 3]])[0], expected)


def test_the_log_says_int8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama")
    with caplog.at_level("INFO"):
        make_engine(tmp_path)
        assert "layers in int8" not in caplog.text
        make_engine(tmp_path, quantization="int8")
    assert "as float32 with layers in int8 on cpu" in caplog.text
