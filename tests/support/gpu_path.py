"""Runs a step on a CPU the way a GPU would: lengths are read where kernels read them, captured steps are replayed over
their buffers, and results are only read when the engine asks for them.

The kernels are plain ones with the contract of GPU kernels: numbers from the host are used only as bounds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_llm.common.hub import read_config
from serve_llm.common.options.sources import make_options
from serve_llm.engine import startup
from serve_llm.engine.loop import EngineCore
from serve_llm.engine.model.cache_scales import add_cache_scales
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights import load
from serve_llm.engine.worker import model_runner
from serve_llm.engine.worker.graphs import CapturedGraph
from serve_llm.kernels import attention, moe, registry, rope
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.lora import ExpansionWeight
from support.engine import Result, make_draft_model
from support.ranks import Ranks, ThreadExecutor
from support.resolved import resolve_all


def paged_attention(
    query: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    on_device: Lengths | None = None,
    **how: object,
) -> Tensor:
    assert on_device is not None, "lengths are to be on the device"
    starts, contexts = (lengths.tolist() for lengths in (on_device.query_starts, on_device.context_lens))
    counts = [end - start for start, end in itertools.pairwise(starts)]
    bounds = [end - start for start, end in itertools.pairwise(query_starts)]
    assert starts[-1] <= query_starts[-1] and len(counts) == len(bounds), "more queries than were told"
    assert max(counts) <= 1 or max(bounds) > 1, "several queries of a sequence, and a launch for single ones"
    assert 1 not in counts or 1 in bounds, "single queries, and a launch for several"
    assert max(contexts) <= max(context_lens), "longer than was told"
    live = [index for index, context in enumerate(contexts) if context > 0]
    output = torch.zeros((*query.shape[:2], int(how.get("value_dim") or query.shape[2])), dtype=query.dtype)
    for index in live:
        rows = slice(starts[index], starts[index + 1])
        table_row = block_table[index : index + 1]
        output[rows] = attention.paged_attention(
            query[rows], cache, table_row, [0, counts[index]], [contexts[index]], **how
        )
    return output


def rope_and_cache(
    qkv: Tensor,
    heads: int,
    norms: rope.HeadNorms | None,
    angles: rope.Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    query = rope.rope_and_cache(qkv.clone(), heads, norms, angles, torch.empty_like(cache), slots.clamp(min=0))
    stored = slots >= 0
    rope.rope_and_cache(qkv[stored], heads, norms, _some(angles, stored), cache, slots[stored], cache_scales)
    return query


def rope_and_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    angles: rope.Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    turned = rope.rope_and_latent(query, latent, norm, eps, angles, torch.empty_like(cache), slots.clamp(min=0))
    stored = slots >= 0
    rope.rope_and_latent(
        query[stored], latent[stored], norm, eps, _some(angles, stored), cache, slots[stored], cache_scales
    )
    return turned


def pack_experts(*arguments: Any) -> moe.Experts:
    experts = moe.pack_experts(*arguments)
    experts.reads_back = False  # it does not matter on a CPU
    return experts


class AdapterSlots:
    """See `kernels.lora.LoRASlots`. Computes each adapter's products for all rows and uses those of its own rows."""

    def __init__(self, num_slots: int, max_rank: int, inputs: int, parts: Sequence[int], *_: object) -> None:
        self._held: list[tuple[Tensor, Sequence[ExpansionWeight]] | None] = [None] * num_slots

    def put(self, slot: int, down: Tensor, expansions: Sequence[ExpansionWeight]) -> None:
        self._held[slot] = down, expansions

    def clear(self, slot: int) -> None:
        self._held[slot] = None

    def add(self, y: Tensor, x: Tensor, slots: Tensor) -> None:
        assert slots.shape == (len(x),)
        for slot, held in enumerate(self._held):
            down, expansions = held or (x[:0], ())
            for columns, outputs, up, scale in expansions:
                part = y[:, outputs]
                own = part if scale is None else scale(part)
                added = own + (x @ down.T)[:, columns] @ up.T
                part.copy_(torch.where((slots == slot)[:, None], added, part))


def _some(angles: rope.Angles | None, rows: Tensor) -> rope.Angles | None:
    return None if angles is None else (angles[0][rows], angles[1][rows])


KERNELS = replace(
    registry.PORTABLE,
    paged_attention=paged_attention,
    rope_and_cache=rope_and_cache,
    rope_and_latent=rope_and_latent,
    pack_experts=pack_experts,
    allocate_lora_slots=AdapterSlots,
    capturable=True,
)


class Recorder:
    """Captures like a GPU: a replay repeats the computation, from the same tensors into the same one."""

    def __init__(self, *_: object) -> None:
        self.sizes: list[int] = []

    def __call__(self, compute: Callable[[], Tensor]) -> CapturedGraph:
        output = torch.full_like(compute(), torch.nan)
        self.sizes.append(len(output))

        def replay() -> None:
            output.copy_(compute())

        return CapturedGraph(replay, output)


def make_gpu_engine(
    directory: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: registry.Kernels = KERNELS,
    tensor: int = 1,
    stages: int = 1,
    **more: object,
) -> EngineCore:
    """An engine that works as on a GPU. Its layers have scales if the checkpoint was calibrated for a KV cache in fp8,
    even if `kernels` are for another cache. more: fields of Config, or options."""
    monkeypatch.setattr(load, "choose", lambda *_, **__: kernels)
    monkeypatch.setattr(model_runner, "CudaCapture", Recorder)
    as_on_gpu = {"async_scheduling": stages == 1, "enforce_eager": False, "kv_cache_dtype": "auto"}
    fields = {name: more.pop(name, value) for name, value in as_on_gpu.items()}
    defaults = {"kv_cache_memory": "16MiB", "max_num_seqs": 40, "speculative_config": "none"}  # none: as on GPUs
    options = make_options(str(directory), **(defaults | more))
    raw = read_config(directory)
    config, spec, weights = resolve_all(options, str(directory), raw)
    config = replace(config, **fields)
    if isinstance(spec, ModelSpec) and spec.calibrated_cache:
        spec = add_cache_scales(spec)
    if tensor * stages == 1:
        config, draft_model = make_draft_model(options, config)
        return EngineCore(config, startup.build_executor(config, spec, weights, raw), draft_model=draft_model)
    return EngineCore(config, ThreadExecutor(config, spec, weights, Ranks(spec, ParallelLayout(tensor, stages))))


def graphs_of(engine: EngineCore) -> model_runner.GraphRunner:
    found = engine._executor._worker._runner.graphs  # type: ignore[attr-defined]
    assert found is not None
    return found


def assert_same(found: dict[int, Result], expected: dict[int, Result], tolerance: float = 1e-4) -> None:
    """Assert that ids, reasons and ranks are equal and log-probabilities nearly equal."""
    for number, wanted in expected.items():
        result = found[number]
        assert (result.token_ids, result.finish_reason) == (wanted.token_ids, wanted.finish_reason), f"request {number}"
        theirs = [*wanted.logprobs, *(wanted.prompt_logprobs or [])]
        for ours, other in zip([*result.logprobs, *(result.prompt_logprobs or [])], theirs, strict=True):
            assert (ours.rank, ours.top_ids) == (other.rank, other.top_ids)
            assert [ours.logprob, *ours.top_logprobs] == pytest.approx(
                [other.logprob, *other.top_logprobs], abs=tolerance
            )
