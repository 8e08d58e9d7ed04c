"""Steps of a few tokens on a CPU are recorded and repeated (`engine.worker.call_graphs`), with the same bits."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.worker.call_graphs import MAX_TOKENS, CallGraphRunner
from support.engine import assert_equal, generate, make_engine
from support.matrix import mostly_slow
from support.speculation import assert_drafted, draft_freely, draft_from
from support.tiny import make_checkpoint

FAMILIES = {  # with sizes of heads that have compiled attention
    "llama": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "gpt2": {"n_embd": 96},
    "gptj": {"n_embd": 96},
    "gemma3_text": {"head_dim": 16},
    "nemotron": {"head_dim": 16},
    "glm4": {"head_dim": 16},
    "qwen3": {"head_dim": 16},
    "mixtral": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16},
    "deepseek_v3": {"kv_lora_rank": 26, "qk_rope_head_dim": 6},
}
OPTIONS = {"block_size": 8, "max_num_seqs": 20, "max_num_batched_tokens": 37, "speculative_config": "none"}


def few_streams(vocab_size: int) -> tuple[list[EngineCoreRequest], list[int]]:
    """Requests of which one to twenty run at the same time, and the steps before which they arrive."""
    rng = random.Random(5)
    requests = []
    for number in range(32):
        prompt = [rng.randrange(vocab_size) for _ in range(rng.choice((1, 3, 9, 17, 40)))]
        temperature = number % 3 * 0.5
        sampling = Sampling(temperature=temperature, seed=number, max_tokens=rng.choice((2, 24, 40)), logprobs=2)
        requests.append(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling))
    return requests, [*[0] * 20, *(rng.randrange(10, 60) for _ in range(12))]


def runners_of(engine: EngineCore) -> list[CallGraphRunner]:
    executor = engine._executor
    workers = getattr(executor, "workers", None) or [executor._worker]  # type: ignore[attr-defined]
    found = [worker._runner.graphs for worker in workers]
    assert all(isinstance(graphs, CallGraphRunner) for graphs in found)
    return found


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "gpt2", "gemma3_text", "mixtral", "deepseek_v3"]))
def test_recorded_steps_have_the_bits_of_others(family: str, tmp_path: Path) -> None:
    requests, arrivals = few_streams(make_checkpoint(tmp_path, family, **FAMILIES[family]))
    expected = generate(make_engine(tmp_path, enforce_eager=True, **OPTIONS), requests, arrivals)
    engine = make_engine(tmp_path, **OPTIONS)
    assert_equal(generate(engine, requests, arrivals), expected)
    (graphs,) = runners_of(engine)
    counts = sorted({descriptor.tokens for descriptor in graphs._graphs})
    assert counts[0] == 1 and len(counts) >= 8 and MAX_TOKENS - 4 < counts[-1] <= MAX_TOKENS


@pytest.mark.parametrize(
    "options",
    [
        {"pipeline": 2},
        {"dtype": "bfloat16"},
        {"dtype": "bfloat16", "quantization": "int8", "kv_cache_dtype": "int8"},
        {"dtype": "bfloat16", "quantization": "int4"},
        {"max_model_len": 80, "kv_cache_memory": "200KiB"},
    ],
    ids=["stages", "bfloat16", "int8", "int4", "preemption"],
)
def test_with_other_features(options: dict[str, object], tmp_path: Path) -> None:
    requests, arrivals = few_streams(make_checkpoint(tmp_path, "llama", head_dim=16))
    expected = generate(make_engine(tmp_path, enforce_eager=True, **(OPTIONS | options)), requests, arrivals)
    engine = make_engine(tmp_path, **(OPTIONS | options))
    assert_equal(generate(engine, requests, arrivals), expected)
    assert all(graphs._graphs for graphs in runners_of(engine))


def test_steps_with_drafts_are_recorded(tmp_path: Path) -> None:
    requests, arrivals = few_streams(make_checkpoint(tmp_path, "llama", head_dim=16))
    options = OPTIONS | {"speculative_config": '{"method": "ngram", "num_speculative_tokens": 3}'}
    expected = generate(make_engine(tmp_path, enforce_eager=True, **OPTIONS), requests, arrivals)
    engine = draft_from(draft_freely(make_engine(tmp_path, **options)), requests, expected)
    assert_equal(generate(engine, requests, arrivals), expected)
    assert_drafted(engine)
    (graphs,) = runners_of(engine)
    assert any(descriptor.tokens > descriptor.sequences for descriptor in graphs._graphs)


@pytest.mark.parametrize(("family", "tensor"), [("llama", 2), ("qwen3_next", 1)])
def test_what_is_not_recorded(family: str, tensor: int, tmp_path: Path) -> None:
    """All-reduces wait for other ranks, and states are in another place each step."""
    make_checkpoint(tmp_path, family, head_dim=16)
    executor = make_engine(tmp_path, tensor=tensor, **OPTIONS)._executor
    workers = getattr(executor, "workers", None) or [executor._worker]  # type: ignore[attr-defined]
    assert all(worker._runner.graphs is None for worker in workers)
