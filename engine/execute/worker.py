"""One rank: its shard of a model, its KV cache, its rows and the sampler. Runs a Batch to its sampled ids.

Knows nothing of requests, queues or time; the scheduler's Batch says all.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor
from tqdm import tqdm

from serve_llm.engine.config import Config
from serve_llm.engine.errors import CapacityError, EngineError
from serve_llm.engine.execute import memory, shortage
from serve_llm.engine.execute.inputs import Rows
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.threads import choose_threads, usable_cores
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import KVGroup, ModelSpec, PretrainedSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.comm import Neighbours
from serve_llm.engine.sample.logprobs import prompt_logprobs
from serve_llm.engine.sample.sampler import Sampler, SampleRow
from serve_llm.engine.sample.split import SplitSampler
from serve_llm.engine.sample.vocabulary import Vocabulary
from serve_llm.engine.schedule.batch import Batch, Chunk, ChunkResult, NewRow
from serve_llm.engine.types import Sampling, TokenLogprobs
from serve_llm.engine.weights.place import load_model
from serve_llm.kernels import cache_int8
from serve_llm.kernels.huge_pages import use_huge_pages
from serve_llm.kernels.table import choose_sampling

logger = logging.getLogger(__name__)

LOGPROB_ROWS = 64  # prompt positions whose logits are held at a time: 64 x 152k x 4 bytes = 39 MB
NOT_FINITE = "the model gave numbers that are not finite"


class Model(Protocol):
    """What a rank runs: `Decoder`, which says what these do, or `PretrainedDecoder`."""

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


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
        with shortage.told_as(CapacityError, "while trying a step of the largest size"):
            self._layout = self._plan()
        self.num_blocks = self._layout.num_blocks
        self._sampling = choose_sampling(self._device)
        self._vocabulary = Vocabulary(shard.vocabularies(spec.vocab_size), neighbours.tensor, self._sampling)
        self._sampler: Sampler | SplitSampler = Sampler(spec.vocab_size, self._sampling)
        if neighbours.tensor.size > 1:
            self._sampler = SplitSampler(self._sampler, self._vocabulary, neighbours.tensor)

    def allocate(self, num_blocks: int) -> CacheLayout:
        """Make the KV cache, of the smallest `num_blocks` of all ranks, and the rows."""
        self._layout = replace(self._layout, num_blocks=num_blocks)
        with shortage.told_as(CapacityError, "while allocating the KV cache"):
            self._caches = allocate_cache(self._layout, self._groups, self._cache_dtype, self._device)
            self._rows = Rows(self._layout.groups, self._config.max_num_seqs, self._config.max_model_len)
        return self._layout

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
            return memory.plan_cache(self._whole_groups, self._groups, config.cache_row, config.block_size, num_bytes)

        empty = planned(0)
        one_request = empty.block_bytes * empty.blocks_per_request(config.max_model_len, config.max_num_batched_tokens)
        if config.kv_cache_memory is not None:
            if config.device == "cpu":
                memory.check_free(config.kv_cache_memory, self._neighbours.local_ranks, memory.free_memory())
            return planned(config.kv_cache_memory)
        if config.device == "cpu":
            return planned(memory.default_cpu_bytes(one_request, self._neighbours.local_ranks, memory.free_memory()))
        return planned(self._free_on_gpu(empty))

    def _free_on_gpu(self, empty: CacheLayout) -> int:
        """Bytes left for the cache on a GPU: its share, less what a step of the largest size was seen to take."""
        config, device = self._config, self._device
        small = CacheLayout(empty.groups, empty.block_bytes, empty.blocks_per_request(config.max_model_len, 1) + 1)
        self._caches = allocate_cache(small, self._groups, self._cache_dtype, device)
        self._rows = Rows(small.groups, 1, config.max_model_len)
        count = min(config.max_num_batched_tokens, config.max_model_len - 1)
        table = [[0] * -(-count // group.block_size) for group in small.groups]
        torch.cuda.reset_peak_memory_stats(device)
        with torch.inference_mode():
            new = NewRow(0, [0] * count, count, Sampling(max_tokens=1, seed=0), None)
            chunk = Chunk(0, 0, count, table, True, [])
            self._rows.apply(Batch([new], [chunk]))
            hidden = self._decoder.forward(self._rows.build([chunk], device), self._caches)
            if self._shard.is_last:
                rows = hidden[-1:].expand(min(config.max_num_seqs, count), -1)
                self._vocabulary.whole(self._decoder.logits(rows)).float()
        peak = torch.cuda.max_memory_allocated(device) - small.num_bytes
        self._caches = []
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(device)
        others = total - free - torch.cuda.memory_reserved(device)
        return max(0, int(total * config.gpu_memory_utilization) - others - peak)

    @shortage.told_as(EngineError, "in a step")
    @torch.inference_mode()
    def execute(self, batch: Batch) -> list[ChunkResult]:
        """Compute a batch. On the rank that samples one result per chunk, in order; on others none."""
        self._rows.apply(batch)
        inputs = self._rows.build(batch.chunks, self._device)
        if not self._shard.is_last:
            self._decoder.forward(inputs, self._caches)
            return []
        wanted, starts = self._wanted(batch.chunks, inputs)
        hidden = self._decoder.forward(inputs, self._caches, wanted)
        results = [ChunkResult() for _ in batch.chunks]
        self._add_prompt_logprobs(batch.chunks, starts, hidden, results)
        self._add_samples(batch.chunks, starts, hidden, results)
        return results if self._shard.is_output else []

    def _wanted(self, chunks: Sequence[Chunk], inputs: StepInputs) -> tuple[Tensor | None, list[int]]:
        """The tokens whose hidden rows are needed, None if all are, and where the rows of each chunk start among them:
        all of a chunk with prompt logprobs, else the last one if it is sampled. At least one, needed or not."""
        wanted: list[int] = []
        starts = [0]
        for chunk, first, end in zip(chunks, inputs.query_starts, inputs.query_starts[1:], strict=False):
            if self._wants_prompt_logprobs(chunk):
                wanted += range(first, end)
            elif chunk.sample:
                wanted.append(end - 1)
            starts.append(len(wanted))
        if len(wanted) == len(inputs.ids):
            return None, starts
        return torch.tensor(wanted or [0], device=self._device), starts

    def _wants_prompt_logprobs(self, chunk: Chunk) -> bool:
        row = self._rows[chunk.row]
        return row.prompt_logprobs is not None and chunk.start < row.num_prompt

    def _add_samples(
        self, chunks: Sequence[Chunk], starts: Sequence[int], hidden: Tensor, results: list[ChunkResult]
    ) -> None:
        sampled = [index for index, chunk in enumerate(chunks) if chunk.sample]
        if not sampled:
            return
        rows = []
        for index in sampled:
            row = self._rows[chunks[index].row]
            ids = self._rows.ids(chunks[index].row)
            rows.append(SampleRow(row.sampling, ids[: row.num_prompt], ids[row.num_prompt :]))
        last = [starts[index + 1] - 1 for index in sampled]
        if len(last) < len(hidden):
            hidden = hidden[torch.tensor(last, device=self._device)]
        choices = self._sampler.sample(self._decoder.logits(hidden), rows)
        for index, choice in zip(sampled, choices, strict=True):
            if choice is None:
                results[index].error = NOT_FINITE
            else:
                results[index].token_id, results[index].logprobs = choice.token_id, choice.logprobs

    def _add_prompt_logprobs(
        self, chunks: Sequence[Chunk], starts: Sequence[int], hidden: Tensor, results: list[ChunkResult]
    ) -> None:
        for index, chunk in enumerate(chunks):
            row = self._rows[chunk.row]
            if self._wants_prompt_logprobs(chunk):
                assert row.prompt_logprobs is not None
                ids = self._rows.ids(chunk.row)[: row.num_prompt]
                following = ids[chunk.start + 1 : chunk.start + chunk.count + 1]
                first = starts[index]
                found: list[TokenLogprobs] = []
                for start in range(0, len(following), LOGPROB_ROWS):
                    part = following[start : start + LOGPROB_ROWS]
                    logits = self._decoder.logits(hidden[first + start : first + start + len(part)])
                    whole = self._vocabulary.whole(logits)
                    if self._shard.is_output:
                        try:
                            found += prompt_logprobs(self._sampling, whole, part.tolist(), row.prompt_logprobs)
                        except ValueError:
                            results[index].error = NOT_FINITE
                results[index].prompt_logprobs = found


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
