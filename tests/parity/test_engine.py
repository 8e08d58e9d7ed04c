"""The whole engine against transformers, in float32, on random checkpoints with awkward sizes: every family, and models
in transformers' own code.

The same prompts, from one token to several blocks, are computed in every way the engine supports: all at once, in
chunks, with prefix cache hits and misses, and with forced preemption. Tokens must be equal, logprobs within 1e-3.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import pytest

from serve_llm.common.types import FinishReason
from serve_llm.engine.loop import EngineCore
from support.engine import generate, greedy, make_engine
from support.matrix import mostly_slow
from support.reference import reference_greedy
from support.tiny import FAMILIES, HYBRIDS, OTHERS, make_checkpoint

NEW_TOKENS = 12
TOLERANCE = 1e-3


def prompts(vocab_size: int) -> list[list[int]]:
    rng = random.Random(7)
    shared = [rng.randrange(vocab_size) for _ in range(40)]
    lengths = (1, 2, 7, 8, 9, 16, 17, 33)
    return [[rng.randrange(vocab_size) for _ in range(n)] for n in lengths] + [[*shared, n] for n in range(3)]


@lru_cache(maxsize=1)  # one family at a time
def case(family: str, root: Path) -> tuple[Path, list[list[int]], list[tuple[list[int], list[float]]]]:
    directory = root / family
    vocab_size = make_checkpoint(directory, family)
    chosen = prompts(vocab_size)
    return directory, chosen, [reference_greedy(directory, prompt, NEW_TOKENS) for prompt in chosen]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def check(engine, chosen, expected, first_id: int = 0) -> dict:
    requests = [greedy(first_id + n, prompt, NEW_TOKENS, logprobs=1) for n, prompt in enumerate(chosen)]
    results = generate(engine, requests)
    for number, (ids, logprobs) in enumerate(expected):
        result = results[first_id + number]
        assert result.token_ids == ids
        assert result.finish_reason is FinishReason.LENGTH
        for ours, theirs in zip(result.logprobs, logprobs, strict=True):
            assert abs(ours.logprob - theirs) < TOLERANCE
    return results


def engine_of(family: str, directory: Path, **options: object) -> EngineCore:
    how = "transformers" if family in OTHERS else "auto"
    return make_engine(directory, block_size=8, model_impl=how, **options)


class TestFamily:
    @pytest.mark.parametrize(
        "family", mostly_slow([*FAMILIES, *OTHERS], ["llama", "gpt2", "gemma3_text", "deepseek_v3", "qwen3_next"])
    )
    def test_all_at_once_then_from_the_prefix_cache(self, family: str, root: Path) -> None:
        directory, chosen, expected = case(family, root)
        engine = engine_of(family, directory)
        first = check(engine, chosen, expected)
        again = check(engine, chosen, expected, first_id=100)
        assert all(first[n].cached_tokens == 0 for n in range(9))
        # A hit ends at a block boundary of every group.
        step = max(group.block_size for group in engine.kv_cache_config.groups)
        assert all(again[100 + n].cached_tokens == (len(p) - 1) // step * step for n, p in enumerate(chosen))

    @pytest.mark.parametrize(
        "family", mostly_slow([*FAMILIES, *OTHERS], ["llama", "gemma3_text", "mixtral", "deepseek_v3"])
    )
    def test_in_small_chunks_without_prefix_cache(self, family: str, root: Path) -> None:
        directory, chosen, expected = case(family, root)
        engine = engine_of(family, directory, max_num_batched_tokens=5, enable_prefix_caching=False)
        results = check(engine, chosen, expected)
        assert all(result.cached_tokens == 0 for result in results.values())

    @pytest.mark.parametrize("family", mostly_slow([*FAMILIES, *OTHERS], ["llama", "mixtral", "deepseek_v3"]))
    def test_with_preemption(self, family: str, root: Path) -> None:
        directory, chosen, expected = case(family, root)
        roomy = engine_of(family, directory, max_model_len=64)
        blocks = roomy.kv_cache_config.blocks_per_request(64, 2048) + 3
        memory = replace(roomy.kv_cache_config, num_blocks=blocks).num_bytes
        engine = engine_of(family, directory, max_model_len=64, kv_cache_memory=memory)
        check(engine, chosen, expected)
        if family not in HYBRIDS:  # fewer hybrid requests run at a time
            assert engine.scheduler.stats().num_preemptions > 0
