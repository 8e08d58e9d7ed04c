"""Drives a Decoder without an engine: paged caches with shuffled blocks, several sequences in a batch, any chunks."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.model.decoder import Decoder
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.inputs import ChunkInputs, KVGroupInputs, StepInputs, add_states
from serve_llm.engine.model.registry import read_model
from serve_llm.engine.model.shard import build_shard
from serve_llm.engine.model.spec import MLASpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.weights.load import load_model
from serve_llm.engine.worker.attention_chunks import split_sequences
from serve_llm.kernels import cache_int8

CPU = torch.device("cpu")


def read_spec(directory: Path) -> tuple[ModelSpec, WeightMap]:
    return read_model(json.loads((directory / "config.json").read_text()))


def load(
    directory: Path, dtype: torch.dtype = torch.float32, int8: bool = False, int8_lm_head: bool = True
) -> tuple[ModelSpec, Decoder]:
    """Load the checkpoint in `directory` as the engine would. int8: as with `--quantization int8`, including the LM
    head unless `int8_lm_head` is false."""
    spec, weight_map = read_spec(directory)
    if int8:
        spec = spec.with_int8()
        spec = replace(spec, int8_lm_head=spec.int8_lm_head and int8_lm_head)
    return spec, load_whole(directory, spec, weight_map, dtype=dtype)


def load_whole(
    directory: Path, spec: ModelSpec, weight_map: WeightMap, dtype: torch.dtype = torch.float32, **how: Any
) -> Decoder:
    """Call `load_model` for a single rank."""
    whole = build_shard(spec, ParallelLayout(), 0)
    return load_model(directory, spec, weight_map, shard=whole, groups=ProcessGroups(), dtype=dtype, device=CPU, **how)


class Harness:
    """Sequences in the KV cache of one decoder. Blocks outside a window are freed at once and filled with NaN. dtype:
    of the cache; the decoder's or int8."""

    def __init__(self, spec: ModelSpec, decoder: Decoder, dtype: torch.dtype, block_size: int = 16, seed: int = 0):
        self.spec, self.decoder, self.block_size = spec, decoder, block_size
        self.rng = random.Random(seed)
        num_blocks, scale = 600, 0
        self.nothing = torch.nan
        if dtype == torch.int8:
            scale, self.nothing = cache_int8.SCALE_BYTES, -1  # four bytes of -1 are a NaN scale
        self.caches = [
            torch.full((64, mixer.count_state(mixer.num_heads, mixer.num_kv_heads)), torch.nan)
            if isinstance(mixer, GatedDeltaNetSpec)
            else torch.full(
                (num_blocks, parts, mixer.num_kv_heads, block_size, mixer.cached_head_dim + scale),
                self.nothing,
                dtype=dtype,
            )
            for mixer, parts in (
                (layer.attention, 1 if isinstance(layer.attention, MLASpec) else 2) for layer in spec.layers
            )
        ]
        self.free = [self.rng.sample(range(1, num_blocks), num_blocks - 1) for _ in spec.kv_groups]
        self.tables: dict[int, list[list[int]]] = {}  # sequence -> group -> blocks
        self.lengths: dict[int, int] = {}

    @torch.inference_mode()
    def step(self, chunks: dict[int, Sequence[int]]) -> dict[int, Tensor]:
        """Compute each sequence's next ids, all in one batch. Returns sequence -> logprobs (ids, vocab_size)
        float32."""
        starts = {sequence: self.lengths.get(sequence, 0) for sequence in chunks}
        self.lengths |= {sequence: starts[sequence] + len(ids) for sequence, ids in chunks.items()}
        positions = {sequence: torch.arange(starts[sequence], self.lengths[sequence]) for sequence in chunks}
        query_starts = [0]
        for ids in chunks.values():
            query_starts.append(query_starts[-1] + len(ids))
        inputs = StepInputs(
            ids=torch.tensor([token_id for ids in chunks.values() for token_id in ids]),
            positions=torch.cat(list(positions.values())),
            query_starts=query_starts,
            context_lens=[self.lengths[sequence] for sequence in chunks],
            groups=tuple(self._group(number, positions) for number in range(len(self.spec.kv_groups))),
        )
        inputs = add_states(inputs, [63 - sequence for sequence in chunks])
        logprobs = self.decoder.logits(self.decoder.forward(inputs, self.caches)).float().log_softmax(-1)
        return dict(zip(chunks, logprobs.split([len(ids) for ids in chunks.values()]), strict=True))

    def _group(self, number: int, positions: dict[int, Tensor]) -> KVGroupInputs:
        group = self.spec.kv_groups[number]
        slots, rows = [], []
        for sequence, where in positions.items():
            table = self.tables.setdefault(sequence, [[] for _ in self.spec.kv_groups])[number]
            while len(table) * self.block_size <= int(where[-1]):
                table.append(self.free[number].pop())
            if group.sliding_window is not None:
                for index in range(max(0, int(where[0]) - group.sliding_window + 1) // self.block_size):
                    if table[index]:
                        for layer in group.layers:
                            self.caches[layer][table[index]] = self.nothing
                        self.free[number].insert(0, table[index])
                        table[index] = 0
            blocks = torch.tensor(table)
            slots.append(blocks[where // self.block_size] * self.block_size + where % self.block_size)
            rows.append(blocks.int())
        block_table = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        if not group.chunked or group.sliding_window is None:
            return KVGroupInputs(torch.cat(slots), block_table)
        split = split_sequences(
            np.concatenate(([0], np.cumsum([len(where) for where in positions.values()]))),
            np.array([int(where[-1]) + 1 for where in positions.values()]),
            block_table.numpy(),
            group.sliding_window,
            self.block_size,
        )
        chunks = ChunkInputs(split.query_starts.tolist(), split.context_lens.tolist())
        return KVGroupInputs(torch.cat(slots), torch.from_numpy(split.table), chunks)

    def logprobs(self, prompts: Sequence[Sequence[int]], max_chunk: int | None = None) -> list[Tensor]:
        """Return the logprobs after each id of each prompt, computed together in random chunks of up to `max_chunk`
        ids."""
        found: dict[int, list[Tensor]] = {number: [] for number in range(len(prompts))}
        rest = {number: list(prompt) for number, prompt in enumerate(prompts)}
        while rest:
            counts = {n: len(ids) if max_chunk is None else self.rng.randint(1, max_chunk) for n, ids in rest.items()}
            for number, rows in self.step({n: ids[: counts[n]] for n, ids in rest.items()}).items():
                found[number].append(rows)
            rest = {n: ids[counts[n] :] for n, ids in rest.items() if len(ids) > counts[n]}
        return [torch.cat(parts) for parts in found.values()]

    def greedy(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[list[int]]:
        """Return the most likely continuation of each prompt, all decoded in one batch."""
        last = [int(rows[-1].argmax()) for rows in self.logprobs(prompts)]
        ids = [[token_id] for token_id in last]
        for _ in range(num_tokens - 1):
            for number, rows in self.step({n: found[-1:] for n, found in enumerate(ids)}).items():
                ids[number].append(int(rows[-1].argmax()))
        return ids
