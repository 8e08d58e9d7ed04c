"""Memory of one worker: allocate the KV cache, count the bytes of weights, and measure a GPU's free memory."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType

import torch
from torch import Tensor

from serve_llm.common.errors import CapacityError, OptionError
from serve_llm.common.types import Sampling
from serve_llm.engine.config import Config
from serve_llm.engine.model.spec import KVGroup
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.graph_sizes import MIXED_TOKENS
from serve_llm.engine.worker.graphs import GraphRunner
from serve_llm.engine.worker.kv_cache import CPU_SMALLEST, KVCacheConfig
from serve_llm.engine.worker.model_runner import ModelRunner
from serve_llm.kernels import cache_int8
from serve_llm.kernels.held_tensors import find_tensors
from serve_llm.kernels.huge_pages import use_huge_pages

NO_STATES: Mapping[int, int] = MappingProxyType({})
MIN_CAPABILITY = (8, 0)  # the lowest that kernels are compiled for
FP8_CACHE_CAPABILITIES = ((8, 9), (9, 0))


def check_capability(device: torch.device) -> None:
    """Raise CapacityError if Triton's kernels were not compiled for such an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return
    found = torch.cuda.get_device_capability(device)
    if found < MIN_CAPABILITY:
        raise CapacityError(
            f"--device: this GPU has compute capability {found[0]}.{found[1]}, but the kernels need "
            f"{MIN_CAPABILITY[0]}.{MIN_CAPABILITY[1]} or more, such as an A100; use --device cpu"
        )


def check_fp8_cache(device: torch.device) -> None:
    """Raise OptionError if Triton's attention was not compiled for such a GPU and a cache in fp8."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) not in FP8_CACHE_CAPABILITIES:
        raise OptionError(
            "--kv-cache-dtype: fp8 needs a GPU of compute capability 8.9 or 9.0, such as an L4, L40S, H100 or H200; "
            "take auto, or omit the option"
        )


def allocate_cache(
    kv_cache_config: KVCacheConfig,
    groups: Sequence[KVGroup],
    dtype: torch.dtype,
    device: torch.device,
    states: Mapping[int, int] = NO_STATES,
) -> list[Tensor]:
    """One strided view (blocks, parts, kv_heads, block_size, head_dim) per layer, in layer order, into one flat buffer;
    for a layer with states a tensor of its own, (sequences and snapshots, numbers) float32.

    Parts are keys and values, or latent rows that are both. In an int8 cache the last dimension includes the scales. On
    a CPU, a large buffer in huge pages is not filled: parts that are never written are never read and take no memory. A
    small one is touched immediately, so that resident memory does not grow later. On a GPU it is filled with zeros:
    FlashAttention may read rows that no query sees and give them the weight 0, and 0 * NaN is NaN. states: layer ->
    float32 numbers of a sequence's state.
    """
    block_elements = kv_cache_config.block_bytes // dtype.itemsize
    buffer = torch.empty(kv_cache_config.num_blocks * block_elements, dtype=dtype, device=device)
    if device.type == "cpu":
        use_huge_pages(buffer)
        if kv_cache_config.num_bytes <= CPU_SMALLEST:
            buffer.fill_(0)
    elif device.type == "cuda":
        buffer.fill_(0)
    num_slots = kv_cache_config.num_states + kv_cache_config.num_snapshots
    caches = {
        layer: torch.empty((num_slots, count), dtype=torch.float32, device=device) for layer, count in states.items()
    }
    for group, group_spec in zip(groups, kv_cache_config.groups, strict=True):
        block_size = group_spec.block_size
        head_elements = group.head_dim + (cache_int8.SCALE_BYTES if dtype == torch.int8 else 0)
        parts = 1 if group.is_latent else 2
        part_elements = group.num_kv_heads * block_size * head_elements
        shape = (kv_cache_config.num_blocks, parts, group.num_kv_heads, block_size, head_elements)
        strides = (block_elements, part_elements, block_size * head_elements, head_elements, 1)
        for index, layer in enumerate(group.layers):
            caches[layer] = buffer.as_strided(shape, strides, index * parts * part_elements)
    return [caches[layer] for layer in sorted(caches)]


def count_held_bytes(model: object, without: Iterable[object] = ()) -> int:
    """Count the bytes of the tensors that `find_tensors` finds.

    If storage is larger than its tensors, such as a mapped checkpoint, only the tensors' bytes count."""
    sizes: dict[tuple[int, int], int] = {}  # by storage and offset: tensors may share memory
    for tensor in find_tensors(model, without):
        if tensor.is_mkldnn:
            sizes[id(tensor), 0] = torch.ops.mkldnn._nbytes(tensor)
        else:
            part = tensor.untyped_storage()._cdata, int(tensor.storage_offset())
            sizes[part] = max(sizes.get(part, 0), tensor.nbytes)
    return sum(sizes.values())


def find_free_gpu_memory(
    config: Config, runner: ModelRunner, kv_cache_config: KVCacheConfig, device: torch.device
) -> int:
    """Bytes for the KV cache, found by running the largest steps.

    That is this rank's share of the GPU minus the memory of other processes, of the weights, of these steps and of the
    graphs of decode steps. runner, kv_cache_config: with a small cache, which does not count as used.
    """
    gc.collect()  # freed, but still cached after loading
    before = torch.cuda.memory_allocated(device)
    peaks = []
    for step in build_largest_steps(config, runner, kv_cache_config):
        torch.cuda.reset_peak_memory_stats(device)
        runner.run_dummy(step)
        peaks.append(torch.cuda.max_memory_allocated(device) - before)
    needed = max(peaks) if runner.graphs is None else peaks[0] + max(peaks[1:])  # captured steps have their own memory
    held = before - kv_cache_config.num_bytes
    torch.cuda.empty_cache()
    held_by_others = _count_unreserved_bytes(device)
    if runner.graphs is not None:
        needed += _measure_graphs(runner, runner.graphs, kv_cache_config, device)
    _, total = torch.cuda.mem_get_info(device)
    return max(0, int(total * config.gpu_memory_utilization) - held_by_others - held - needed)


def build_largest_steps(config: Config, runner: ModelRunner, kv_cache_config: KVCacheConfig) -> list[SchedulerOutput]:
    """The largest step of prompts, of decodes, and, if there are graphs, of both that is captured."""
    longest_prompt = min(config.max_num_batched_tokens, config.max_model_len - 1)
    steps = [[longest_prompt], [1] * config.max_num_seqs]
    if runner.graphs is not None:
        num_decodes = min(config.max_num_seqs, MIXED_TOKENS[-1]) - 1
        steps.append([min(MIXED_TOKENS[-1] - num_decodes, longest_prompt), *[1] * num_decodes])
    return [build_dummy_batch(counts, kv_cache_config.groups) for counts in steps]


def _measure_graphs(
    runner: ModelRunner, graphs: GraphRunner, kv_cache_config: KVCacheConfig, device: torch.device
) -> int:
    """Bytes that the driver allocates per graph size, outside torch's memory. Captures the two largest decode steps,
    because the first one may include allocations that all graphs share."""
    taken = []
    for size in graphs.decode_sizes[:-3:-1]:
        before = _count_unreserved_bytes(device)
        runner.capture_dummy(build_dummy_batch([1] * size, kv_cache_config.groups))
        taken.append(max(0, _count_unreserved_bytes(device) - before))
    return taken[0] + taken[-1] * (graphs.num_sizes - 1)


def _count_unreserved_bytes(device: torch.device) -> int:
    """Bytes of the GPU's memory in use outside this process's torch."""
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def build_dummy_batch(counts: Sequence[int], groups: Sequence[KVCacheSpec]) -> SchedulerOutput:
    """A step of `counts` prompt tokens per request, all in block 0."""
    new_requests = []
    scheduled = []
    for req_index, count in enumerate(counts):
        sampling = Sampling(max_tokens=1, seed=0)
        block_tables = tuple([0] * -(-count // group.block_size) for group in groups)
        new_requests.append(NewRequestData(req_index, [0] * count, count, sampling, None))
        scheduled.append(ScheduledTokens(req_index, 0, count, block_tables, True, []))
    return SchedulerOutput(new_requests, scheduled)
