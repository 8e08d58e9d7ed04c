"""Warm-up of a GPU at start, so that the first requests find compiled kernels and captured steps.

The steps write to block 0 of a cache that holds nothing yet, and their requests are replaced by real ones.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence

import torch
from tqdm import tqdm

from serve_llm.common.types import Sampling
from serve_llm.engine.config import Config
from serve_llm.engine.scheduler.output import NewRequestData, ScheduledTokens, SchedulerOutput
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.worker.graph_sizes import MIXED_TOKENS
from serve_llm.engine.worker.graphs import BatchDescriptor, GraphRunner
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from serve_llm.engine.worker.memory import build_largest_steps
from serve_llm.engine.worker.model_runner import ModelRunner

PROMPT_TOKENS = 3
NUM_DECODES = 2
KINDS = (  # each needs different kernels, alone and combined with others
    Sampling(max_tokens=8, temperature=0.0, seed=0),
    Sampling(max_tokens=8, temperature=1.0, seed=0),
    Sampling(max_tokens=8, temperature=0.8, top_p=0.9, seed=0),
    Sampling(max_tokens=8, temperature=0.8, top_k=20, min_p=0.01, seed=0),
    Sampling(max_tokens=8, temperature=0.0, logprobs=1, frequency_penalty=0.5, repetition_penalty=1.1, seed=0),
)

logger = logging.getLogger(__name__)


def compile_kernels(runner: ModelRunner, config: Config, kv_cache_config: KVCacheConfig, threads: int) -> None:
    """Compile the kernels of the largest steps, of those of `warm_up` (of one sequence for a model with states) and of
    sizes that are powers of two, in `threads` threads. Matrix products are really computed, so that their library loads
    the kernels for these sizes. All ranks call this. runner: captures nothing, and cannot be used afterwards.
    kv_cache_config: one block is enough."""
    from serve_llm.kernels.triton.compile_ahead import compile_ahead  # on GPUs only

    began = time.perf_counter()
    with compile_ahead(threads), torch.inference_mode():
        for step in build_largest_steps(config, runner, kv_cache_config):
            runner.run_dummy(step)
        for step in _list_steps(config, kv_cache_config):
            runner.start(step).finish()
        if runner.graphs is not None and config.pipeline_parallel_size == 1:
            for descriptor in choose_descriptors(runner.graphs):
                runner.graphs.run_padding(descriptor)
    logger.info("Kernels compiled in %.2f s by %d threads", time.perf_counter() - began, threads)


def choose_descriptors(graphs: GraphRunner) -> list[BatchDescriptor]:
    """Sizes that are powers of two, of decode steps and of steps with prompts."""
    decodes = [BatchDescriptor(count, count) for count in graphs.decode_sizes if count.bit_count() == 1]
    sequences = graphs.mixed_sequences[0]
    return decodes + [
        BatchDescriptor(tokens, sequences, is_mixed=True) for tokens in MIXED_TOKENS if tokens.bit_count() == 1
    ]


def _list_steps(config: Config, kv_cache_config: KVCacheConfig) -> list[SchedulerOutput]:
    """The warm-up steps; none for a model that generates no text."""
    if not config.generates or config.max_model_len < PROMPT_TOKENS + NUM_DECODES:
        return []
    max_num_seqs = kv_cache_config.count_sequences(config.max_num_seqs)
    return list(build_warm_up_steps(kv_cache_config.groups, max_num_seqs, config.max_loras > 0))


def warm_up(runner: ModelRunner, config: Config, kv_cache_config: KVCacheConfig) -> None:
    """Run the steps. All ranks call this. Does nothing for a model that generates no text."""
    steps = _list_steps(config, kv_cache_config)
    if not steps:
        return
    began = time.perf_counter()
    for scheduler_output in tqdm(steps, desc="Capturing steps", disable=None, leave=False):  # on a terminal only
        runner.start(scheduler_output).finish()
    logger.info("Common steps captured in %.2f s", time.perf_counter() - began)


def build_warm_up_steps(
    groups: Sequence[KVCacheSpec], max_num_seqs: int, has_adapters: bool = False
) -> Iterator[SchedulerOutput]:
    """Yield prompts of every kind, first eager and then captured; decode steps of all of them, captured; a prompt of
    each kind alone and two decode steps of the last one, captured. A size is captured when it occurs for the second
    time. With adapters the last two prompts and decode steps again, with an adapter's slot, which is empty."""
    num_tokens = PROMPT_TOKENS + NUM_DECODES
    blocks = tuple([0] * -(-num_tokens // group.block_size) for group in groups)

    def build_prompts(
        kinds: Sequence[Sampling], prompt_logprobs: int | None = None, adapter_slot: int | None = None
    ) -> SchedulerOutput:
        new_requests = [
            NewRequestData(
                index, [0] * PROMPT_TOKENS, PROMPT_TOKENS, sampling, prompt_logprobs, adapter_slot=adapter_slot
            )
            for index, sampling in enumerate(kinds)
        ]
        chunks = [ScheduledTokens(index, 0, PROMPT_TOKENS, blocks, True, []) for index in range(len(kinds))]
        return SchedulerOutput(new_requests, chunks)

    def build_decode(number: int, count: int) -> SchedulerOutput:
        position = PROMPT_TOKENS + number
        return SchedulerOutput([], [ScheduledTokens(index, position, 1, (), True, [0]) for index in range(count)])

    together = KINDS[:max_num_seqs]
    for prompt_logprobs in (1, None, None):
        yield build_prompts(together, prompt_logprobs)
    for number in range(NUM_DECODES):
        yield build_decode(number, len(together))
    for sampling in KINDS:
        yield build_prompts([sampling])
    for number in range(NUM_DECODES):
        yield build_decode(number, 1)
    if has_adapters:
        for _ in range(2):
            yield build_prompts(KINDS[:1], adapter_slot=0)
        for number in range(NUM_DECODES):
            yield build_decode(number, 1)
