"""Any number of ranks gives the tokens of one: every family, sizes that do not divide evenly, every way to sample.

Ranks are threads (`support.ranks`), which check that all ranks of a group make the same calls. Other tests compare a
single rank with transformers.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from serve_llm.common.types import EngineCoreRequest, FinishReason, Sampling
from support.engine import Result, abort, generate, greedy, make_engine
from support.matrix import mostly_slow
from support.ranks import ThreadExecutor
from support.tiny import FAMILIES, WITH_EXPERTS, make_checkpoint

GRIDS = [(2, 1), (3, 1), (4, 1), (8, 1), (1, 2), (1, 3), (2, 2)]  # tensor x pipeline; 8: more than any model has heads
EXPERT_GRIDS = [(2, 1), (3, 1), (7, 1), (2, 2)]  # with 5 whole experts
TOLERANCE = 1e-4  # for logprobs in float32
STYLES: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "prompt_logprobs": 1},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": tuple(range(0, 300, 2))},
    {"temperature": 0.0, "allowed_token_ids": (7, 200, 330), "repetition_penalty": 1.3},
    {"temperature": 1.0},
    {"temperature": 0.9, "top_k": 5},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 0.8, "top_k": 7, "presence_penalty": 0.5, "frequency_penalty": 0.3, "logit_bias": {5: 4.0}},
    {"temperature": 1.0, "top_k": 300, "logprobs": 0, "logprob_token_ids": (9, 0, 200)},
]


def requests(vocab_size: int) -> list[EngineCoreRequest]:
    rng = random.Random(3)
    return [
        EngineCoreRequest(
            id=number,
            prompt_ids=[rng.randrange(vocab_size) for _ in range((1, 9, 26, 12)[number % 4])],
            sampling=Sampling(max_tokens=6, seed=number, **style),
        )
        for number, style in enumerate(STYLES)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@lru_cache(maxsize=1)  # one family at a time
def case(family: str, root: Path) -> tuple[Path, list[EngineCoreRequest], dict[int, Result]]:
    """Return a checkpoint, requests, and the results of one rank."""
    directory = root / family
    wanted = requests(make_checkpoint(directory, family))
    return directory, wanted, generate(make_engine(directory, block_size=8), wanted)


def check(results: dict[int, Result], expected: dict[int, Result]) -> None:
    for number, result in results.items():
        one = expected[number]
        assert (result.token_ids, result.finish_reason) == (one.token_ids, one.finish_reason), STYLES[number]
        for ours, theirs in zip(result.logprobs, one.logprobs, strict=True):
            assert ours.rank == theirs.rank and ours.top_ids == theirs.top_ids
            assert abs(ours.logprob - theirs.logprob) < TOLERANCE
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=TOLERANCE)
        assert (result.prompt_logprobs is None) == (one.prompt_logprobs is None)
        for ours, theirs in zip(result.prompt_logprobs or [], one.prompt_logprobs or [], strict=True):
            assert abs(ours.logprob - theirs.logprob) < TOLERANCE


@pytest.mark.pairs("logprobs + TP", "logprobs + PP")
@pytest.mark.parametrize(("tensor", "pipeline"), mostly_slow(GRIDS, [(3, 1), (1, 2)]))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "gpt2", "deepseek_v3", "qwen3_next"]))
def test_as_one_rank(family: str, tensor: int, pipeline: int, root: Path) -> None:
    directory, wanted, expected = case(family, root)
    engine = make_engine(directory, block_size=8, tensor=tensor, pipeline=pipeline)
    check(generate(engine, wanted, arrivals=[number // 3 for number in range(len(wanted))]), expected)


@pytest.mark.pairs("TP + EP")
@pytest.mark.pairs("PP + EP", slow=True)
@pytest.mark.parametrize(("tensor", "pipeline"), mostly_slow(EXPERT_GRIDS, [(3, 1)]))
@pytest.mark.parametrize("family", mostly_slow(WITH_EXPERTS, ["mixtral", "deepseek_v3", "qwen3_next"]))
def test_whole_experts(family: str, tensor: int, pipeline: int, root: Path) -> None:
    directory, wanted, expected = case(family, root)
    how = {"enable_expert_parallel": True, "tensor_parallel_size": tensor}
    engine = make_engine(directory, block_size=8, tensor=tensor, pipeline=pipeline, **how)
    check(generate(engine, wanted), expected)


@pytest.mark.pairs("TP + PP")
@pytest.mark.parametrize("family", mostly_slow(["mistral", "gpt2", "deepseek_v3", "llama4_text"]))
def test_small_chunks_and_preemption(family: str, root: Path) -> None:
    directory, wanted, expected = case(family, root)
    options = {"block_size": 8, "max_model_len": 40, "max_num_batched_tokens": 12, "tensor": 2, "pipeline": 2}
    kv_cache_config = make_engine(directory, **options).kv_cache_config
    memory = (kv_cache_config.blocks_per_request(40, 12) + 2) * kv_cache_config.block_bytes
    engine = make_engine(directory, **options, kv_cache_memory=memory)
    check(generate(engine, wanted), expected)
    assert engine.scheduler.stats().num_preemptions > 0


ODD: list[tuple[str, dict[str, object], dict[str, object]]] = [
    ("llama", {"tensor": 3}, {"hidden_size": 56, "num_attention_heads": 28, "num_key_value_heads": 4}),  # uneven
    ("llama", {"tensor": 5}, {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}),
    (
        "llama",
        {"tensor": 2, "pipeline": 2},
        {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    ("llama", {"tensor": 2, "split": (3, 1)}, {}),
    ("stablelm", {"tensor": 7, "pipeline": 2}, {"qk_layernorm": True}),  # per-head norms, a rank without heads
    ("gpt2", {"tensor": 3, "split": (1, 60, 10)}, {}),  # the first rank, which adds the biases, has no head
    ("qwen3", {"pipeline": 3, "layers": (2, 1, 2)}, {"num_hidden_layers": 5}),
    ("mistral", {"tensor": 2, "pipeline": 2, "split": (1, 2), "layers": (1, 2)}, {}),
    ("opt", {"tensor": 2, "pipeline": 2}, {"do_layer_norm_before": False, "word_embed_proj_dim": 33}),
    (
        "olmo2",
        {"tensor": 3},
        {"hidden_size": 56, "num_attention_heads": 28, "num_key_value_heads": 2},
    ),  # shared KV
    ("stablelm", {"tensor": 3}, {"use_parallel_residual": True}),
    ("gpt_oss", {"tensor": 5}, {"hidden_size": 56, "num_attention_heads": 14, "num_key_value_heads": 2}),  # sinks
    ("deepseek_v2", {"tensor": 5, "split": (1, 1, 60, 1, 1)}, {"attention_bias": True, "q_lora_rank": 9}),
    ("stablelm", {"tensor": 2, "pipeline": 2}, {"use_parallel_residual": True}),
    ("gpt2", {"pipeline": 2}, {"tie_word_embeddings": False}),
    ("gpt_neox", {"tensor": 3, "split": (3, 1, 1)}, {"use_parallel_residual": False, "attention_bias": False}),
    ("falcon", {"tensor": 3}, {"new_decoder_architecture": False}),  # all ranks hold the single KV head
    ("falcon", {"tensor": 4, "split": (2, 3, 1, 4)}, {"num_ln_in_parallel_attn": 1, "bias": True}),
    ("falcon", {"tensor": 5}, {"hidden_size": 56, "num_attention_heads": 28, "num_kv_heads": 4}),  # split groups
    ("bloom", {"tensor": 3, "split": (3, 1, 1)}, {"hidden_size": 70, "n_head": 7}),
    ("mpt", {"tensor": 7, "pipeline": 2}, {}),  # a rank without any head
    ("gptj", {"tensor": 2, "pipeline": 2}, {"tie_word_embeddings": True}),
    ("llama", {"tensor": 7}, {"vocab_size": 337, "intermediate_size": 5}),  # ranks without feed-forward columns
    ("mixtral", {"tensor": 4}, {"intermediate_size": 3}),
    ("qwen2_moe", {"tensor": 2, "pipeline": 2, "split": (1, 3)}, {}),
    (
        "qwen3_moe",
        {"tensor": 2, "split": (1, 3), "tensor_parallel_size": 2, "enable_expert_parallel": True},
        {"num_experts": 7},
    ),
]
FAST_ODD = [ODD[number] for number in (0, 2, 3, 5, 6, 11, 12, 16, 19, 22, 25)]


@pytest.mark.parametrize(("family", "grid", "overrides"), mostly_slow(ODD, FAST_ODD))
def test_odd_sizes_and_chosen_splits(
    family: str, grid: dict[str, object], overrides: dict[str, object], tmp_path: Path
) -> None:
    wanted = requests(make_checkpoint(tmp_path, family, **overrides))
    expected = generate(make_engine(tmp_path, block_size=8), wanted)
    check(generate(make_engine(tmp_path, block_size=8, **grid), wanted), expected)


@pytest.mark.parametrize(
    ("family", "dtype", "grid"),
    [
        pytest.param("llama", "float32", {"tensor": 3}, marks=pytest.mark.slow),
        ("llama", "bfloat16", {"tensor": 2}),
        ("llama", "float32", {"pipeline": 2}),
        ("mixtral", "float32", {}),
        pytest.param("mixtral", "bfloat16", {"tensor": 2}, marks=pytest.mark.slow),
        pytest.param(
            "qwen2_moe",
            "bfloat16",
            {"tensor": 3, "tensor_parallel_size": 3, "enable_expert_parallel": True},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_rows_bits_do_not_depend_on_its_company(
    family: str, dtype: str, grid: dict[str, int], tmp_path: Path
) -> None:
    vocab_size = make_checkpoint(tmp_path, family, dtype=dtype)
    rng = random.Random(8)
    wanted = EngineCoreRequest(
        id=0,
        prompt_ids=[rng.randrange(vocab_size) for _ in range(19)],
        sampling=Sampling(max_tokens=8, seed=5, temperature=1.0, logprobs=2),
    )
    plain = greedy(99, wanted.prompt_ids, 8)
    few = EngineCoreRequest(id=98, prompt_ids=wanted.prompt_ids, sampling=Sampling(max_tokens=8, seed=1, top_k=9))
    watched = [wanted, plain, few]
    alone = {one.id: generate(make_engine(tmp_path, block_size=8, **grid), [one])[one.id] for one in watched}
    for budget, caching in ((64, True), (7, True), (64, False)):
        engine = make_engine(
            tmp_path, block_size=8, max_num_batched_tokens=budget, enable_prefix_caching=caching, **grid
        )
        for _ in range(2):
            others = [
                greedy(number, [rng.randrange(vocab_size) for _ in range(rng.randrange(1, 30))], rng.randrange(1, 9))
                for number in range(1, rng.randrange(2, 7))
            ]
            arrivals = [rng.randrange(6) for _ in range(len(others) + 3)]
            results = generate(engine, [*watched, *others], arrivals)
            for number, one in alone.items():
                assert results[number].token_ids == one.token_ids
                assert results[number].logprobs == one.logprobs  # to the last bit


@pytest.mark.parametrize("grid", [{"tensor": 2}, {"tensor": 2, "pipeline": 2}])
def test_broken_logits_end_their_request_only(grid: dict[str, int], tmp_path: Path) -> None:
    wanted = requests(make_checkpoint(tmp_path, "llama"))
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    table = tensors["model.embed_tokens.weight"].clone()
    used = {token_id for request in wanted for token_id in request.prompt_ids}
    expected = generate(make_engine(tmp_path, block_size=8), wanted)
    used |= {token_id for result in expected.values() for token_id in result.token_ids}
    broken = next(token_id for token_id in range(len(table)) if token_id not in used)
    table[broken] = torch.nan
    save_file({**tensors, "model.embed_tokens.weight": table}, path)
    doomed = [
        EngineCoreRequest(id=100 + number, prompt_ids=[1, broken, 2], sampling=request.sampling)
        for number, request in enumerate(wanted)
    ]
    results = generate(make_engine(tmp_path, block_size=8, **grid), [*wanted, *doomed])
    assert all(results[request.id].finish_reason is FinishReason.ERROR for request in doomed)
    check({request.id: results[request.id] for request in wanted}, expected)


def test_whole_logits_are_gathered_only_for_rows_that_need_them(tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama")

    def widest(*wanted: EngineCoreRequest) -> int:
        """Return the largest number of values that a rank contributed to one gather."""
        engine = make_engine(tmp_path, block_size=8, tensor=2)
        generate(engine, wanted)
        executor = engine._executor
        assert isinstance(executor, ThreadExecutor)
        calls = [call for call in executor.ranks.meetings[0].calls if call.startswith("all_gather")]
        shapes = [[int(n) for n in call[call.index("[") + 1 : call.index("]")].split(",")] for call in calls]
        return max(int(torch.Size(shape).numel()) for shape in shapes)

    few = EngineCoreRequest(id=1, prompt_ids=[5], sampling=Sampling(max_tokens=4, seed=1, top_k=8))
    assert widest(greedy(0, [1, 2, 3], 4)) == 2  # a value and its id
    assert widest(greedy(0, [1, 2, 3], 4), few) == 2 * 2 * 8
    assert widest(greedy(0, [1, 2, 3], 4), greedy(1, [4], 4, logprobs=0)) == -(-vocab_size // 2)


def test_aborts_while_batches_are_under_way(tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path, "llama")
    engine = make_engine(tmp_path, block_size=8, pipeline=3, max_num_seqs=8)
    rng = random.Random(2)
    for first in range(0, 60, 6):
        prompts = [[rng.randrange(vocab_size) for _ in range(rng.randrange(1, 20))] for _ in range(6)]
        engine.add_requests([greedy(first + n, prompt, 9) for n, prompt in enumerate(prompts)])
        for _ in range(4):
            engine.step()
            engine.scheduler.check_integrity()
        abort(engine, [first + n for n in range(0, 6, 2)])
        engine.scheduler.check_integrity()
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    assert engine.scheduler.stats().kv_cache_usage == 0.0


def test_dummy_weights_are_the_same_model_on_any_grid(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    wanted = [greedy(0, [1, 2, 3], 3, logprobs=3)]
    one = generate(make_engine(tmp_path, load_format="dummy"), wanted)[0]
    for grid in ({"tensor": 3}, {"tensor": 2, "pipeline": 2}):
        many = generate(make_engine(tmp_path, load_format="dummy", **grid), wanted)[0]
        for ours, theirs in zip(many.logprobs, one.logprobs, strict=True):
            assert abs(ours.logprob - theirs.logprob) < TOLERANCE
            assert ours.top_logprobs == pytest.approx(theirs.top_logprobs, abs=TOLERANCE)


def test_a_rank_that_fails_is_named_and_nobody_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path, "llama")
    engine = make_engine(tmp_path, tensor=2, pipeline=2)

    def broken(batch: object, masks: object = None) -> None:
        raise RuntimeError("rank 1 broke")

    monkeypatch.setattr(engine._executor.workers[1], "start", broken)
    with pytest.raises(RuntimeError, match="rank 1 broke"):
        generate(engine, [greedy(0, [1, 2, 3], 4)])
