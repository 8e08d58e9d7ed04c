"""Savings by sliding windows, on the shapes of published models: by the calculations of `plan`, and as the scheduler
releases blocks. In bfloat16, with blocks of 16 tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import make_plan
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.config import KVCacheFormat
from serve_llm.engine.model.spec import KVGroup
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import max_blocks
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from support import published

ROW = KVCacheFormat(2)
CHUNK = 2048  # tokens per step


def mixed(num_layers: int, every: int, kv_heads: int, head_dim: int, window: int) -> tuple[KVGroup, KVGroup]:
    """Return layers with a window, except for every `every`-th one."""
    whole = tuple(range(every - 1, num_layers, every))
    local = tuple(layer for layer in range(num_layers) if layer not in whole)
    return KVGroup(local, kv_heads, head_dim, window), KVGroup(whole, kv_heads, head_dim, None)


GEMMA_3_1B = mixed(26, 6, 1, 256, 512)
GEMMA_3_4B = mixed(34, 6, 4, 256, 1024)
GEMMA_3_27B = mixed(62, 6, 16, 128, 1024)
GPT_OSS_20B = mixed(24, 2, 8, 64, 128)
COMMAND_R7B = mixed(32, 4, 8, 128, 4096)


def without_windows(groups: tuple[KVGroup, ...]) -> tuple[KVGroup]:
    layers = sorted(layer for group in groups for layer in group.layers)
    return (replace(groups[0], layers=tuple(layers), sliding_window=None),)


def lay_out(groups: tuple[KVGroup, ...], tokens: int, num_bytes: int = 0) -> KVCacheConfig:
    return kv_cache.plan_cache(groups, groups, ROW, 16, num_bytes, max_model_len=tokens, max_chunk=CHUNK)


def request_bytes(groups: tuple[KVGroup, ...], tokens: int) -> int:
    kv_cache_config = lay_out(groups, tokens)
    return kv_cache_config.block_bytes * kv_cache_config.blocks_per_request(tokens, CHUNK)


@pytest.mark.parametrize(
    ("groups", "tokens", "saving"),
    [
        (GEMMA_3_1B, 32768, 3.99),
        (GEMMA_3_4B, 131072, 5.72),
        (GEMMA_3_27B, 131072, 5.22),
        (GPT_OSS_20B, 131072, 1.97),
        (GPT_OSS_20B, 8192, 1.58),
        (COMMAND_R7B, 131072, 3.37),
    ],
)
def test_bytes_of_a_request(groups: tuple[KVGroup, ...], tokens: int, saving: float) -> None:
    plain = request_bytes(without_windows(groups), tokens)
    assert plain == sum(kv_cache.bytes_per_token(group, ROW) for group in groups) * tokens
    taken = request_bytes(groups, tokens)
    assert plain / taken == pytest.approx(saving, abs=0.005)
    local, whole = groups
    needed = (
        kv_cache.bytes_per_token(local, ROW) * (local.sliding_window + CHUNK)
        + kv_cache.bytes_per_token(whole, ROW) * tokens
    )
    assert needed <= taken < 1.2 * needed  # the cost of equal-sized and of whole blocks


def test_plan_says_so() -> None:
    options = make_options("model", device="cpu", kv_cache_memory=8 << 30, max_num_batched_tokens=CHUNK)
    machines = HardwareOptions(memory=32 << 30)
    with_windows, without = (
        make_plan(options, machines, published.GEMMA3_1B | more).chosen
        for more in ({}, {"layer_types": ["full_attention"] * 26})
    )
    assert without.concurrency == pytest.approx(9.85, abs=0.01)
    assert with_windows.concurrency / without.concurrency == pytest.approx(3.99, abs=0.01)
    assert with_windows.cache_tokens / without.cache_tokens == pytest.approx(3.99, abs=0.01)


def most_at_a_time(kv_cache_config: KVCacheConfig, tokens: int, submitted: int) -> int:
    """Run this many requests of `tokens`, mostly prompt. Returns the largest number that generate at the same time."""
    scheduler = Scheduler(
        kv_cache_config.groups,
        kv_cache_config.num_blocks,
        max_num_seqs=submitted,
        max_model_len=tokens,
        max_chunk=CHUNK,
        prefix_caching=False,
    )
    output = 300
    for number in range(submitted):
        sampling = Sampling(max_tokens=output, seed=0)
        scheduler.add(EngineCoreRequest(id=number, prompt_ids=[number] * (tokens - output), sampling=sampling), 0.0)
    most = 0
    while scheduler.has_work:
        batch = scheduler.schedule(CHUNK, 0.0)
        assert batch.scheduled
        generating = sum(chunk.count == 1 for chunk in batch.scheduled)
        scheduler.update_from_output(
            batch, [RunnerOutput(token_id=7 if chunk.sample else None) for chunk in batch.scheduled]
        )
        scheduler.check_integrity()
        most = max(most, generating)
        if generating == len(batch.scheduled) == scheduler.num_running:  # no window holds a prefill chunk any longer
            each = sum(max_blocks(group, tokens, 1) for group in kv_cache_config.groups)
            assert scheduler.stats().kv_cache_usage * kv_cache_config.num_blocks <= generating * each + 1e-6
    assert scheduler.stats().num_preemptions == 0 and scheduler.stats().kv_cache_usage == 0.0
    return most


@pytest.mark.parametrize("groups", [GEMMA_3_1B, GEMMA_3_27B, GPT_OSS_20B])
def test_the_scheduler_runs_as_many_as_the_sums_say(groups: tuple[KVGroup, ...]) -> None:
    tokens = 12000
    plain = without_windows(groups)
    num_bytes = 2 * request_bytes(plain, tokens)
    assert most_at_a_time(lay_out(plain, tokens, num_bytes), tokens, 2) == 2
    kv_cache_config = lay_out(groups, tokens, num_bytes)
    fitting = kv_cache_config.num_blocks // kv_cache_config.blocks_per_request(tokens, CHUNK)
    assert fitting >= 3
    assert most_at_a_time(kv_cache_config, tokens, fitting) == fitting
