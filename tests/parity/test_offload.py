"""Blocks read back from host memory: the same ids and logprob bits as without any cache, for every kind of KV cache and
every parallel layout."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch

from serve_llm.common.types import Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.scheduler.policy import TokenBudget
from support.adapters import make_adapter
from support.engine import Result, assert_equal, generate, greedy, make_engine
from support.gpu_path import make_gpu_engine
from support.grammars import CALL, EOS, SCHEMA, VOCAB_SIZE, compile_grammar, demo
from support.matrix import mostly_slow
from support.pooled import compute_vectors, make_pooled_checkpoint, pooling_request
from support.speculation import NGRAM, draft_freely
from support.tiny import make_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")  # from PEFT
OPTIONS: dict[str, object] = {"block_size": 8, "max_model_len": 96, "max_num_batched_tokens": 64, "max_num_seqs": 4}
HOWS: dict[str, tuple[str, dict[str, object]]] = {  # family, options
    "plain": ("llama", {}),
    "two ranks": ("qwen2", {"tensor": 2}),
    "stages of two ranks": ("llama", {"tensor": 2, "pipeline": 2}),
    "more ranks than KV heads": ("llama", {"tensor": 3}),
    "windows": ("gemma3_text", {}),
    "windows, two stages": ("mistral", {"pipeline": 2}),
    "chunks": ("llama4_text", {}),
    "latent": ("deepseek_v3", {}),
    "latent, two ranks": ("deepseek_v2", {"tensor": 2}),
    "int8 cache": ("qwen3", {"kv_cache_dtype": "int8"}),
    "int8 cache, windows, two ranks": ("gemma2", {"kv_cache_dtype": "int8", "tensor": 2}),
    "int8 weights": ("llama", {"quantization": "int8"}),
    "fp8 weights": ("llama", {"quantization": "fp8"}),
    "whole experts of two ranks": ("mixtral", {"tensor": 2, "tensor_parallel_size": 2, "enable_expert_parallel": True}),
    "drafts": ("llama", {"speculative_config": NGRAM}),
}


def make_turns(
    vocab_size: int, adapters: Sequence[Adapter | None] = (None,), max_tokens: int = 6
) -> list[list[EngineCoreRequest]]:
    """Return three turns of six conversations, in changing order. Each turn begins with the conversation so far."""
    rng = random.Random(3)
    texts = [[rng.randrange(1, vocab_size) for _ in range(30)] for _ in range(6)]
    turns = []
    for turn in range(3):
        requests = []
        for number in rng.sample(range(6), 6):
            length = 10 + 10 * turn
            request = greedy(10 * turn + number, texts[number][:length] * 2, max_tokens, logprobs=1)
            requests.append(msgspec.structs.replace(request, adapter=adapters[number % len(adapters)]))
        turns.append(requests)
    return [*turns, [msgspec.structs.replace(request, id=100 + request.id) for request in turns[2]]]


def run(engine: EngineCore, turns: Sequence[Sequence[EngineCoreRequest]]) -> dict[int, Result]:
    results: dict[int, Result] = {}
    for requests in turns:
        results |= generate(engine, requests, [2 * number for number in range(len(requests))])
    return results


def small_cache(directory: Path, **options: object) -> dict[str, object]:
    """Return the size of a cache for slightly more than one request of full length."""
    one_rank = {name: value for name, value in options.items() if name in ("kv_cache_dtype", "quantization")}
    kv_cache_config = make_engine(directory, **OPTIONS | one_rank).kv_cache_config
    num_blocks = kv_cache_config.blocks_per_request(96, 64) + 2
    return {
        "kv_cache_memory": num_blocks * kv_cache_config.block_bytes,
        "kv_offload_memory": 60 * kv_cache_config.block_bytes,
    }


def check(engine: EngineCore, turns: Sequence[Sequence[EngineCoreRequest]], expected: dict[int, Result]) -> None:
    found = run(engine, turns)
    assert_equal(found, expected)
    stats = engine.step().stats.offload_memory
    assert stats is not None and stats.num_hits and stats.num_stored
    assert any(result.cached_tokens for result in found.values())


FAST = ("int8 cache, windows, two ranks", "latent")


@pytest.mark.pairs("prefix cache + KV offload", "logprobs + KV offload", "TP + KV offload")
@pytest.mark.pairs(
    "speculation + KV offload",
    "int8 + KV offload",
    "PP + KV offload",
    "fp8 + KV offload",
    "EP + KV offload",
    slow=True,
)
@pytest.mark.parametrize("how", mostly_slow([*HOWS], FAST))
def test_same_bits(how: str, tmp_path: Path) -> None:
    family, options = HOWS[how]
    vocab_size = make_checkpoint(tmp_path, family)
    turns = make_turns(vocab_size)
    expected = run(make_engine(tmp_path, **OPTIONS | options, enable_prefix_caching=False), turns)
    engine = make_engine(tmp_path, **OPTIONS | options | small_cache(tmp_path, **options))
    if how == "drafts":
        draft_freely(engine)
    check(engine, turns, expected)


@pytest.mark.pairs("LoRA + KV offload", "replay + KV offload")
def test_adapters_and_preemption(tmp_path: Path) -> None:
    vocab_size = make_checkpoint(tmp_path / "base", "llama")
    adapters = [None, make_adapter(tmp_path / "base", tmp_path / "adapter", "llama")]
    options = OPTIONS | {"enable_lora": True, "max_lora_rank": 4}
    turns = make_turns(vocab_size, adapters, 24)[:2]
    expected = run(make_engine(tmp_path / "base", **options, enable_prefix_caching=False), turns)
    engine = make_engine(tmp_path / "base", **options | small_cache(tmp_path / "base"))
    check(engine, turns, expected)
    assert engine.scheduler.stats().num_preemptions
    replayed = [
        msgspec.structs.replace(request, id=200 + request.id, output_ids=expected[request.id].token_ids[:3])
        for request in turns[0]
    ]
    for number, result in generate(engine, replayed).items():
        assert result.token_ids == expected[number - 200].token_ids[3:]


@pytest.mark.pairs("grammar + KV offload", "tools + KV offload", "int4 + KV offload", "n + KV offload")
@pytest.mark.parametrize("weights", [{}, {"quantization": "int4-g32"}], ids=["bfloat16", "int4"])
def test_grammars_calls_and_choices(weights: dict[str, object]) -> None:
    """Two choices of every conversation; a third of the requests must be JSON and a third a call."""
    grammars = ["", compile_grammar(json=SCHEMA, disable_any_whitespace=True), compile_grammar(grammar=CALL)]

    def make(request: EngineCoreRequest, choice: int) -> EngineCoreRequest:
        sampling = Sampling(
            max_tokens=24,
            seed=request.id,
            choice=choice,
            logprobs=1,
            grammar=grammars[request.id % 10 % 3],
            stop_token_ids=(EOS,),
        )
        return msgspec.structs.replace(request, id=request.id + 1000 * choice, sampling=sampling)

    turns = [[make(request, choice) for request in turn for choice in range(2)] for turn in make_turns(VOCAB_SIZE)]
    options = OPTIONS | weights
    expected = run(make_engine(demo(), **options, enable_prefix_caching=False), turns)
    check(make_engine(demo(), **options | small_cache(demo(), **weights)), turns, expected)


@pytest.mark.pairs("embeddings + KV offload")
def test_vectors(tmp_path: Path) -> None:
    """Prompts are repeated after others have evicted them."""
    vocab_size = make_pooled_checkpoint(tmp_path, "Qwen3Model")
    rng = random.Random(3)
    requests = [pooling_request(number, [rng.randrange(1, vocab_size) for _ in range(60)]) for number in range(6)]
    expected = compute_vectors(make_engine(tmp_path, **OPTIONS, enable_prefix_caching=False), requests)
    engine = make_engine(tmp_path, **OPTIONS | small_cache(tmp_path))
    for _ in range(2):
        for number, vector in compute_vectors(engine, requests).items():
            assert torch.equal(vector, expected[number])
    stats = engine.step().stats.offload_memory
    assert stats is not None and stats.num_hits


def test_steps_that_run_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, each step is scheduled before the previous one has a result."""
    turns = make_turns(make_checkpoint(tmp_path, "llama"))
    expected = run(make_engine(tmp_path, **OPTIONS, enable_prefix_caching=False), turns)
    engine = make_gpu_engine(tmp_path, monkeypatch, **OPTIONS | small_cache(tmp_path))
    found = run(engine, turns)
    for number, result in expected.items():
        assert found[number].token_ids == result.token_ids
    stats = engine.step().stats.offload_memory
    assert stats is not None and stats.num_hits


def finish_writes(engine: EngineCore) -> None:
    """Wait until the store is open and has written everything. Limited by the number of polls, not by time."""
    manager = engine._offload
    assert manager is not None and manager.store is not None
    for _ in range(2000):
        engine.write_blocks()
        if manager.store.is_open and not manager.num_unwritten:
            return
        manager.store.wait(0.05)
    raise AssertionError("blocks are not written")


@pytest.mark.parametrize("ranks", mostly_slow([1, 2], [2]))
def test_on_disk(ranks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More blocks than host memory holds, several engines in sequence, and damage to every second file."""
    monkeypatch.setattr(TokenBudget, "seconds_per_token", 1.0)  # any disk is faster than recomputing
    turns = make_turns(make_checkpoint(tmp_path / "model", "gemma3_text"))
    expected = run(make_engine(tmp_path / "model", **OPTIONS, tensor=ranks, enable_prefix_caching=False), turns)
    sizes = small_cache(tmp_path / "model", tensor=ranks)
    sizes["kv_offload_memory"] = int(str(sizes["kv_offload_memory"])) // 3
    options = OPTIONS | sizes | {"tensor": ranks} | {"kv_offload_dir": str(tmp_path / "blocks")}
    for number in range(3):
        engine = make_engine(tmp_path / "model", **options)
        finish_writes(engine)
        found: dict[int, Result] = {}
        for requests in turns:
            found |= run(engine, [requests])
            finish_writes(engine)
        assert_equal(found, expected)
        disk = engine.step().stats.offload_disk
        assert disk is not None and disk.num_hits
        assert bool(disk.num_corrupt) == (number == 2) and (disk.num_stored or number == 1)
        if number == 1:
            for index, path in enumerate(sorted((tmp_path / "blocks").glob("*/??/*"))):
                data = path.read_bytes()
                if index % 2:
                    path.write_bytes(data[:-1] if index % 4 == 1 else data[:-1] + bytes([data[-1] ^ 1]))
    other = make_engine(tmp_path / "model", **options | {"dtype": "bfloat16"})
    finish_writes(other)
    assert generate(other, turns[0][:1])[turns[0][0].id].cached_tokens == 0
