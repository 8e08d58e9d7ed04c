"""One rank: loads its shard of a model, plans and allocates its KV cache, and has a `Runner` compute steps."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from serve_llm.engine.config import Config
from serve_llm.engine.errors import CapacityError
from serve_llm.engine.execute import memory, shortage
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.profile import free_on_gpu
from serve_llm.engine.execute.runner import Model, Runner, Started
from serve_llm.engine.execute.threads import choose_threads, usable_cores
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import KVGroup, ModelSpec, PretrainedSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.comm import Neighbours
from serve_llm.engine.sample.vocabulary import Vocabulary
from serve_llm.engine.schedule.batch import Batch
from serve_llm.engine.weights.place import load_model
from serve_llm.kernels import cache_int8
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.table import choose_sampling

logger = logging.getLogger(__name__)


class Worker:
    """Loads its shard at construction; then `num_blocks` KV blocks have room here, and `allocate` makes as many as all
    ranks agreed on."""

    def __init__(
        self,
        config: Config,
        spec: ModelSpec | PretrainedSpec,
        weights: WeightMap | None,  # None: of a PretrainedSpec
        shard: Shard,
        neighbours: Neighbours,
    ) -> None:
        omp = torch.get_num_threads() if "OMP_NUM_THREADS" in os.environ else None
        self.threads = choose_threads(config.cpu_threads, omp, usable_cores(), neighbours.local_ranks)
        torch.set_num_threads(self.threads.count)
        self._config = config
        self._device = torch.device(config.device)
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self._cache_dtype = torch.int8 if config.kv_cache_dtype == "int8" else self._dtype
        self._shard, self._neighbours = shard, neighbours
        with shortage.told_as(CapacityError, "while loading the weights"):
            started = time.perf_counter()
            if isinstance(spec, PretrainedSpec):
                self._load_pretrained(spec)
            else:
                assert weights is not None, "a family's model has a weight map"
                self._load(spec, weights)
            logger.info("Weights loaded and packed in %.2f s", time.perf_counter() - started)
        vocabularies = shard.vocabularies(spec.vocab_size)
        self._vocabulary = Vocabulary(vocabularies, neighbours.tensor, choose_sampling(self._device))
        with shortage.told_as(CapacityError, "while trying a step of the largest size"):
            self._layout = self._plan()
        self.num_blocks = self._layout.num_blocks

    def allocate(self, num_blocks: int) -> CacheLayout:
        """Make the KV cache, of the smallest `num_blocks` of all ranks, and the rows."""
        self._layout = replace(self._layout, num_blocks=num_blocks)
        with shortage.told_as(CapacityError, "while allocating the KV cache"):
            self._runner = self._make_runner(self._layout)
        return self._layout

    def _make_runner(self, layout: CacheLayout) -> Runner:
        caches = allocate_cache(layout, self._groups, self._cache_dtype, self._device)
        return Runner(self._config, self._decoder, caches, layout, self._vocabulary, self._shard)

    def start(self, batch: Batch) -> Started:
        """See `Runner.start`."""
        return self._runner.start(batch)

    def _load(self, spec: ModelSpec, weights: WeightMap) -> None:
        config = self._config
        self._whole_groups, self._groups = spec.kv_groups, self._shard.kv_groups(spec)
        with tqdm(desc="Loading weights", disable=None, leave=False) as bar:  # shown on a terminal only

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)

            self._decoder: Model = load_model(
                Path(config.directory),
                spec,
                weights,
                shard=self._shard,
                neighbours=self._neighbours,
                dtype=self._dtype,
                device=self._device,
                load_format=config.load_format,
                seed=config.seed,
                batch_invariant=config.batch_invariant,
                progress=advance,
            )

    def _load_pretrained(self, spec: PretrainedSpec) -> None:
        from serve_llm.engine.weights.pretrained import load_pretrained  # seconds, for those only who need it

        config = self._config
        decoder = load_pretrained(
            Path(config.directory),
            spec,
            max_model_len=config.max_model_len,
            dtype=self._dtype,
            device=self._device,
            load_format=config.load_format,
            seed=config.seed,
        )
        self._decoder, self._whole_groups, self._groups = decoder, decoder.kv_groups, decoder.kv_groups

    def _plan(self) -> CacheLayout:
        config = self._config

        def planned(num_bytes: int) -> CacheLayout:
            return memory.plan_cache(
                *(self._whole_groups, self._groups, config.cache_row, config.block_size, num_bytes),
                max_model_len=config.max_model_len,
                max_chunk=config.max_num_batched_tokens,
            )

        empty = planned(0)
        one_request = empty.block_bytes * empty.blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
        if config.kv_cache_memory is not None:
            if config.device == "cpu":
                memory.check_free(config.kv_cache_memory, self._neighbours.local_ranks, memory.free_memory())
            return planned(config.kv_cache_memory)
        if config.device == "cpu":
            return planned(memory.default_cpu_bytes(one_request, self._neighbours.local_ranks, memory.free_memory()))
        one_block = replace(empty, num_blocks=1)  # in which all tokens of a step that is tried lie
        return planned(free_on_gpu(config, self._make_runner(one_block), one_block.num_bytes, self._device))


def allocate_cache(
    layout: CacheLayout, groups: Sequence[KVGroup], dtype: torch.dtype, device: torch.device
) -> list[Tensor]:
    """One strided view (blocks, parts, kv_heads, block_size, head_dim) per layer into one flat buffer of equal blocks;
    of an int8 cache the last dimension holds the scales as well. Parts: keys and values, or rows that are both.

    A large buffer is not filled: what is never written is never read, and on a CPU takes no memory. There it lies in
    huge pages. A small one on a CPU is touched at once, so that resident memory does not grow later.
    """
    block_elements = layout.block_bytes // dtype.itemsize
    flat = torch.empty(layout.num_blocks * block_elements, dtype=dtype, device=device)
    if device.type == "cpu":
        use_huge_pages(flat)
        if layout.num_bytes <= memory.CPU_SMALLEST:
            flat.fill_(0)
    caches: dict[int, Tensor] = {}
    for group, lie in zip(groups, layout.groups, strict=True):
        row = group.head_dim + (cache_int8.SCALE_BYTES if dtype == torch.int8 else 0)
        parts = 1 if group.is_latent else 2
        shape = (layout.num_blocks, parts, group.kv_heads, lie.block_size, row)
        strides = (block_elements, *(row * lie.block_size * n for n in (group.kv_heads, 1)), row, 1)
        layer_elements = parts * group.kv_heads * lie.block_size * row
        for place, layer in enumerate(group.layers):
            caches[layer] = flat.as_strided(shape, strides, place * layer_elements)
    return [caches[layer] for layer in sorted(caches)]
