"""The predictions of `plan` for a rank hold: weights and KV cache exactly, a step's peak within 3 %."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_llm.cli.plan.activations import LargestStep
from serve_llm.cli.plan.hardware import HardwareOptions
from serve_llm.cli.plan.planner import make_plan
from serve_llm.common.hub import read_config, resolve_model
from serve_llm.common.options.sources import make_options
from serve_llm.common.types import Sampling
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups, SingleRankGroup
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.worker import Worker
from serve_llm.kernels.cpu import library
from support import packed_floats, resident
from support.matrix import mostly_long, mostly_slow
from support.quantised import quantise_checkpoint
from support.resolved import resolve_all
from support.tiny import FAMILIES, make_checkpoint

pytestmark = [
    pytest.mark.skipif(
        torch.backends.cpu.get_cpu_capability() != "AVX512", reason="weights are packed in another layout here"
    ),
    pytest.mark.skipif(library.find() is None, reason="the plan is for the compiled kernels"),
]
CACHE = 8 << 20  # bytes: about as much as weights and step, so that errors in it show
# Sequences of this length end in the second tile of keys; windows of 21 and 37 tokens reach into both tiles.
SIZES = {"max_model_len": 140, "kv_cache_memory": CACHE, "device": "cpu"}


def largest_batch(step: LargestStep, groups: tuple[KVCacheSpec, ...], num_blocks: int) -> SchedulerOutput:
    """Count as `LargestStep.from_config` does; block numbers do not affect memory."""
    rows, chunks, left = [], [], step.tokens - step.singles
    for row in range(step.sampled):
        length = step.context if row < step.singles else min(left, step.context)
        left -= 0 if row < step.singles else length
        start = length - 1 if row < step.singles else 0
        table = [[index % num_blocks for index in range(-(-length // group.block_size))] for group in groups]
        rows.append(NewRequestData(row, [1] * length, length, Sampling(max_tokens=1, seed=0), None))
        chunks.append(ScheduledTokens(row, start, length - start, table, True, []))
    assert left == 0
    return SchedulerOutput(rows, chunks)


@dataclass(frozen=True)
class LoneGroup:
    """A rank without peers: allocates as a shared-memory group does, and sends nothing."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> list[Tensor]:
        return [x.clone() for _ in range(self.size)]


@dataclass(frozen=True)
class LoneLink:
    dtype: torch.dtype

    def send(self, x: Tensor) -> None:
        pass

    def receive(self, shape: tuple[int, ...]) -> Tensor:
        return torch.zeros(shape, dtype=self.dtype)


def count_cache_bytes(worker: Worker) -> int:
    """Count the bytes of the cache. A rank whose layers have no KV cache gets blocks of one number, which it does not
    keep."""
    storages = [cache.untyped_storage() for cache in worker._runner.caches]
    held = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    has_kv = any(group.layers for group in worker._kv_groups)
    return held if has_kv else held + worker._kv_cache_config.num_blocks * worker._kv_cache_config.block_bytes


ONE = ParallelLayout()


def compare(directory: Path, grid: ParallelLayout = ONE, **more: Any) -> None:
    sizes = {"tensor_parallel_size": grid.tp_size, "pipeline_parallel_size": grid.pp_size}
    options = make_options(str(directory), **(SIZES | sizes | more))
    raw = read_config(directory)
    planned = make_plan(options, HardwareOptions(), raw).chosen
    config, spec, weights = resolve_all(options, str(directory), raw)
    link = LoneLink(getattr(torch, config.dtype))
    workers = []
    for rank in range(grid.size):
        stage, place = grid.pp_rank(rank), grid.tp_rank(rank)
        neighbours = ProcessGroups(
            SingleRankGroup() if grid.tp_size == 1 else LoneGroup(place, grid.tp_size),
            previous=link if stage > 0 else None,
            next=link if stage < grid.pp_size - 1 else None,
        )
        workers.append(Worker(config, spec, weights, build_shard(spec, grid, rank), neighbours))
    num_blocks = min(worker.num_blocks for worker in workers)
    step = LargestStep.from_config(config, config.element_bytes)
    batch = largest_batch(step, planned.cache.groups, num_blocks)
    for worker, expected in zip(workers, planned.ranks, strict=True):
        worker.allocate(num_blocks)
        assert resident.weight_bytes(worker._decoder) == expected.weights
        assert count_cache_bytes(worker) == expected.kv_cache
        worker.start(batch)  # allocates what later steps reuse
        total = expected.weights + expected.kv_cache + resident.peak_bytes(functools.partial(worker.start, batch))
        assert abs(expected.total - total) <= 0.03 * total


@pytest.mark.parametrize("dtype", mostly_long(["bfloat16", "float32"], ["bfloat16"]))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "deepseek_v3"]))
def test_one_rank(family: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    compare(tmp_path, dtype=dtype, max_num_seqs=64)
    compare(tmp_path, dtype=dtype, max_num_seqs=5, max_num_batched_tokens=700)


@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "deepseek_v3"]))
def test_several_ranks(family: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    for grid in (ParallelLayout(2, 1), ParallelLayout(3, 1), ParallelLayout(1, 2), ParallelLayout(2, 2)):
        compare(tmp_path, grid, max_num_seqs=32, max_num_batched_tokens=600)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], ["bfloat16"]))
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "phi3", "stablelm", "gptj", "mixtral"])
def test_a_last_stage_of_one_layer(family: str, dtype: str, tmp_path: Path) -> None:
    """Compiled attention's peak does not hide that of the feed-forward layer."""
    sizes = (
        {"n_embd": 96, "n_head": 6, "n_layer": 3}
        if family.startswith("gpt")
        else {"hidden_size": 96, "num_hidden_layers": 3}
    )
    heads = {} if family.startswith("gpt") else {"num_attention_heads": 6, "num_key_value_heads": 3}
    head_dim = {"head_dim": 16} if family in ("llama", "qwen3", "mixtral") else {}
    make_checkpoint(tmp_path, family, **sizes, **heads, **head_dim)
    compare(tmp_path, ParallelLayout(1, 2), dtype=dtype, max_num_seqs=32, max_num_batched_tokens=600)


@pytest.mark.parametrize("form", ["fp8-ministral", "fbgemm", "modelopt-nvfp4", "bitsandbytes-int8"])
def test_packed_floats(form: str, tmp_path: Path) -> None:
    packed_floats.make_packed(tmp_path, "llama", form)
    for grid in (ONE, ParallelLayout(3, 1), ParallelLayout(1, 2)):
        compare(tmp_path / "packed", grid, dtype="bfloat16", max_num_seqs=32)


@pytest.mark.parametrize("dtype", mostly_long(["bfloat16", "float32"], ["bfloat16"]))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "deepseek_v3"]))
def test_int8(family: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    compare(tmp_path, dtype=dtype, max_num_seqs=64, quantization="int8")
    for grid in (ParallelLayout(2, 1), ParallelLayout(3, 1), ParallelLayout(2, 2)):
        compare(tmp_path, grid, dtype=dtype, max_num_seqs=32, max_num_batched_tokens=600, quantization="int8")


@pytest.mark.parametrize("dtype", mostly_long(["bfloat16", "float32"], ["bfloat16"]))
@pytest.mark.parametrize("family", mostly_slow(FAMILIES, ["llama", "deepseek_v3"]))
def test_int8_caches(family: str, dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family)
    compare(tmp_path, dtype=dtype, max_num_seqs=64, kv_cache_dtype="int8")
    compare(
        tmp_path, ParallelLayout(3, 1), dtype=dtype, max_num_batched_tokens=600, max_num_seqs=32, kv_cache_dtype="int8"
    )


@pytest.mark.parametrize("max_num_seqs", [1, 256])
def test_int8_of_larger_sizes(max_num_seqs: int, tmp_path: Path) -> None:
    compare(resolve_model("demo"), max_num_seqs=max_num_seqs, max_model_len=512, quantization="int8")
    sizes = {"hidden_size": 256, "intermediate_size": 1500, "num_attention_heads": 8, "head_dim": 32}
    make_checkpoint(tmp_path / "float", "llama", **sizes, num_key_value_heads=4)
    quantise_checkpoint(tmp_path / "float", tmp_path / "int8")
    compare(tmp_path / "int8", max_num_seqs=max_num_seqs)
    compare(tmp_path / "int8", ParallelLayout(3, 1), max_num_seqs=max_num_seqs)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], ["bfloat16"]))
def test_logits_as_the_peak(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama", vocab_size=20001, head_dim=16)
    for grid in (ONE, ParallelLayout(2, 1), ParallelLayout(3, 1)):
        compare(tmp_path, grid, dtype=dtype, max_num_seqs=200, max_num_batched_tokens=300)


@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], ["bfloat16"]))
def test_norms_of_projections_with_compiled_attention(dtype: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "olmo2", hidden_size=96)
    for grid in (ONE, ParallelLayout(3, 1)):
        compare(tmp_path, grid, dtype=dtype, max_num_seqs=32, max_num_batched_tokens=600)


@pytest.mark.parametrize(
    ("family", "sizes"),
    [
        ("stablelm", {"use_parallel_residual": True}),
        ("gpt_neox", {"hidden_size": 96, "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"}}),  # compiled
        ("falcon", {"hidden_size": 96, "bias": True, "num_ln_in_parallel_attn": 1}),
    ],
)
def test_parallel_halves(family: str, sizes: dict[str, Any], tmp_path: Path) -> None:
    make_checkpoint(tmp_path, family, **sizes)
    for grid in (ONE, ParallelLayout(3, 1), ParallelLayout(1, 2)):
        compare(tmp_path, grid, max_num_seqs=32, max_num_batched_tokens=600)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
@pytest.mark.parametrize("dtype", mostly_slow(["bfloat16", "float32"], ["bfloat16"]))
@pytest.mark.parametrize(
    ("family", "width", "shared"),
    [("qwen2_moe", 20, 40), ("qwen2_moe", 200, 10), ("qwen2_moe", 10, 600), ("qwen3_moe", 300, None)],
)
def test_experts_as_the_peak(
    family: str, width: int, shared: int | None, dtype: str, quantization: str, tmp_path: Path
) -> None:
    """All tokens of the step are equal, so they all use the same experts: the worst case, which the plan counts."""
    sizes = {"hidden_size": 96, "moe_intermediate_size": width, "shared_expert_intermediate_size": shared}
    make_checkpoint(tmp_path, family, **{key: size for key, size in sizes.items() if size}, num_hidden_layers=2)
    how = {"dtype": dtype, "max_num_seqs": 32, "max_num_batched_tokens": 900, "quantization": quantization}
    compare(tmp_path, **how)
    compare(tmp_path, ParallelLayout(3, 1), **how)


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_whole_experts(quantization: str, tmp_path: Path) -> None:
    """All experts are chosen, so that every rank has its maximal load."""
    make_checkpoint(tmp_path, "qwen2_moe", hidden_size=96, moe_intermediate_size=80, num_experts_per_tok=5)
    for grid in (ParallelLayout(2, 1), ParallelLayout(3, 1), ParallelLayout(7, 1)):
        how = {"max_num_batched_tokens": 900, "quantization": quantization, "enable_expert_parallel": True}
        compare(tmp_path, grid, max_num_seqs=32, **how)


def test_more_ranks_than_heads(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, "llama")
    compare(tmp_path, ParallelLayout(8, 1), max_num_seqs=32)


@pytest.mark.parametrize("max_num_seqs", [1, 16, 256])
def test_the_demo_model(max_num_seqs: int) -> None:
    compare(resolve_model("demo"), max_num_seqs=max_num_seqs, max_model_len=512)
