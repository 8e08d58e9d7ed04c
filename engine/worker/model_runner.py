"""Steps of one rank: from a SchedulerOutput to sampled tokens.

On a GPU, steps run asynchronously: the sampled ids stay on the device for the next step, which starts before they reach
the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from serve_llm.common.errors import EngineError
from serve_llm.common.types import TokenLogprobs
from serve_llm.engine.config import Config
from serve_llm.engine.model.inputs import StepInputs, add_states
from serve_llm.engine.model.lora_mapping import spread_slots
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.sampling.choose import build_sampler
from serve_llm.engine.sampling.grammar_mask import Mask, unpack_masks
from serve_llm.engine.sampling.known_logprobs import find_known_logprobs
from serve_llm.engine.sampling.logit_adjustments import SampleRow
from serve_llm.engine.sampling.vocab_parallel import VocabParallelLogits
from serve_llm.engine.scheduler.output import MaskSource, RunnerOutput, ScheduledTokens, SchedulerOutput
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.weights.adapters import AdapterLoader, list_loads
from serve_llm.engine.worker import oom
from serve_llm.engine.worker.call_graphs import MAX_TOKENS, CallCapture, CallGraphRunner, Forward, TextRecorder
from serve_llm.engine.worker.graphs import Capture, CudaCapture, GraphRunner
from serve_llm.engine.worker.input_batch import HostInputs, InputBatch, LastTokenIds
from serve_llm.engine.worker.kv_cache import KVCacheConfig
from serve_llm.engine.worker.pending_step import NO_RESULTS, PendingStep, add_hidden_states, add_vectors, finish_after
from serve_llm.engine.worker.runnable_model import RunnableModel
from serve_llm.engine.worker.sampled_tokens import NOT_FINITE, add_sampled_tokens, apply_masks, find_sampled_rows
from serve_llm.engine.worker.state_progress import build_state_progress

MAX_SPLIT_TOKENS = 32  # maximum tokens of a sequence in a decode step; more are cheaper as a prompt


class ModelRunner:
    """Runs the steps of one rank. Owns the input batch; bound to one KV cache."""

    def __init__(
        self,
        config: Config,
        decoder: RunnableModel,
        caches: Sequence[Tensor],
        kv_cache_config: KVCacheConfig,
        vocabulary: VocabParallelLogits,
        shard: Shard,
        adapters: AdapterLoader | None = None,
        capture: Capture | None = None,
    ) -> None:
        """caches: the cache of each of this rank's layers, as `AttentionInputs` has it. adapters: None without LoRA.
        capture: None for CUDA graphs; a `CallCapture` on a CPU."""
        device = torch.device(config.device)
        self._decoder = decoder
        self._dtype: torch.dtype = getattr(torch, config.dtype)
        self.caches = caches
        self._shard = shard
        self._adapters = adapters
        speculation = config.speculation
        self._sends_last_states = speculation is not None and speculation.reads_last_states
        self._config = config
        self._vocabulary = vocabulary
        self._copier = DeviceCopier(device)
        self._states = build_state_progress(config.max_num_seqs, caches, kv_cache_config)
        self._needs_device_lengths = device.type != "cpu" or decoder.capturable
        self._input_batch = InputBatch(kv_cache_config.groups, config.max_num_seqs, config.max_model_len)
        self._last_token_ids = LastTokenIds(config.max_num_seqs, device)
        self._sampler = build_sampler(vocabulary, self._copier, device.type == "cuda" or config.async_scheduling)
        self.graphs: GraphRunner | None = None
        # If engines share experts, no stage captures, because stages without experts would disagree with the others.
        sends_states = speculation is not None and speculation.reads_hidden_states
        can_capture = decoder.capturable and not sends_states and not config.enforce_eager
        if can_capture and config.expert_engines == 1:
            records = isinstance(capture, CallCapture)
            self.graphs = (CallGraphRunner if records else GraphRunner)(
                self._compute_logits,
                CudaCapture(device) if capture is None else capture,
                self._copier,
                kv_cache_config.groups,
                MAX_TOKENS if records else config.max_num_seqs,
                config.max_model_len,
                shard.is_last,
                has_adapters=adapters is not None,
            )
        self._forward: Forward = decoder.forward
        is_whole_encoder = not kv_cache_config.groups and shard.is_first and shard.is_last
        if self.graphs is not None and isinstance(capture, CallCapture) and is_whole_encoder and adapters is None:
            self._forward = TextRecorder(decoder.forward, capture)

    def forget_ids(self, req_index: int, num_ids: int) -> None:
        """See `InputBatch.forget_ids`."""
        self._input_batch.forget_ids(req_index, num_ids)

    @oom.translate_oom(EngineError, "in a step")
    @torch.inference_mode()
    def start(self, scheduler_output: SchedulerOutput, masks: MaskSource | None = None) -> PendingStep:
        """Start a step, which on a CPU is complete on return. A step without tokens only computes other engines' tokens
        in this rank's experts. masks: called once before sampling, if the step has masked rows."""
        if scheduler_output.capture_size:
            if self.graphs is not None:
                self.graphs.capture_decode(scheduler_output.capture_size)
            return NO_RESULTS
        if not scheduler_output.scheduled:
            self._decoder.run_without_tokens(self._dtype)
            return NO_RESULTS
        self._input_batch.apply(scheduler_output)
        adapter_slots = self._load_adapters(scheduler_output)
        arrays = self._input_batch.gather(scheduler_output.scheduled)
        needs_groups = self._adapters is not None and self._adapters.needs_groups(adapter_slots)
        if self.graphs is not None and not needs_groups:
            if adapter_slots:
                arrays = replace(arrays, adapter_slots=spread_slots(adapter_slots, np.diff(arrays.query_starts)))
            replayed = self._replay(self.graphs, scheduler_output.scheduled, arrays)
            if replayed is not None:
                return self._finish_replay(scheduler_output, replayed, masks)
        return self._start_eager(scheduler_output, arrays, adapter_slots, masks)

    def _finish_replay(
        self, scheduler_output: SchedulerOutput, replayed: Tensor, masks: MaskSource | None
    ) -> PendingStep:
        """Sample from the logits that `_replay` returned; before the last stage, send its hidden states on."""
        self._decoder.send(replayed)
        received = self._receive_masks(scheduler_output, masks)
        if not self._shard.is_last:
            return NO_RESULTS
        scheduled = scheduler_output.scheduled
        return self._sample(scheduled, replayed, received, [RunnerOutput() for _ in scheduled])

    def _start_eager(
        self,
        scheduler_output: SchedulerOutput,
        arrays: HostInputs,
        adapter_slots: Sequence[int | None],
        masks: MaskSource | None,
    ) -> PendingStep:
        """Run the layers without a captured graph, and sample."""
        scheduled = scheduler_output.scheduled
        inputs = self._build_inputs(scheduled, arrays)
        rows, starts = self._select_rows(scheduled, inputs) if self._shard.is_last else (None, inputs.query_starts)
        if adapter_slots and self._adapters is not None:
            last_starts = inputs.query_starts if self._sends_last_states else starts
            self._adapters.begin_step(adapter_slots, inputs.query_starts, last_starts, self._copier)
        if not self._shard.is_last:
            self._decoder.forward(inputs, self.caches)
            self._receive_masks(scheduler_output, masks)
            return NO_RESULTS
        hidden = self._forward(inputs, self.caches, None if self._sends_last_states else rows)
        collected = [hidden] if self._sends_last_states else self._decoder.collected
        if not self._shard.is_output:
            collected = []
        if self._sends_last_states and rows is not None:
            hidden = hidden[rows]
        results = [RunnerOutput() for _ in scheduled]
        self._add_known_logprobs(scheduled, starts, hidden, adapter_slots, results)
        vectors = self._compute_vectors(scheduled, starts, hidden)
        if any(chunk.sample for chunk in scheduled):
            logits = self._compute_sampled_logits(scheduled, starts, hidden, adapter_slots)
            pending = self._sample(scheduled, logits, self._receive_masks(scheduler_output, masks), results)
        elif self._shard.is_output:
            pending = finish_after(self._copier.record(), results)
        else:
            pending = NO_RESULTS
        pending = add_vectors(pending, vectors, self._copier)
        return add_hidden_states(pending, collected, inputs.query_starts, self._copier)

    def _build_inputs(self, scheduled: Sequence[ScheduledTokens], arrays: HostInputs) -> StepInputs:
        """Copy the inputs of an eager step to the device."""
        inputs = arrays.to_inputs(self._copier.to_device, device_lengths=self._needs_device_lengths)
        if self._states is not None:
            inputs = self._states.begin_step(inputs, scheduled, self._copier.to_device)
        token_types = self._input_batch.find_token_types(scheduled)
        if token_types is not None:
            inputs = replace(inputs, token_types=self._copier.to_device(token_types))
        if not arrays.all_known:
            req_indices = self._copier.to_device(arrays.req_indices)
            inputs = replace(inputs, ids=self._last_token_ids.fill(inputs.ids, req_indices))
        return inputs

    def _compute_sampled_logits(
        self,
        scheduled: Sequence[ScheduledTokens],
        starts: Sequence[int],
        hidden: Tensor,
        adapter_slots: Sequence[int | None],
    ) -> Tensor:
        """Compute the logits of the tokens after which an id is sampled. starts: from `_select_rows`."""
        sampled_rows = find_sampled_rows(scheduled, starts[1:])
        if len(sampled_rows) < len(hidden):
            hidden = hidden[self._copier.to_device(np.array(sampled_rows))]
        if adapter_slots and self._adapters is not None:
            logits_starts = [0, *accumulate(chunk.num_samples for chunk in scheduled)]
            self._adapters.layers.begin_logits(adapter_slots, logits_starts, self._copier)
        return self._decoder.logits(hidden)

    def _load_adapters(self, scheduler_output: SchedulerOutput) -> list[int | None]:
        """Load the adapters of new requests into their slots. Returns the slot of each scheduled sequence; empty if the
        step computes only the base model."""
        if self._adapters is None:
            return []
        self._adapters.layers.end_step()
        self._adapters.load(list_loads(scheduler_output.new_requests))
        slots = [self._input_batch[chunk.req_index].adapter_slot for chunk in scheduler_output.scheduled]
        return [] if all(slot is None for slot in slots) else slots

    @torch.inference_mode()
    def run_dummy(self, scheduler_output: SchedulerOutput) -> None:
        """Run an eager step up to the gathered logits in float32, to measure its memory."""
        self._input_batch.apply(scheduler_output)
        arrays = self._input_batch.gather(scheduler_output.scheduled)
        inputs = arrays.to_inputs(self._copier.to_device, device_lengths=self._needs_device_lengths)
        if self._decoder.capturable:  # the lists are upper bounds, with which attention takes the most memory
            inputs = replace(inputs, context_lens=[self._config.max_model_len] * len(inputs.context_lens))
        inputs = add_states(inputs, [0] * len(inputs.context_lens))  # read only by models with states
        if not self._shard.is_last:
            self._decoder.forward(inputs, self.caches)
            return
        last_rows = self._copier.to_device(np.array(inputs.query_starts[1:]) - 1)
        hidden = self._decoder.forward(inputs, self.caches, None if self._sends_last_states else last_rows)
        if self._sends_last_states:
            hidden = hidden[last_rows]
        if not self._config.generates:
            return
        self._vocabulary.gather(self._decoder.logits(hidden)).float()

    @torch.inference_mode()
    def capture_dummy(self, scheduler_output: SchedulerOutput) -> None:
        """Capture the decode step of this size, to measure the memory of its graph."""
        assert self.graphs is not None
        self._input_batch.apply(scheduler_output)
        arrays = self._input_batch.gather(scheduler_output.scheduled)
        for _ in range(2):  # the first one runs eagerly
            self._decoder.send(self.graphs.logits(arrays, self._decoder.receive(len(arrays.ids))))

    def _receive_masks(self, scheduler_output: SchedulerOutput, masks: MaskSource | None) -> Mapping[int, Mask]:
        """Wait for the grammar masks. Returns them by sample number."""
        if not scheduler_output.masked_rows:
            return {}
        assert masks is not None, "masked rows without masks"
        return dict(zip(scheduler_output.masked_rows, unpack_masks(masks(), self._vocabulary.size), strict=True))

    def _compute_logits(
        self, inputs: StepInputs, req_indices: Tensor, rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """See `graphs.Compute`."""
        if self._adapters is not None:
            self._adapters.layers.begin_captured_step(inputs.adapter_slots, rows)
        if self._config.async_scheduling:
            inputs = replace(inputs, ids=self._last_token_ids.fill(inputs.ids, req_indices))
        hidden = self._decoder.run_layers(inputs, self.caches, rows, received)
        return self._decoder.logits(hidden) if self._shard.is_last else hidden

    def _only_samples(self, chunk: ScheduledTokens) -> bool:
        """Whether the chunk needs no results other than sampled ids."""
        request = self._input_batch[chunk.req_index]
        is_plain = not request.pooling and request.second_text_start is None and chunk.logprobs_start is None
        return is_plain and not self._input_batch.wants_prompt_logprobs(chunk)

    def _is_decode(self, chunk: ScheduledTokens) -> bool:
        """Whether the chunk is a sequence's newest id, possibly with a few forced ids before it or drafts after it."""
        is_output = chunk.count == 1 or chunk.start >= self._input_batch[chunk.req_index].num_prompt
        return chunk.sample and chunk.count <= MAX_SPLIT_TOKENS and is_output

    def _replay(self, graphs: GraphRunner, scheduled: Sequence[ScheduledTokens], arrays: HostInputs) -> Tensor | None:
        """Compute, with a captured graph, the logits of the tokens after which an id is sampled or, before the last
        stage, the hidden states of all tokens. None if there is no graph for the step."""
        num_tokens = len(arrays.ids)
        if not all(map(self._only_samples, scheduled)):
            return None
        if num_tokens <= graphs.max_tokens and all(map(self._is_decode, scheduled)):
            logits = graphs.logits(arrays, self._decoder.receive(num_tokens))
            if len(scheduled) == num_tokens or not self._shard.is_last:
                return logits
            rows = find_sampled_rows(scheduled, arrays.query_starts[1:].tolist())
            return logits if len(rows) == num_tokens else logits[self._copier.to_device(np.array(rows))]
        rows = find_sampled_rows(scheduled, arrays.query_starts[1:].tolist())
        if rows and graphs.can_run(arrays, len(rows)):
            return graphs.mixed_logits(arrays, rows, self._decoder.receive(num_tokens))
        return None

    def _wants_vector(self, chunk: ScheduledTokens) -> bool:
        """Whether the chunk ends the prompt of a pooling request, or belongs to one that wants a vector per token."""
        request = self._input_batch[chunk.req_index]
        return request.pooling and (request.pools_tokens or chunk.start + chunk.count == request.num_prompt)

    def _select_rows(self, scheduled: Sequence[ScheduledTokens], inputs: StepInputs) -> tuple[Tensor | None, list[int]]:
        """Select the tokens whose hidden states are needed, at least one; None: all. Also returns each chunk's start.

        A chunk with prompt logprobs needs all its tokens, one with log-probabilities of known ids those from
        `logprobs_start` on, one that ends a pooling prompt those that the pooler selects or all, and any other only
        those after which an id is sampled.
        """
        rows: list[int] = []
        starts = [0]
        for chunk, first, end in zip(scheduled, inputs.query_starts, inputs.query_starts[1:], strict=False):
            if self._input_batch.wants_prompt_logprobs(chunk):
                rows += range(first, end)
            elif chunk.logprobs_start is not None:
                rows += range(first + chunk.logprobs_start - chunk.start, end)
            elif self._wants_vector(chunk):
                assert self._decoder.pooler is not None
                rows += self._decoder.pooler.select(range(first, end), self._input_batch[chunk.req_index].pools_tokens)
            else:
                rows += range(end - chunk.num_samples, end)
            starts.append(len(rows))
        if not rows:
            rows, starts = [0], [0, *[1] * len(scheduled)]
        if len(rows) == len(inputs.ids):
            return None, starts
        return self._copier.to_device(np.array(rows)), starts

    def _compute_vectors(
        self, scheduled: Sequence[ScheduledTokens], starts: Sequence[int], hidden: Tensor
    ) -> dict[int, Tensor]:
        """Compute the vectors of pooling requests, by index in `scheduled`; none on ranks without output. starts:
        from `_select_rows`."""
        pooled = [index for index, chunk in enumerate(scheduled) if self._wants_vector(chunk)]
        if not pooled or not self._shard.is_output:
            return {}
        assert self._decoder.pooler is not None
        pools_tokens = [self._input_batch[scheduled[index].req_index].pools_tokens for index in pooled]
        rows = [hidden[starts[index] : starts[index + 1]] for index in pooled]
        return dict(zip(pooled, self._decoder.pooler.compute(rows, pools_tokens), strict=True))

    def _add_known_logprobs(
        self,
        scheduled: Sequence[ScheduledTokens],
        starts: Sequence[int],
        hidden: Tensor,
        adapter_slots: Sequence[int | None],
        results: list[RunnerOutput],
    ) -> None:
        """Add the log-probabilities of prompt ids and of forced output ids, which were not sampled."""
        for index, (chunk, start, end, result) in enumerate(zip(scheduled, starts, starts[1:], results, strict=False)):
            if adapter_slots and self._adapters is not None:
                self._adapters.layers.begin_logits_of(adapter_slots[index], self._copier.device)
            request = self._input_batch[chunk.req_index]
            known_ids = self._input_batch.known_ids(chunk.req_index)
            chunk_end = chunk.start + chunk.count
            if self._input_batch.wants_prompt_logprobs(chunk):
                rows = hidden[start:]
                next_ids = known_ids[chunk.start + 1 : min(chunk_end + 1, request.num_prompt)]
                result.prompt_logprobs = self._find_logprobs(rows, next_ids, request.prompt_logprobs, (), result)
            if chunk.logprobs_start is not None:
                next_ids = known_ids[chunk.logprobs_start + 1 : chunk_end + 1]
                rows = hidden[end - (chunk_end - chunk.logprobs_start) :]
                sampling = request.sampling
                found = self._find_logprobs(rows, next_ids, sampling.logprobs, sampling.logprob_token_ids, result)
                result.known_logprobs = tuple(found or ())

    def _find_logprobs(
        self, hidden: Tensor, next_ids: np.ndarray, k: int | None, requested_ids: Sequence[int], result: RunnerOutput
    ) -> list[TokenLogprobs] | None:
        assert k is not None
        found = find_known_logprobs(
            self._decoder.logits, self._vocabulary, hidden, next_ids.tolist(), k, requested_ids, self._shard.is_output
        )
        if found is None:
            result.error = NOT_FINITE
        return found

    def _sample(
        self,
        scheduled: Sequence[ScheduledTokens],
        logits: Tensor,
        masks: Mapping[int, Mask],
        results: list[RunnerOutput],
    ) -> PendingStep:
        """Sample the next tokens of the requests that sample, including those after drafts. masks: grammar masks by
        sample number. logits: (tokens after which an id is sampled, shard of vocabulary)."""
        rows: list[SampleRow] = []
        req_indices = []
        for chunk in scheduled:
            if not chunk.sample:
                continue
            request = self._input_batch[chunk.req_index]
            num_output = chunk.start + chunk.count - request.num_prompt
            for num_known in range(num_output - len(chunk.draft_ids), num_output + 1):
                rows.append(SampleRow(request.sampling, request.prompt_ids, request.later_ids[:num_known]))
                req_indices.append(chunk.req_index)
        errors = apply_masks(rows, masks)
        output = self._sampler.start(logits, rows)
        if output.token_ids is not None:
            self._last_token_ids.store(output.token_ids, self._copier.to_device(np.array(req_indices)))
        if not self._shard.is_output:
            return NO_RESULTS

        def finish() -> list[RunnerOutput]:
            add_sampled_tokens(results, scheduled, output.finish(), errors)
            return results

        return PendingStep(output.is_ready, finish)
