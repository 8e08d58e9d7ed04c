"""GPU memory that is left for the KV cache, on a simulated card."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.scheduler.output import SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker import worker
from serve_llm.engine.worker.graphs import Capture
from serve_llm.engine.worker.kv_cache import KVCacheConfig, format_bytes
from serve_llm.engine.worker.memory import (
    build_dummy_batch,
    check_capability,
    check_fp8_cache,
    count_held_bytes,
    find_free_gpu_memory,
)
from serve_llm.engine.worker.model_runner import ModelRunner
from support import gpu_path
from support.config import CONFIG
from support.engine import make_engine
from support.published import LLAMA_1B
from support.tiny import make_checkpoint

GIB = 1 << 30
OTHERS, HELD, IDLE = 5 * GIB, 20 * GIB, 3 * GIB  # of other processes; weights; cached by torch, unused
PROMPT, DECODE = 7 * GIB, 2 * GIB  # peaks of the two steps
FIRST_GRAPH, GRAPH = GIB // 4, GIB // 64  # allocated by the driver
GRAPHS = SimpleNamespace(decode_sizes=[1, 2, 3], num_sizes=20)


@dataclass
class Card:
    """Simulates `torch.cuda` for one card of 100 GiB, and a runner that allocates memory when it tries steps."""

    graphs: object
    idle: int = IDLE
    peak: int = 0
    driver: int = 0
    tried: list[list[int]] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)

    def run_dummy(self, scheduler_output: SchedulerOutput) -> None:
        self.tried.append([chunk.count for chunk in scheduler_output.scheduled])
        self.peak = HELD + (PROMPT if len(scheduler_output.scheduled) == 1 else DECODE)

    def capture_dummy(self, scheduler_output: SchedulerOutput) -> None:
        self.captured.append(len(scheduler_output.scheduled))
        self.driver += GRAPH if self.driver else FIRST_GRAPH

    def patch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, function in {
            "memory_allocated": lambda device: HELD,
            "max_memory_allocated": lambda device: self.peak,
            "memory_reserved": lambda device: HELD + self.idle,
            "mem_get_info": lambda device: (100 * GIB - OTHERS - HELD - self.idle - self.driver, 100 * GIB),
            "empty_cache": lambda: setattr(self, "idle", 0),
            "reset_peak_memory_stats": lambda device: setattr(self, "peak", HELD),
        }.items():
            monkeypatch.setattr(torch.cuda, name, function)


@pytest.mark.parametrize(("graphs", "taken"), [(None, PROMPT), (GRAPHS, PROMPT + DECODE + FIRST_GRAPH + 19 * GRAPH)])
def test_the_share_of_the_card_less_others_weights_and_steps(
    graphs: object, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Card(graphs)
    card.patch(monkeypatch)
    config = replace(CONFIG, gpu_memory_utilization=0.9, max_num_seqs=3, max_num_batched_tokens=512, max_model_len=100)
    kv_cache_config = KVCacheConfig((KVCacheSpec(16, None),), block_bytes=GIB, num_blocks=1)
    free = find_free_gpu_memory(config, cast(ModelRunner, card), kv_cache_config, torch.device("cuda"))
    mixed = [[99, 1, 1]] if graphs else []
    assert card.tried == [[99], [1, 1, 1], *mixed]  # a prompt leaves room for a token; all rows have logits
    assert card.captured == ([3, 2] if graphs else [])
    assert free == 90 * GIB - OTHERS - (HELD - GIB) - taken


def test_dummy_steps_take_the_memory_of_the_longest_contexts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPU kernels allocate by upper bounds from the host, as in captured steps."""
    make_checkpoint(tmp_path, "llama")
    told: list[list[int]] = []

    def paged_attention(
        query: Tensor, cache: Tensor, table: Tensor, starts: object, contexts: list[int], **how: object
    ):
        told.append(contexts)
        return gpu_path.paged_attention(query, cache, table, starts, contexts, **how)  # type: ignore[arg-type]

    kernels = replace(gpu_path.KERNELS, paged_attention=paged_attention)
    engine = gpu_path.make_gpu_engine(tmp_path, monkeypatch, kernels, max_model_len=96)
    found = engine._executor._worker  # type: ignore[attr-defined]
    found._runner.run_dummy(build_dummy_batch([3, 1], found._kv_cache_config.groups))
    assert told and all(contexts == [96, 96] for contexts in told)


def test_held_bytes_counts_each_tensor_once() -> None:
    weight, bias, buffer = torch.zeros(10), torch.zeros(3, dtype=torch.bfloat16), torch.zeros(100)
    parts = [lambda x: x + weight, weight, weight.view(5, 2), {"bias": bias}, buffer]
    assert count_held_bytes(parts) == 10 * 4 + 3 * 2 + 100 * 4
    assert count_held_bytes(parts, without=[buffer]) == 10 * 4 + 3 * 2


def test_held_bytes_counts_the_used_part_of_a_larger_storage() -> None:
    file = torch.zeros(1000)
    assert count_held_bytes([file[100:200], file[500:510]]) == 110 * 4


@pytest.mark.parametrize(
    ("capability", "is_taken"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), False)]
)
def test_which_gpus_take_a_cache_in_fp8(
    capability: tuple[int, int], is_taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_fp8_cache(torch.device("cpu"))
    with contextlib.nullcontext() if is_taken else pytest.raises(OptionError, match=r"^--kv-cache-dtype: fp8 needs a"):
        check_fp8_cache(torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "is_served"), [((7, 0), False), ((7, 5), False), ((8, 0), True), ((12, 0), True)]
)
def test_a_worker_refuses_gpus_for_which_no_kernel_is_compiled(
    capability: tuple[int, int], is_served: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_capability(torch.device("cpu"))
    if is_served:
        check_capability(torch.device("cuda"))
        return
    spec, weights = read_model(LLAMA_1B)
    shard = build_shard(spec, ParallelLayout(), 0)
    with pytest.raises(CapacityError, match=rf"^--device: this GPU has .* {capability[0]}\.{capability[1]}, but"):
        worker.Worker(replace(CONFIG, device="cuda"), spec, weights, shard, ProcessGroups())


def test_the_log_says_what_was_allocated(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    make_checkpoint(tmp_path, "llama")
    with caplog.at_level("INFO"):
        engine = make_engine(tmp_path, kv_cache_memory=8 << 20)
    found = engine._executor._worker  # type: ignore[attr-defined]
    cache = found._runner.caches[0].untyped_storage().nbytes()
    assert found.weight_bytes >= sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())
    assert f"Weights: {format_bytes(found.weight_bytes)}, KV cache: {format_bytes(cache)}" in caplog.text


def test_the_cache_of_the_dummy_steps_is_one_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runner and graphs refer to each other, so it is unknown when the trial's memory is released."""
    make_checkpoint(tmp_path, "llama")
    tried: list[int] = []

    def free(config: object, runner: ModelRunner, kv_cache_config: KVCacheConfig, device: torch.device) -> int:
        tried.append(kv_cache_config.num_bytes)
        for counts in ([37], [1] * 5):
            runner.run_dummy(build_dummy_batch(counts, kv_cache_config.groups))
        return 1 << 24

    monkeypatch.setattr(worker, "find_free_gpu_memory", free)
    monkeypatch.setattr(
        worker,
        "compile_kernels",
        lambda runner, config, kv_cache_config, threads: tried.append(kv_cache_config.num_bytes),
    )
    found = make_engine(tmp_path, max_num_seqs=5)._executor._worker  # type: ignore[attr-defined]
    kv_cache_config = plan_on_a_gpu(found, monkeypatch)
    assert tried == [kv_cache_config.block_bytes] * 2
    assert kv_cache_config.num_blocks == (1 << 24) // kv_cache_config.block_bytes


def plan_on_a_gpu(found: worker.Worker, monkeypatch: pytest.MonkeyPatch) -> KVCacheConfig:
    here, build_runner = found._config, found._build_runner

    def runner_on_a_cpu(kv_cache_config: KVCacheConfig, capture: Capture | None = None) -> ModelRunner:
        with monkeypatch.context() as patch:
            patch.setattr(found, "_config", here)
            return build_runner(kv_cache_config, capture)

    monkeypatch.setattr(found, "_build_runner", runner_on_a_cpu)
    monkeypatch.setattr(found, "_config", replace(here, device="cuda", kv_cache_memory=None))
    return found._plan_cache()


def test_slots_of_adapters_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They exist when memory is measured, unlike other memory for adapters."""
    make_checkpoint(tmp_path, "llama")
    found = make_engine(tmp_path, enable_lora=True)._executor._worker  # type: ignore[attr-defined]
    allocated = [0]
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: allocated[0])
    monkeypatch.setattr(found._adapters.layers, "allocate_slots", lambda: allocated.__setitem__(0, 3 << 20))
    monkeypatch.setattr(worker, "compile_kernels", lambda *_: None)

    def free(*_: object) -> int:
        assert allocated[0], "after the slots were allocated"
        return 1 << 24

    monkeypatch.setattr(worker, "find_free_gpu_memory", free)
    monkeypatch.setattr(found, "_adapter_bytes", 5 << 20)
    kv_cache_config = plan_on_a_gpu(found, monkeypatch)
    assert kv_cache_config.num_blocks == ((1 << 24) - (2 << 20)) // kv_cache_config.block_bytes
