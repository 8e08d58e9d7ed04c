from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.engine.config import KVCacheFormat
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import AttentionSpec, KVGroup, LayerSpec, MLPSpec, ModelSpec, NormSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker import kv_cache
from serve_llm.engine.worker.memory import allocate_cache

FULL = {"max_model_len": 1024, "max_chunk": 64}


def test_groups_share_equal_byte_blocks() -> None:
    groups = (
        KVGroup(layers=tuple(range(21)), num_kv_heads=2, head_dim=64, sliding_window=None),
        KVGroup(layers=(21, 22, 23), num_kv_heads=2, head_dim=64, sliding_window=128),
    )
    kv_cache_config = kv_cache.plan_cache(groups, groups, KVCacheFormat(2), block_size=16, num_bytes=10_000_000, **FULL)
    assert kv_cache_config.block_bytes == 21 * 2 * 2 * 64 * 2 * 16
    assert [group.block_size for group in kv_cache_config.groups] == [16, 64]  # 3 layers fit 7 times as many tokens
    assert kv_cache_config.num_blocks == 10_000_000 // kv_cache_config.block_bytes
    assert kv_cache_config.blocks_per_request(1024, max_chunk=64) == 64 + 4


@pytest.mark.skipif(
    not Path("/sys/kernel/mm/transparent_hugepage").is_dir(), reason="the system has no transparent huge pages"
)
def test_a_cache_is_advised_to_lie_in_huge_pages() -> None:
    groups = (KVGroup(layers=(0,), num_kv_heads=2, head_dim=64, sliding_window=None),)
    kv_cache_config = kv_cache.plan_cache(groups, groups, KVCacheFormat(2), 16, 16 << 20, **FULL)
    [cache] = allocate_cache(kv_cache_config, groups, torch.bfloat16, torch.device("cpu"))
    address = cache.data_ptr() + (4 << 20)
    flags: list[str] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, *rest = line.split()
        if not name.endswith(":"):  # the first line of a mapping: begin-end ...
            begin, end = (int(part, 16) for part in name.split("-"))
            inside = begin <= address < end
        elif inside and name == "VmFlags:":
            flags = rest
    assert "hg" in flags


def test_an_int8_cache_counts_its_scales() -> None:
    groups = (KVGroup(layers=tuple(range(24)), num_kv_heads=2, head_dim=64, sliding_window=None),)
    kv_cache_config = kv_cache.plan_cache(groups, groups, KVCacheFormat(1, scale_bytes=4), 16, 1 << 28, **FULL)
    assert kv_cache_config.block_bytes == 24 * 2 * 2 * 68 * 16
    assert kv_cache_config.num_blocks == (1 << 28) // kv_cache_config.block_bytes
    caches = allocate_cache(replace(kv_cache_config, num_blocks=3), groups, torch.int8, torch.device("cpu"))
    assert {(cache.shape, cache.dtype) for cache in caches} == {((3, 2, 2, 16, 68), torch.int8)}
    assert caches[0].untyped_storage().nbytes() == 3 * kv_cache_config.block_bytes
    for number, cache in enumerate(caches):
        cache.fill_(number)
    assert all((cache == number).all() for number, cache in enumerate(caches))  # they do not overlap


@pytest.mark.parametrize(("dtype", "row"), [(torch.float32, KVCacheFormat(4)), (torch.int8, KVCacheFormat(1, 4))])
@pytest.mark.parametrize(
    "grid",
    [
        ParallelLayout(2),
        ParallelLayout(3),
        ParallelLayout(5),
        ParallelLayout(8),
        ParallelLayout(2, 2),
        ParallelLayout(1, 3),
    ],
)
def test_ranks_agree_on_tokens_and_blocks_hold_what_a_rank_has(
    grid: ParallelLayout, dtype: torch.dtype, row: KVCacheFormat
) -> None:
    full = AttentionSpec(6, 3, 14, 1.0)
    layer = LayerSpec(full, MLPSpec(97, "silu"), NormSpec("rms", 1e-6))
    sliding = replace(layer, attention=replace(full, sliding_window=21))
    spec = ModelSpec("X", 331, 60, 256, (layer, layer, sliding), None, tie_word_embeddings=True)
    whole = kv_cache.plan_cache(spec.kv_groups, spec.kv_groups, row, 8, 1 << 20, **FULL)
    assert [group.block_size for group in whole.groups] == [8, 16]
    for rank in range(grid.size):
        own = build_shard(spec, grid, rank).kv_groups(spec)
        kv_cache_config = kv_cache.plan_cache(spec.kv_groups, own, row, 8, 1 << 20, **FULL)
        assert kv_cache_config.groups == whole.groups
        sizes = [group.block_size for group in kv_cache_config.groups]
        needs = [kv_cache.bytes_per_token(group, row) * size for group, size in zip(own, sizes, strict=True)]
        assert kv_cache_config.block_bytes == (max(needs) or row.element_bytes)
        assert kv_cache_config.block_bytes <= whole.block_bytes
        assert kv_cache_config.num_blocks >= whole.num_blocks
        caches = allocate_cache(replace(kv_cache_config, num_blocks=3), own, dtype, torch.device("cpu"))
        assert len(caches) == len(build_shard(spec, grid, rank).layers)
        assert all(len(cache) == 3 for cache in caches)


def test_the_two_lines_say_what_fits(caplog: pytest.LogCaptureFixture) -> None:
    groups = (KVGroup(layers=(0,), num_kv_heads=1, head_dim=8, sliding_window=None),)
    kv_cache_config = kv_cache.plan_cache(
        groups, groups, KVCacheFormat(4), block_size=16, num_bytes=64 * 1000 * 16, **FULL
    )
    with caplog.at_level(logging.INFO):
        kv_cache.check_capacity(kv_cache_config, max_model_len=1600, max_chunk=64, device="cpu")
    assert [record.getMessage() for record in caplog.records] == [
        "CPU KV cache size: 16,000 tokens",
        "Maximum concurrency for 1,600 tokens per request: 10.00x",
    ]


def test_too_small_a_cache_says_what_to_change() -> None:
    groups = (KVGroup(layers=(0,), num_kv_heads=1, head_dim=8, sliding_window=None),)
    kv_cache_config = kv_cache.plan_cache(
        groups, groups, KVCacheFormat(4), block_size=16, num_bytes=64 * 16 * 3, **FULL
    )
    with pytest.raises(
        CapacityError, match=r"room for 4\d tokens, but one request may need 100: .* at least 7,168 bytes"
    ):
        kv_cache.check_capacity(kv_cache_config, max_model_len=100, max_chunk=64, device="cpu")


def test_default_cpu_cache_is_bounded_by_free_memory() -> None:
    free = 10 << 30
    assert kv_cache.choose_cpu_cache_bytes(1000, 1, free) == kv_cache.CPU_SMALLEST
    assert kv_cache.choose_cpu_cache_bytes(100 << 20, 1, free) == 16 * (100 << 20)
    assert kv_cache.choose_cpu_cache_bytes(1 << 30, 1, free) == int(0.4 * free)
    assert kv_cache.choose_cpu_cache_bytes(1 << 30, 4, free) == int(0.4 * free) // 4
    assert kv_cache.choose_cpu_cache_bytes(1000, 4, free) == kv_cache.CPU_SMALLEST // 4


def test_sizes_for_people() -> None:
    assert kv_cache.format_bytes(13639680) == "13.01 MiB"
    assert kv_cache.format_bytes(1536 << 30) == "1,536.00 GiB"


def test_free_memory_is_read_from_this_machine() -> None:
    assert 1 << 20 < kv_cache.find_free_memory() < 1 << 50


@pytest.mark.parametrize(
    ("folder", "limit", "used", "prefix"),
    [
        (".", "memory.max", "memory.current", ""),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
    ],
)
def test_files_that_a_container_has_read_do_not_count_as_taken(
    tmp_path: Path, folder: str, limit: str, used: str, prefix: str
) -> None:
    (there := tmp_path / folder).mkdir(exist_ok=True)
    (there / limit).write_text("10000000\n")
    (there / used).write_text("9900000\n")
    (there / "memory.stat").write_text(f"{prefix}active_file 3000000\n{prefix}inactive_file 4000000\nother 5\n")
    assert kv_cache.find_free_memory(tmp_path) == 10_000_000 - 2_900_000
    (there / limit).write_text("max\n")
    assert kv_cache.find_free_memory(tmp_path) > 1 << 30


def test_chunks_are_whole_blocks() -> None:
    whole = KVGroup(layers=(3,), num_kv_heads=1, head_dim=8, sliding_window=None)
    chunked = KVGroup(layers=(0, 1, 2), num_kv_heads=1, head_dim=8, sliding_window=48, chunked=True)

    def lay_out(block_size: int) -> list[tuple[int, bool]]:
        groups = (chunked, whole)
        kv_cache_config = kv_cache.plan_cache(groups, groups, KVCacheFormat(2), block_size, 1 << 20, **FULL)
        return [(group.block_size, group.chunked) for group in kv_cache_config.groups]

    assert lay_out(16)[0] == (16, True)
    with pytest.raises(OptionError, match=r"--block-size 32: .* chunks of 48 tokens, .* or --max-model-len 48"):
        lay_out(32)
