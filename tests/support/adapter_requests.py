"""Requests with adapters of a small model, for tests of their results."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import msgspec

from serve_llm.common.types import Adapter, EngineCoreRequest
from support.adapters import make_adapter
from support.engine import Result, greedy
from support.tiny import make_checkpoint

PROMPTS = [[5, 17, 101, 44, 9, 230, 61], [7] * 19, [300, 2, 45]]
OPTIONS = {"enable_lora": True, "max_lora_rank": 128, "block_size": 8}
NUM_TOKENS = 6


@lru_cache(maxsize=1)
def llama(root: Path) -> tuple[Path, list[Adapter | None]]:
    """Write a checkpoint. Returns it; no adapter and four with different ranks, the last one with DoRA."""
    checkpoint = root / "llama"
    make_checkpoint(checkpoint, "llama", head_dim=16)
    adapters = [make_adapter(checkpoint, root / f"llama{rank}", seed=rank, r=rank) for rank in (2, 4, 9)]
    adapters.append(make_adapter(checkpoint, root / "llama-dora", seed=3, r=3, use_dora=True))
    return checkpoint, [None, *adapters]


def ask(number: int, prompt: list[int], adapter: Adapter | None, **sampling: object) -> EngineCoreRequest:
    request = greedy(number, prompt, NUM_TOKENS, **sampling)
    return msgspec.structs.replace(request, adapter=adapter)


def ask_all(adapters: list[Adapter | None], **sampling: object) -> list[EngineCoreRequest]:
    """Request each prompt with each adapter."""
    pairs = [(prompt, adapter) for prompt in PROMPTS for adapter in adapters]
    return [ask(number, prompt, adapter, **sampling) for number, (prompt, adapter) in enumerate(pairs)]


def check_equal(results: dict[int, Result], expected: dict[int, Result]) -> None:
    """Assert equality in every bit."""
    for number, result in results.items():
        assert result.token_ids == expected[number].token_ids
        assert result.logprobs == expected[number].logprobs
