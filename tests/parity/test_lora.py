"""Adapters give PEFT's results, whatever else is in the batch, on any number of ranks."""

from __future__ import annotations

import shutil
from pathlib import Path

import msgspec
import pytest
import torch

from serve_llm.common.types import Adapter, EngineCoreRequest, FinishReason
from serve_llm.engine.loop import EngineCore
from support import packed, packed_floats
from support.adapter_files import describe, write_adapter
from support.adapter_requests import OPTIONS, PROMPTS, ask, ask_all, check_equal, llama
from support.adapters import check_as_peft, make_adapter, merge
from support.engine import generate, make_engine
from support.matrix import mostly_slow
from support.pooled import compute_vectors, pooling_request
from support.tiny import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT

CASES = [  # family, rank, and changed fields of LoraConfig
    ("llama", 4, {"use_rslora": True}),
    ("phi3", 8, {}),
    ("gpt2", 16, {}),
    ("gpt_neox", 128, {}),
    ("deepseek_v3", 16, {}),
    ("gemma2", 4, {"rank_pattern": {"q_proj": 7}, "alpha_pattern": {"layers.1.mlp.down_proj": 3}}),
    ("qwen3_moe", 4, {}),
    ("falcon", 32, {}),
    ("mistral", 64, {"target_modules": ["q_proj", "v_proj"]}),
    ("glm4", 8, {"target_modules": ["q_proj", "o_proj"], "layers_to_transform": [1]}),
    ("qwen2", 16, {"target_modules": r".*\.(q_proj|up_proj)"}),
    ("cohere", 8, {}),
    ("qwen", 8, {}),
    ("llama4_text", 8, {}),
    ("llama", 4, {"use_dora": True, "use_rslora": True}),
    ("gpt2", 8, {"use_dora": True}),
    ("qwen2", 16, {"use_dora": True}),
    ("phi3", 128, {"use_dora": True}),
    ("gpt_neox", 64, {"use_dora": True, "target_modules": ["query_key_value", "dense"]}),
    ("gptj", 8, {"use_dora": True}),
    ("deepseek_v3", 32, {"use_dora": True}),
    ("qwen3_moe", 4, {"use_dora": True}),
    ("gemma2", 4, {"use_dora": True, "rank_pattern": {"q_proj": 7}}),
    ("falcon", 8, {"use_dora": True}),
    ("bloom", 8, {}),
    ("mpt", 8, {"use_dora": True}),
    ("qwen2_moe", 8, {"target_modules": ["q_proj", "gate_proj", "up_proj", "down_proj"]}),
    ("granitemoeshared", 8, {"target_modules": ["input_linear", "output_linear"], "use_dora": True}),
    ("llama4_text", 8, {"target_modules": ["v_proj", "gate_proj", "up_proj", "down_proj"]}),
    ("qwen3_next", 8, {}),
    ("qwen3_5_text", 8, {"use_dora": True}),
]
FAST = (CASES[0], CASES[2], CASES[4], CASES[15], CASES[26])


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.mark.parametrize(("family", "rank", "config"), mostly_slow(CASES, FAST))
def test_as_peft(family: str, rank: int, config: dict[str, object], tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family)
    adapters: list[Adapter | None] = [None]
    for number in range(2):
        adapters.append(
            make_adapter(checkpoint, tmp_path / f"adapter{number}", family, seed=number, **({"r": rank} | config))
        )
    requests = ask_all(adapters)
    results = generate(make_engine(checkpoint, **OPTIONS), requests)
    check_as_peft(checkpoint, requests, results)


RANKS = (4, 128, 8, 64, 5, 16, 32, 4)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma2", "gpt2", "phi3", "qwen3_moe", "deepseek_v3", "gpt_neox"])
def test_eight_adapters_in_a_batch_of_16_rows(family: str, tmp_path: Path) -> None:
    """The results equal those of PEFT and of merged models."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family)
    adapters = [
        make_adapter(checkpoint, tmp_path / f"adapter{number}", family, seed=number, r=rank)
        for number, rank in enumerate(RANKS)
    ]
    requests = [ask(number, PROMPTS[number % 3], adapters[number % 8]) for number in range(16)]
    results = generate(make_engine(checkpoint, max_loras=8, **OPTIONS), requests)
    check_as_peft(checkpoint, requests, results)
    for number in range(8):
        directory = tmp_path / f"merged{number}"
        merge(checkpoint, tmp_path / f"adapter{number}", directory)
        plain = [ask(row, PROMPTS[row % 3], None) for row in (number, number + 8)]
        for row, merged in generate(make_engine(directory, block_size=8), plain).items():
            assert merged.token_ids == results[row].token_ids


@pytest.mark.pairs("LoRA + embeddings")
@pytest.mark.parametrize("how", [{}, {"tensor": 2}, {"pipeline": 2}], ids=str)
def test_vectors(how: dict[str, int], tmp_path: Path) -> None:
    """Vectors of prompts with an adapter equal those of the merged model, also next to vectors of the base model."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "qwen3")
    adapter = make_adapter(checkpoint, tmp_path / "adapter", seed=1)
    merge(checkpoint, tmp_path / "adapter", tmp_path / "merged")
    embed = {"runner": "generate", "convert": "embed", "block_size": 8} | how
    prompts = [[5, 17, 101, 44, 9] * count for count in (1, 3, 6)]
    plain = [pooling_request(number, ids) for number, ids in enumerate(prompts)]
    adapted = [pooling_request(number + 3, ids, adapter=adapter) for number, ids in enumerate(prompts)]
    engine = make_engine(checkpoint, enable_lora=True, **embed)
    expected = compute_vectors(make_engine(checkpoint, **embed), plain)
    merged = compute_vectors(make_engine(tmp_path / "merged", **embed), plain)
    for _ in range(2):  # the second time with cached prefixes
        found = compute_vectors(engine, [*plain, *adapted])
        for number in range(3):
            assert found[number].equal(expected[number])
            torch.testing.assert_close(found[number + 3], merged[number], atol=1e-4, rtol=1e-4)
            assert (found[number] - found[number + 3]).abs().max() > 0.01


def test_an_adapter_trained_without_the_head(tmp_path: Path) -> None:
    """For embeddings, on transformers' AutoModel: its modules have no prefix."""
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, "qwen3")
    sizes = {f"layers.{layer}.mlp.down_proj": (60, 97) for layer in range(3)}
    write_adapter(tmp_path / "whole", {f"model.{name}": size for name, size in sizes.items()})
    write_adapter(tmp_path / "without", sizes)
    path = tmp_path / "without" / "adapter_config.json"
    path.write_text(path.read_text().replace("CAUSAL_LM", "FEATURE_EXTRACTION"))
    adapters = [describe(tmp_path / name) for name in ("whole", "without")]
    engine = make_engine(checkpoint, enable_lora=True, runner="generate", convert="embed", block_size=8)
    requests = [pooling_request(number, PROMPTS[0], adapter=adapter) for number, adapter in enumerate(adapters)]
    found = compute_vectors(engine, requests)
    assert found[0].equal(found[1])


@pytest.mark.pairs("LoRA + logprobs")
@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], ["bfloat16"]))
def test_same_bits_alone_and_in_a_crowd(root: Path, dtype: str) -> None:
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters, temperature=1.0, logprobs=2)
    crowd = generate(make_engine(checkpoint, dtype=dtype, **OPTIONS), requests, list(range(len(requests))))
    plain = make_engine(checkpoint, dtype=dtype, block_size=8)
    for request in requests:
        engine = plain if request.adapter is None else make_engine(checkpoint, dtype=dtype, **OPTIONS)
        check_equal(generate(engine, [request]), crowd)


@pytest.mark.pairs("LoRA + TP", "LoRA + PP")
@pytest.mark.parametrize(
    ("family", "tensor", "pipeline", "use_dora"),
    mostly_slow(
        [
            ("llama", 2, 1, False),
            ("gpt2", 1, 2, False),
            ("llama", 3, 2, False),
            ("gpt_neox", 2, 1, False),
            ("falcon", 4, 1, False),
            ("bloom", 3, 1, False),
            ("deepseek_v3", 3, 1, False),
            ("phi3", 8, 1, False),
            ("gpt2", 2, 2, True),
            ("llama", 3, 1, True),
            ("phi3", 3, 2, True),
            ("gpt_neox", 2, 1, True),
            ("deepseek_v3", 3, 1, True),
            ("qwen2_moe", 2, 2, False),
        ],
        [
            ("llama", 2, 1, False),
            ("gpt2", 1, 2, False),
            ("gpt2", 2, 2, True),
            ("llama", 3, 1, True),
            ("qwen2_moe", 2, 2, False),
        ],
    ),
)
def test_several_ranks(family: str, tensor: int, pipeline: int, use_dora: bool, tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", family, r=5, use_dora=use_dora)
    requests = ask_all([None, adapter])
    one = generate(make_engine(checkpoint, **OPTIONS), requests)
    several = generate(make_engine(checkpoint, tensor=tensor, pipeline=pipeline, **OPTIONS), requests)
    assert {number: result.token_ids for number, result in several.items()} == {
        number: result.token_ids for number, result in one.items()
    }


@pytest.mark.pairs("LoRA + int8", "LoRA + int4")
@pytest.mark.parametrize("quantization", ["int8", "int4-g32"])
def test_quantised_bases(root: Path, quantization: str) -> None:
    """Rows without an adapter equal those of the quantised model, and an adapter of zeros changes no row."""
    checkpoint, adapters = llama(root)
    engine = make_engine(checkpoint, quantization=quantization, **OPTIONS)
    plain = generate(make_engine(checkpoint, quantization=quantization, block_size=8), ask_all([None], logprobs=1))
    zeros = make_adapter(checkpoint, root / f"zeros-{quantization}", scale=0.0)
    with_zeros = generate(engine, ask_all([zeros], logprobs=1))
    check_equal(with_zeros, plain)
    changed = generate(engine, ask_all([adapters[2]], logprobs=1))
    assert all(changed[number].token_ids != plain[number].token_ids for number in plain)


@pytest.mark.parametrize("form", ["fp8-block", "int8-static", "nf4-nested", "gptq"])
def test_dora_of_quantised_checkpoints(form: str, tmp_path: Path) -> None:
    """Row norms are those of the dequantised weights."""
    if form == "gptq":
        packed.make_packed(tmp_path, "llama", packed.Packing("gptq", has_order=True))
    else:
        packed_floats.make_packed(tmp_path, "llama", form)
    adapter = make_adapter(tmp_path / "plain", tmp_path / "adapter", use_dora=True)
    requests = ask_all([None, adapter])
    check_as_peft(tmp_path / "plain", requests, generate(make_engine(tmp_path / "packed", **OPTIONS), requests))


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_dora_as_merged(family: str, tmp_path: Path) -> None:
    checkpoint = tmp_path / "base"
    make_checkpoint(checkpoint, family)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", family, use_dora=True)
    merge(checkpoint, tmp_path / "adapter", tmp_path / "merged")
    found = generate(make_engine(checkpoint, **OPTIONS), ask_all([adapter]))
    merged = generate(make_engine(tmp_path / "merged", block_size=8), ask_all([None]))
    assert [one.token_ids for one in found.values()] == [one.token_ids for one in merged.values()]


@pytest.mark.parametrize("quantization", ["int8", "int4-g32"])
def test_dora_that_changes_nothing(quantization: str, root: Path, tmp_path: Path) -> None:
    """Without LoRA products, each row keeps its norm."""
    checkpoint, _ = llama(root)
    adapter = make_adapter(checkpoint, tmp_path / "adapter", use_dora=True, scale=0.0, magnitude=0.0)
    options = {"quantization": quantization, **OPTIONS}
    found = generate(make_engine(checkpoint, **options), ask_all([None, adapter], logprobs=1))
    for number in range(0, len(found), 2):
        assert found[number].token_ids == found[number + 1].token_ids
        for plain, scaled in zip(found[number].logprobs, found[number + 1].logprobs, strict=True):
            assert plain.logprob == pytest.approx(scaled.logprob, abs=1e-3)


@pytest.mark.pairs("LoRA + prefix cache")
def test_prefixes_are_shared_within_an_adapter_only(root: Path, tmp_path: Path) -> None:
    checkpoint, adapters = llama(root)
    engine = make_engine(checkpoint, **OPTIONS)
    prompt = [7] * 33

    def count_cached(adapter: Adapter | None) -> int | None:
        return generate(engine, [ask(1, prompt, adapter)])[1].cached_tokens

    assert [count_cached(adapter) for adapter in adapters] == [0] * len(adapters)
    assert [count_cached(adapter) for adapter in adapters] == [32] * len(adapters)
    assert adapters[1] is not None
    copy = tmp_path / "copy"
    shutil.copytree(adapters[1].directory, copy)
    assert count_cached(describe(copy, "another name")) == 32  # the content counts, not the name
    (copy / "adapter_config.json").write_text((copy / "adapter_config.json").read_text() + "\n")
    assert count_cached(describe(copy)) == 0


def test_more_adapters_than_slots(root: Path) -> None:
    checkpoint, adapters = llama(root)
    requests = ask_all(adapters)
    expected = generate(make_engine(checkpoint, **OPTIONS), requests)
    engine = make_engine(checkpoint, max_loras=1, **OPTIONS)
    check_equal(generate(engine, requests, list(range(len(requests)))), expected)


def test_a_sequence_with_an_adapter_goes_on_after_a_restart(root: Path) -> None:
    checkpoint, adapters = llama(root)
    (request,) = ask_all([adapters[1]], temperature=1.0)[:1]
    whole = generate(make_engine(checkpoint, **OPTIONS), [request])[0].token_ids
    for cut in (1, 4):
        rest = msgspec.structs.replace(request, output_ids=whole[:cut])
        assert whole[:cut] + generate(make_engine(checkpoint, **OPTIONS), [rest])[0].token_ids == whole


def run_failing(engine: EngineCore, request: EngineCoreRequest) -> str | None:
    """Return the error that the request ends with."""
    engine.add_requests([request])
    while engine.has_work:
        for output in engine.step().outputs:
            if output.finish_reason is not None:
                assert output.finish_reason == FinishReason.ERROR
                return output.error
    return None


def test_files_that_changed_end_the_request_with_an_error(root: Path, tmp_path: Path) -> None:
    checkpoint, adapters = llama(root)
    assert adapters[1] is not None and adapters[2] is not None
    directory = tmp_path / "changing"
    shutil.copytree(adapters[1].directory, directory)
    adapter = describe(directory)
    engine = make_engine(checkpoint, max_loras=1, **OPTIONS)
    (before,) = generate(engine, [ask(0, PROMPTS[0], adapter)]).values()
    shutil.copytree(adapters[2].directory, directory, dirs_exist_ok=True)
    error = run_failing(engine, ask(1, PROMPTS[0], adapter))
    assert error == "the files of the adapter changing have changed since it was loaded; load it again"
    (after,) = generate(engine, [ask(2, PROMPTS[0], describe(directory))]).values()
    assert after.token_ids != before.token_ids
    shutil.rmtree(directory)
    error = run_failing(engine, ask(3, PROMPTS[0], adapter))
    assert error is not None and error.startswith("the adapter changing cannot be loaded again: ")
    check_equal(
        generate(engine, [ask(4, PROMPTS[0], None)]),
        generate(make_engine(checkpoint, block_size=8), [ask(4, PROMPTS[0], None)]),
    )
