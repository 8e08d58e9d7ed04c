"""The steps of one rank: from a Batch to sampled ids.

On a GPU a step is begun and not waited for: its ids stay there for the next step, which is begun before they have
come to the host. Knows nothing of requests, queues or time; the scheduler's Batch says all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from serve_llm.engine.config import Config
from serve_llm.engine.errors import EngineError
from serve_llm.engine.execute import shortage
from serve_llm.engine.execute.carry import Carry
from serve_llm.engine.execute.graphs import CudaCapture, DecodeGraphs
from serve_llm.engine.execute.inputs import Rows
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.transfer import Transfer
from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.sample.device import DeviceSampler
from serve_llm.engine.sample.logprobs import prompt_logprobs
from serve_llm.engine.sample.sampler import Sampler, SampleRow
from serve_llm.engine.sample.split import SplitSampler
from serve_llm.engine.sample.vocabulary import Vocabulary
from serve_llm.engine.schedule.batch import Batch, Chunk, ChunkResult, NewRow
from serve_llm.engine.types import Sampling, TokenLogprobs
from serve_llm.kernels.table import choose_device_sampling

LOGPROB_ROWS = 64  # prompt positions whose logits are held at a time: 64 x 152k x 4 bytes = 39 MB
NOT_FINITE = "the model gave numbers that are not finite"


class Started(NamedTuple):
    """A step that has been begun."""

    is_ready: Callable[[], bool]  # whether `finish` would not wait
    finish: Callable[[], list[ChunkResult]]  # one result per chunk, in order; of a rank that does not sample none


NOTHING = Started(lambda: True, list)


class Model(Protocol):
    """What a rank runs: `Decoder`, which says what these do, or `PretrainedDecoder`."""

    capturable: bool  # whether a step of it may be captured: it reads nothing back from the device

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def idle(self, dtype: torch.dtype) -> None: ...


class Runner:
    """Owns the rows. One for a KV cache and its layout."""

    def __init__(
        self,
        config: Config,
        decoder: Model,
        caches: Sequence[Tensor],
        layout: CacheLayout,
        vocabulary: Vocabulary,
        shard: Shard,
    ) -> None:
        """caches: of each own layer."""
        self._config, self._decoder, self._caches, self._shard = config, decoder, caches, shard
        self._vocabulary = vocabulary
        self._groups = layout.groups
        device = torch.device(config.device)
        self._transfer = Transfer(device)
        self._lengths_there = device.type != "cpu" or decoder.capturable
        self._rows = Rows(layout.groups, config.max_num_seqs, config.max_model_len)
        self._carry = Carry(config.max_num_seqs, device)
        self._sampler = self._choose_sampler()
        self.graphs: DecodeGraphs | None = None
        if decoder.capturable and not config.enforce_eager and shard.is_first and shard.is_last:
            self.graphs = DecodeGraphs(
                self._decode,
                CudaCapture(device),
                self._transfer,
                layout.groups,
                config.max_num_seqs,
                config.max_model_len,
            )

    def _choose_sampler(self) -> Sampler | SplitSampler | DeviceSampler:
        if self._config.async_scheduling:
            kernels = choose_device_sampling(self._transfer.device)
            return DeviceSampler(self._vocabulary, kernels, self._transfer)
        vocabulary = self._vocabulary
        sampler = Sampler(vocabulary.size, vocabulary.kernels)
        return sampler if vocabulary.group.size == 1 else SplitSampler(sampler, vocabulary, vocabulary.group)

    def _decode(self, inputs: StepInputs, rows: Tensor) -> Tensor:
        inputs = replace(inputs, ids=self._carry.fill(inputs.ids, rows))
        return self._decoder.logits(self._decoder.forward(inputs, self._caches))

    @shortage.told_as(EngineError, "in a step")
    @torch.inference_mode()
    def start(self, batch: Batch) -> Started:
        """Begin with a batch, which is empty only where other engines need the experts here. On a GPU others may be
        begun before it ends, else all has been computed already."""
        if not batch.chunks:
            self._decoder.idle(getattr(torch, self._config.dtype))
            return NOTHING
        self._rows.apply(batch)
        chunks, results = batch.chunks, [ChunkResult() for _ in batch.chunks]
        step = self._rows.gather(chunks)
        if self.graphs is not None and all(chunk.count == 1 and self._samples_only(chunk) for chunk in chunks):
            return self._sample(chunks, range(len(chunks)), self.graphs.logits(step), results)
        inputs = step.inputs(self._transfer.to_device, lengths=self._lengths_there)
        if not step.all_known:
            inputs = replace(inputs, ids=self._carry.fill(inputs.ids, self._transfer.to_device(step.rows)))
        if not self._shard.is_last:
            self._decoder.forward(inputs, self._caches)
            return NOTHING
        wanted, starts = self._wanted(chunks, inputs)
        hidden = self._decoder.forward(inputs, self._caches, wanted)
        self._add_prompt_logprobs(chunks, starts, hidden, results)
        sampled = [index for index, chunk in enumerate(chunks) if chunk.sample]
        if not sampled:
            return Started(lambda: True, lambda: results) if self._shard.is_output else NOTHING
        last = [starts[index + 1] - 1 for index in sampled]
        if len(last) < len(hidden):
            hidden = hidden[self._transfer.to_device(np.array(last))]
        return self._sample(chunks, sampled, self._decoder.logits(hidden), results)

    def _samples_only(self, chunk: Chunk) -> bool:
        return chunk.sample and not self._wants_prompt_logprobs(chunk)

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
        return self._transfer.to_device(np.array(wanted or [0])), starts

    def _wants_prompt_logprobs(self, chunk: Chunk) -> bool:
        row = self._rows[chunk.row]
        return row.prompt_logprobs is not None and chunk.start < row.num_prompt

    def _sample(
        self, chunks: Sequence[Chunk], sampled: Sequence[int], logits: Tensor, results: list[ChunkResult]
    ) -> Started:
        """logits: (sampled, columns), of these chunks, in this order."""
        rows = []
        for index in sampled:
            chunk = chunks[index]
            row, ids = self._rows[chunk.row], self._rows.ids(chunk.row, chunk.start + chunk.count)
            rows.append(SampleRow(row.sampling, ids[: row.num_prompt], ids[row.num_prompt :]))
        drawn = self._sampler.start(logits, rows)
        if drawn.ids is not None:
            numbers = np.array([chunks[index].row for index in sampled])
            self._carry.store(drawn.ids, self._transfer.to_device(numbers))

        def finish() -> list[ChunkResult]:
            for index, choice in zip(sampled, drawn.finish(), strict=True):
                if choice is None:
                    results[index].error = NOT_FINITE
                else:
                    results[index].token_id, results[index].logprobs = choice.token_id, choice.logprobs
            return results

        return Started(drawn.is_ready, finish) if self._shard.is_output else NOTHING

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
                            found += prompt_logprobs(
                                self._vocabulary.kernels, whole, part.tolist(), row.prompt_logprobs
                            )
                        except ValueError:
                            results[index].error = NOT_FINITE
                results[index].prompt_logprobs = found

    @torch.inference_mode()
    def try_step(self, counts: Sequence[int]) -> None:
        """An eager step of so many tokens of each sequence, in order to see what memory it takes, the logits of each
        last one in float32 included. All lie in block 0."""
        sampling = Sampling(max_tokens=1, seed=0)
        news = [NewRow(row, [0] * count, count, sampling, None) for row, count in enumerate(counts)]
        tables = [[[0] * -(-count // group.block_size) for group in self._groups] for count in counts]
        chunks = [Chunk(row, 0, count, tables[row], True, []) for row, count in enumerate(counts)]
        self._rows.apply(Batch(news, chunks))
        inputs = self._rows.gather(chunks).inputs(self._transfer.to_device, lengths=self._lengths_there)
        if not self._shard.is_last:
            self._decoder.forward(inputs, self._caches)
            return
        wanted = self._transfer.to_device(np.array(inputs.query_starts[1:]) - 1)
        hidden = self._decoder.forward(inputs, self._caches, wanted)
        self._vocabulary.whole(self._decoder.logits(hidden)).float()
