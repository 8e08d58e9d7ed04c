"""One rank: loads its shard of a model, plans and allocates its KV cache, and runs steps."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from serve_llm.common.errors import CapacityError, EngineError
from serve_llm.common.progress import ProgressLog
from serve_llm.common.types import EPLBStats
from serve_llm.engine.config import Config
from serve_llm.engine.model.decoder import Decoder
from serve_llm.engine.model.lora import AllocateSlots, LoRALayers, LoRALinear, UnfusedLoRA
from serve_llm.engine.model.lora_targets import count_adapter_bytes
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits
from serve_llm.engine.scheduler.output import MaskSource, SchedulerOutput
from serve_llm.engine.weights.adapters import AdapterLoader
from serve_llm.engine.weights.load import choose_kernels, load_model
from serve_llm.engine.worker import kv_cache, oom
from serve_llm.engine.worker.call_graphs import CallCapture
from serve_llm.engine.worker.cpu_threads import choose_threads, count_usable_cores
from serve_llm.engine.worker.expert_balancer import ExpertBalancer
from serve_llm.engine.worker.freed_memory import keep_freed_memory
from serve_llm.engine.worker.graphs import Capture, run_eagerly
from serve_llm.engine.worker.host_blocks import HostBlocks
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig, StateSizes
from serve_llm.engine.worker.memory import (
    allocate_cache,
    check_capability,
    check_fp8_cache,
    count_held_bytes,
    find_free_gpu_memory,
)
from serve_llm.engine.worker.model_runner import ModelRunner
from serve_llm.engine.worker.pending_step import PendingStep
from serve_llm.engine.worker.runnable_model import RunnableModel
from serve_llm.engine.worker.warm_up import compile_kernels, warm_up
from serve_llm.kernels import cache_fp8
from serve_llm.kernels.lora import AllocateLoRASlots, LoRASlots
from serve_llm.kernels.registry import Kernels, Record, choose_sampling

logger = logging.getLogger(__name__)

LoadDecoder = Callable[[Kernels], RunnableModel]


class Worker:
    """Its constructor loads the shard and sets `num_blocks` to the number of KV blocks that fit here. Call `allocate`
    then, with the number that all ranks agreed on."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | TransformersSpec,
        weights: WeightMap | None,  # None for a TransformersSpec
        shard: Shard,
        process_groups: ProcessGroups,
        load_decoder: LoadDecoder | None = None,
    ) -> None:
        """load_decoder: loads a model that `load_model` does not support."""
        omp_threads = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
        self.threads = choose_threads(config.cpu_threads, omp_threads, count_usable_cores(), process_groups.local_ranks)
        torch.set_num_threads(self.threads.count)
        self._config = config
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._cache_dtype = {"int8": torch.int8, "fp8": cache_fp8.DTYPE}.get(config.kv_cache_dtype, self._dtype)
        check_capability(self._device)
        if config.kv_cache_dtype == "fp8":
            check_fp8_cache(self._device)
        self._shard = shard
        self._process_groups = process_groups
        self._adapters: AdapterLoader | None = None
        self._adapter_bytes = 0  # maximum bytes of adapters
        self._states: StateSizes | None = None
        self._record: Record | None = None
        self._state_counts: dict[int, int] = {}  # layer -> float32 numbers of a sequence's state
        with oom.translate_oom(CapacityError, "while loading the weights"):
            started = time.perf_counter()
            if isinstance(spec, TransformersSpec):
                self._load_transformers_model(spec)
            elif load_decoder is not None:
                self._load_other(spec, load_decoder)
            else:
                assert weights is not None, "a ModelSpec needs a weight map"
                self._load(spec, weights)
            logger.info("Weights loaded and packed in %.2f s", time.perf_counter() - started)
        buffers = (process_groups.tensor, process_groups.previous, process_groups.next, process_groups.experts)
        self.weight_bytes = count_held_bytes(self._decoder, without=[item for item in buffers if item is not None])
        vocab_shards = shard.vocabularies(spec.vocab_size)
        self._vocabulary = VocabParallelLogits(vocab_shards, process_groups.tensor, choose_sampling(self._device))
        all_capture = process_groups.wait_for_all(self._decoder.capturable)
        if self._record is None and self._decoder.capturable != all_capture:
            self._decoder.capturable = False  # ranks that capture run other steps at start, and steps of other sizes
            logger.warning("Steps are not captured as graphs, because the experts of another rank cannot be captured")
        self._balancer: ExpertBalancer | None = None
        with oom.translate_oom(CapacityError, "while trying a step of the largest size"):
            self._kv_cache_config = self._plan_cache()
        self.num_blocks = self._kv_cache_config.num_blocks
        self.num_slots = (config.kv_offload_memory or 0) // self._kv_cache_config.block_bytes
        self._host_blocks: HostBlocks | None = None

    def allocate(self, num_blocks: int, num_slots: int = 0) -> KVCacheConfig:
        """Allocate the KV cache, and host memory slots for blocks evicted from it. num_blocks, num_slots: the smallest
        of all ranks."""
        self._kv_cache_config = replace(self._kv_cache_config, num_blocks=num_blocks, num_slots=num_slots)
        if self._adapters is not None:
            self._adapters.layers.allocate_slots()
        if self._config.device == "cpu":
            keep_freed_memory()
        with oom.translate_oom(CapacityError, "while allocating the KV cache"):
            self._runner = self._build_runner(self._kv_cache_config)
            if num_slots and self._runner.caches:
                self._host_blocks = HostBlocks(self._runner.caches, self._kv_cache_config, num_slots)
        if self._config.device == "cuda":
            with oom.translate_oom(CapacityError, "while trying the first steps"):
                warm_up(self._runner, self._config, self._kv_cache_config)
        if self._config.eplb is not None and isinstance(self._decoder, Decoder):
            self._balancer = ExpertBalancer(self._decoder.dispatches, self._config.eplb, self._device)
        return self._kv_cache_config

    @property
    def kv_cache_config(self) -> KVCacheConfig:
        return self._kv_cache_config

    @property
    def host_memory(self) -> HostMemory | None:
        """The shared memory of the slots; None if there are none, or if the rank holds no KV."""
        return None if self._host_blocks is None else self._host_blocks.description

    @property
    def eplb_stats(self) -> EPLBStats | None:
        """What this rank's balancer has done; another object after each placement of experts. None before the first."""
        return None if self._balancer is None else self._balancer.stats

    def start(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> PendingStep:
        """Move experts, make the copies of a step, and start it; see `ModelRunner.start`."""
        if self._balancer is not None:
            with oom.translate_oom(EngineError, "while moving experts"):
                self._balancer.begin_step()
        for req_index, num_ids in scheduler_output.stale.items():
            self._runner.forget_ids(req_index, num_ids)
        if scheduler_output.copies and self._host_blocks is not None:
            self._host_blocks.copy(scheduler_output.copies)
        return self._runner.start(scheduler_output, masks)

    def _build_runner(self, kv_cache_config: KVCacheConfig, capture: Capture | None = None) -> ModelRunner:
        caches = allocate_cache(kv_cache_config, self._kv_groups, self._cache_dtype, self._device, self._state_counts)
        if not kv_cache_config.groups:
            caches = [torch.empty(0, dtype=self._dtype, device=self._device)] * len(self._shard.layers)
        if self._record is not None:
            capture = CallCapture(self._record)
        return ModelRunner(
            self._config, self._decoder, caches, kv_cache_config, self._vocabulary, self._shard, self._adapters, capture
        )

    def _load(self, spec: ModelSpec, weights: WeightMap) -> None:
        config = self._config
        self._model_kv_groups = spec.kv_groups
        self._kv_groups = self._shard.kv_groups(spec)
        self._states = kv_cache.find_state_sizes(spec, self._shard, config)
        mixers = self._shard.list_delta_nets(spec)
        self._state_counts = {
            layer: self._shard.count_state(mixer, config.num_drafts) for layer, mixer in mixers.items()
        }
        kernels = self._choose_kernels(spec)
        lora = None
        if config.max_loras:
            allocate = self._build_allocate(kernels.allocate_lora_slots)
            lora = LoRALayers(kernels.lora or UnfusedLoRA(kernels.pack), allocate)
            self._adapter_bytes = count_adapter_bytes(spec, self._shard, config)
        progress_log = ProgressLog("Loading weights")
        with tqdm(desc="Loading weights", disable=None, leave=False) as bar:  # on a terminal only

            def advance(done: int, total: int) -> None:
                if bar.disable:
                    progress_log.report_share(done, total)
                bar.total = total
                bar.update(done - bar.n)

            decoder = load_model(
                Path(config.directory),
                spec,
                weights,
                shard=self._shard,
                groups=self._process_groups,
                dtype=self._dtype,
                device=self._device,
                load_format=config.load_format,
                seed=config.seed,
                kernels=kernels,
                lora=lora,
                progress=advance,
            )
        if config.hidden_state_layers:
            decoder.collect(config.hidden_state_layers, self._shard.layers)
        self._decoder: RunnableModel = decoder
        if lora is not None:
            self._adapters = AdapterLoader(
                spec,
                weights,
                lora,
                kernels,
                max_rank=config.max_lora_rank,
                max_kept=config.max_cpu_loras,
                dtype=self._dtype,
                device=self._device,
                engines=config.expert_engines,
            )

    def _build_allocate(self, allocate: AllocateLoRASlots | None) -> AllocateSlots | None:
        """See `LoRALayers`."""
        if allocate is None:
            return None

        def allocate_slots(layer: LoRALinear) -> LoRASlots:
            config = self._config
            parts = list(layer.parts.values())
            outputs = [len(part.outputs) for part in parts]
            dtype = layer.dtype or self._dtype
            return allocate(config.max_loras, config.max_lora_rank, len(parts[0].inputs), outputs, dtype, self._device)

        return allocate_slots

    def _load_other(self, spec: ModelSpec, load_decoder: LoadDecoder) -> None:
        self._model_kv_groups = spec.kv_groups
        self._kv_groups = self._shard.kv_groups(spec)
        self._decoder = load_decoder(self._choose_kernels(spec))

    def _choose_kernels(self, spec: ModelSpec) -> Kernels:
        """Choose the kernels, and with them how steps are recorded."""
        config = self._config
        kernels = choose_kernels(
            spec,
            self._dtype,
            self._device,
            config.batch_invariant,
            config.attention_backend,
            self._cache_dtype,
        )
        self._record = kernels.record
        return kernels

    def _load_transformers_model(self, spec: TransformersSpec) -> None:
        from serve_llm.engine.hf_backend.load import load_transformers_model  # takes seconds to import

        config = self._config
        decoder = load_transformers_model(
            Path(config.directory),
            spec,
            max_model_len=config.max_model_len,
            dtype=self._dtype,
            device=self._device,
            load_format=config.load_format,
            seed=config.seed,
            attention_backend=config.attention_backend,
            cache_dtype=self._cache_dtype,
        )
        self._decoder = decoder
        self._model_kv_groups = decoder.kv_groups
        self._kv_groups = decoder.kv_groups

    def _plan_cache(self) -> KVCacheConfig:
        config = self._config

        def plan(num_bytes: int) -> KVCacheConfig:
            return kv_cache.plan_cache(
                self._model_kv_groups,
                self._kv_groups,
                config.kv_cache_format,
                config.block_size,
                num_bytes,
                max_model_len=config.max_model_len,
                max_chunk=config.max_num_batched_tokens,
                states=self._states,
            )

        empty = plan(0)
        if not empty.groups:
            return empty
        local_ranks = self._process_groups.local_ranks
        offload_bytes = config.kv_offload_memory or 0
        if offload_bytes:
            kv_cache.check_free(offload_bytes, local_ranks, kv_cache.find_free_memory(), "--kv-offload-memory")
        if config.device == "cpu":
            free = max(0, kv_cache.find_free_memory() - local_ranks * (self._adapter_bytes + offload_bytes))
            if config.kv_cache_memory is not None:
                kv_cache.check_free(config.kv_cache_memory, local_ranks, free)
                return plan(config.kv_cache_memory)
            num_blocks = empty.blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
            request_bytes = num_blocks * empty.block_bytes
            return plan(kv_cache.choose_cpu_cache_bytes(request_bytes, local_ranks, free, empty.max_state_bytes))
        one_block = replace(empty, num_blocks=1)  # holds all tokens of the measured steps
        adapter_bytes = self._adapter_bytes
        if self._adapters is not None:
            before = torch.cuda.memory_allocated(self._device)
            self._adapters.layers.allocate_slots()
            adapter_bytes -= torch.cuda.memory_allocated(self._device) - before
        self._compile_kernels(one_block)
        if config.kv_cache_memory is not None:
            return plan(config.kv_cache_memory)
        runner = self._build_runner(one_block)
        free = find_free_gpu_memory(config, runner, one_block, self._device)
        del runner
        gc.collect()  # a runner and its graphs refer to each other
        torch.cuda.empty_cache()
        return plan(max(0, free - adapter_bytes))

    def _compile_kernels(self, kv_cache_config: KVCacheConfig) -> None:
        """Compile Triton's kernels in parallel, with a separate runner. kv_cache_config: of one block."""
        threads = max(1, self.threads.cores // self.threads.local_ranks)
        decoder = self._decoder
        with decoder.skip_similar_layers() if isinstance(decoder, Decoder) else contextlib.nullcontext():
            compile_kernels(self._build_runner(kv_cache_config, run_eagerly), self._config, kv_cache_config, threads)
        gc.collect()  # a runner and its graphs refer to each other
        torch.cuda.empty_cache()
