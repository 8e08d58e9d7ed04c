"""Continuous batching: each step computes some tokens of each scheduled sequence. There is no prefill or decode mode.

Running sequences are scheduled first, then waiting ones are admitted as long as the token budget, the request indices
and the blocks suffice. Decoding sequences get one token in every step, and more if forced ids follow it. At most one
prompt that needs several steps is computed at a time, on at most half the budget while shorter prompts can use the
rest. A running sequence that finds no block preempts the one admitted last, which waits again and is recomputed.

Sequences of batches (the Batch API) have the lowest priority: while others exist, they are paused except for a small
share of each step, and preempted if they hold resources that a waiting sequence needs. The scheduler is pure: it takes
sequences and a budget, and returns a SchedulerOutput; results may come back several steps later.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Sequence as Items

from serve_llm.common.types import LOWEST_PRIORITY, EngineCoreOutput, EngineCoreRequest, SchedulerStats
from serve_llm.engine.scheduler.adapter_slots import AdapterSlots
from serve_llm.engine.scheduler.batch_api_share import BatchApiShare
from serve_llm.engine.scheduler.block_pool import BlockPool
from serve_llm.engine.scheduler.kv_events import KVEventRecorder
from serve_llm.engine.scheduler.offload import OffloadManager
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.planned_step import PlannedStep
from serve_llm.engine.scheduler.policy import WaitingQueue
from serve_llm.engine.scheduler.prefix_cache import PrefixCache
from serve_llm.engine.scheduler.results import add_result
from serve_llm.engine.scheduler.running import RunningSequences
from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence
from serve_llm.engine.scheduler.speculation import Speculator
from serve_llm.engine.scheduler.state_snapshots import StateSnapshots


class Scheduler:
    """Owns all live sequences and all blocks. Not thread-safe: only the engine's loop calls it."""

    def __init__(
        self,
        groups: Items[KVCacheSpec],
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_chunk: int,
        prefix_caching: bool,
        async_scheduling: bool = False,
        long_rope_threshold: int | None = None,
        whole_prompts: bool = False,
        speculator: Speculator | None = None,
        max_loras: int = 0,
        offload: OffloadManager | None = None,
        recorder: KVEventRecorder | None = None,
        snapshots: StateSnapshots | None = None,
    ) -> None:
        """max_chunk: most tokens of one sequence in a step. async_scheduling: schedule a sequence again while it is in
        flight; workers have the id that they sampled. long_rope_threshold: see `ModelSpec`. whole_prompts: compute each
        prompt in one step, as encoders need. max_loras: adapters that workers hold. The others: see `PrefixCache`."""
        self._groups = tuple(groups)
        self._pool = BlockPool(num_blocks)
        self._max_model_len = max_model_len
        self._max_chunk = max_chunk
        self._async_scheduling = async_scheduling
        self._whole_prompts = whole_prompts
        self._speculator = speculator
        self._max_num_seqs = max_num_seqs
        self._long_rope_threshold = long_rope_threshold
        self._prefix_cache = PrefixCache(self._groups, self._pool, prefix_caching, offload, recorder, snapshots)
        self._has_windows = any(group.window is not None for group in groups)
        self._sequences: dict[int, Sequence] = {}  # by request id
        self._waiting = WaitingQueue()
        self._adapters = AdapterSlots(max_loras)
        self._num_arrivals = 0
        self._num_online = 0  # live sequences that do not belong to batches
        self._num_active = 0  # running ones that are not paused
        self._num_deferred = 0  # waiting ones that the newest step has skipped
        self._batch_share = BatchApiShare(max_chunk if whole_prompts else BatchApiShare.MAX_SAVED)
        self._stats = SchedulerStats()
        self._running = RunningSequences(
            self._groups,
            self._pool,
            self._prefix_cache,
            self._adapters,
            self._waiting,
            self._stats,
            max_num_seqs=max_num_seqs,
            max_chunk=max_chunk,
        )

    # Requests in and out.

    def add(self, request: EngineCoreRequest, now: float) -> EngineCoreOutput | None:
        """Add a request to the queue. Returns its final output if nothing is left to compute."""
        self._num_arrivals += 1
        sequence = Sequence(request, self._groups, self._num_arrivals, now, self._long_rope_threshold)
        if sequence.num_output and (reason := sequence.finish_reason(self._max_model_len)) is not None:
            return EngineCoreOutput(id=request.id, token_ids=[], finish_reason=reason)
        self._sequences[request.id] = sequence
        self._num_online += not sequence.is_of_batch
        self._waiting.add(sequence)
        return None

    def abort(self, request_id: int) -> None:
        """End a request without output. Ignores unknown ids, whose requests have finished."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        self._num_online -= not sequence.is_of_batch
        sequence.is_finished = True
        if self._speculator is not None:
            self._speculator.forget(sequence)
        if sequence.req_index is None:
            self._waiting.remove(sequence)
        elif not sequence.is_in_flight:
            self._running.remove(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    @property
    def has_only_batches(self) -> bool:
        """Whether all live sequences belong to batches."""
        return not self._num_online

    @property
    def num_waiting(self) -> int:
        """Waiting sequences, except those of batches, for which no client waits."""
        return self._waiting.count_before(LOWEST_PRIORITY)

    @property
    def num_running(self) -> int:
        """Running sequences that are not paused."""
        return len(self._running) - len(self._find_paused())

    @property
    def request_indices(self) -> Collection[int]:
        """Indices of the running sequences; a view."""
        return self._running.by_index.keys()

    @property
    def in_flight(self) -> list[int]:
        """Ids of the requests in steps without a result yet."""
        return [sequence.request.id for sequence in self._running if sequence.num_scheduled > sequence.num_computed]

    def stats(self) -> SchedulerStats:
        """Return total counters and current gauges. The caller sets num_steps and step_tokens."""
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = len(self._waiting)
        self._stats.num_deferred = min(self._num_deferred, len(self._waiting))
        self._stats.kv_cache_usage = self._pool.usage
        return self._stats

    # Scheduling a step.

    def prepare_drafts(self, held: Collection[int]) -> None:
        """Draft ids for the sequences that the next step may compute. May take as long as a step."""
        if self._speculator is not None:
            paused = self._find_paused()
            self._num_active = len(self._running) - len(paused)
            ready = (one for index, one in self._running.by_index.items() if index not in held and index not in paused)
            drafted = ((one, one.max_drafts(self._max_model_len)) for one in ready)
            num_waiting = self.num_waiting if self._num_online else len(self._waiting)
            self._speculator.prepare(drafted, self._num_active, num_waiting)

    def schedule(self, budget: int, now: float, num_batches: int = 1, held: Collection[int] = ()) -> SchedulerOutput:
        """Choose at most `budget` tokens to compute next. Empty if every sequence waits or is in flight.

        num_batches: steps to keep in flight at a time, each with different sequences. Each step takes at most its share
        of the sequences, so that work is left for the others. held: request indices of sequences that are not ready.
        """
        if self._has_both:
            held = self._running.preempt_for_waiting().union(held)
        held = self._running.preempt_for_adapter().union(held)
        paused = self._find_paused()
        self._num_active = len(self._running) - len(paused)
        self._num_deferred = 0
        step = PlannedStep(budget, budget, max_drafts=self._limit_drafts())
        max_running = -(-self._num_active // num_batches)
        max_sequences = -(-(len(self._running) + len(self._waiting)) // num_batches)
        self._fill(step, max_running, max_sequences, now, paused.union(held))
        if self._num_online == 0:
            self._batch_share.clear()
        elif self._has_both and not step.is_out_of_blocks:
            active = {req_index for req_index in self._running.by_index if req_index not in paused}
            max_running = -(-len(self._running) // num_batches)
            self._share_with_batches(step, max_running, max_sequences, now, active, held)
        self._adapters.count_step(self._running.by_index[chunk.req_index] for chunk in step.scheduled if chunk.sample)
        copies = self._prefix_cache.take_copies() if step.scheduled else []
        return SchedulerOutput(step.new_requests, step.scheduled, copies=copies)

    def _limit_drafts(self) -> int:
        """Limit the drafts of a step, so that it samples about as many ids as a full step without drafts."""
        if self._speculator is None:
            return 0
        num_free_rows = self._max_num_seqs - len(self._running) - len(self._waiting)
        return max(self._speculator.num_tokens, num_free_rows)

    def _share_with_batches(
        self,
        step: PlannedStep,
        max_running: int,
        max_sequences: int,
        now: float,
        active: set[int],
        held: Collection[int],
    ) -> None:
        """Add sequences of batches, up to their share, to a step that others have filled. active: indices of the
        others."""
        self._batch_share.add(step.max_tokens - step.budget, step.is_decode)
        if active:
            step.budget = min(step.budget, self._batch_share.num_tokens)
        num_left = step.budget
        self._fill(step, max_running, max_sequences, now, active.union(held), with_batches=True)
        self._batch_share.spend(num_left - step.budget)

    @property
    def _has_both(self) -> bool:
        """Whether there are live sequences both of batches and others."""
        return 0 < self._num_online < len(self._sequences)

    def _find_paused(self) -> set[int]:
        """Find the request indices of running sequences of batches, which are paused while there are others."""
        return {index for index, one in self._running.by_index.items() if one.is_of_batch} if self._has_both else set()

    def _fill(
        self,
        step: PlannedStep,
        max_running: int,
        max_sequences: int,
        now: float,
        held: Collection[int],
        with_batches: bool = False,
    ) -> None:
        """Schedule running sequences until the step has `max_running`, then admit waiting ones."""
        self._schedule_running(step, max_running, held)
        if not step.is_out_of_blocks and self._waiting:
            self._admit_waiting(step, max_sequences, now, with_batches or not self._num_online)
        if step.long_prefill is not None:
            self._schedule_long_prefill(step, step.long_prefill)
            step.long_prefill = None

    def _schedule_running(self, step: PlannedStep, max_sequences: int, held: Collection[int]) -> None:
        """Schedule the running sequences that are ready, in order of admission."""
        num_preemptions = self._stats.num_preemptions
        ready = [
            sequence
            for req_index, sequence in self._running.by_index.items()
            if req_index not in held and (not sequence.is_in_flight or self._can_run_ahead(sequence))
        ]
        prefill_budget = step.budget - sum(sequence.is_decoding for sequence in ready)
        for sequence in ready:
            if step.num_sequences >= max_sequences:
                break
            is_decoding = sequence.is_decoding
            is_long_prefill = sequence.has_long_prompt and not is_decoding
            count = min(sequence.num_unscheduled, step.budget, self._max_chunk)
            if is_long_prefill:
                count = min(count, -(-prefill_budget // 2))  # the other half is for shorter prompts that arrived later
            else:
                count = min(count, max(0, prefill_budget) + is_decoding)
            if count <= 0 or sequence.req_index is None:  # None: preempted by one before it
                continue
            if step.is_out_of_blocks and sequence.is_in_flight:
                continue  # a sequence that is always in flight could never be preempted
            if not self._running.allocate(sequence, count):
                step.is_out_of_blocks = True  # later sequences must not take the blocks that this one needs
                continue
            step.budget -= count
            prefill_budget -= count - is_decoding
            drafts: list[int] = []
            if self._speculator is not None and not self._speculator.has_too_many:
                drafts = self._choose_drafts(self._speculator, step, sequence, count, prefill_budget)
                step.budget -= len(drafts)
                prefill_budget -= len(drafts)
            if is_long_prefill:
                step.long_prefill = sequence
                step.long_prefill_count = count
            else:
                step.scheduled.append(sequence.schedule(count, drafts))
        if self._stats.num_preemptions > num_preemptions:
            step.is_out_of_blocks = True

    def _choose_drafts(
        self, speculator: Speculator, step: PlannedStep, sequence: Sequence, count: int, budget: int
    ) -> list[int]:
        """Choose at most `budget` drafts to verify in this step after `count` tokens, if there are blocks for them."""
        if count < sequence.num_unscheduled:
            return []
        most = min(sequence.max_drafts(self._max_model_len), step.max_drafts, budget, self._max_chunk - count)
        drafts = speculator.choose(sequence, most, self._num_active)
        if not drafts or not self._running.has_blocks(sequence, count + len(drafts)):
            return []
        self._running.allocate(sequence, count + len(drafts))
        step.max_drafts -= len(drafts)
        return drafts

    def _can_run_ahead(self, sequence: Sequence) -> bool:
        """Whether a sequence in flight can be scheduled again before its last result arrives."""
        if not self._async_scheduling:
            return False
        has_drafts = self._speculator is not None and self._speculator.has_drafts(sequence, self._num_active)
        return sequence.can_run_ahead(self._max_model_len, has_drafts)

    def _admit_waiting(self, step: PlannedStep, max_sequences: int, now: float, with_batches: bool) -> None:
        """Admit waiting sequences in order until the step has `max_sequences`; those of batches only if `with_batches`.

        Later sequences may overtake one whose prefix is being computed by another or read from disk, and one with a
        long prompt while another long prompt is being computed.
        """
        has_long_prefill = any(sequence.is_long_prefill for sequence in self._running)
        num_overtaken = 0
        for sequence in self._adapters.list_admissible(self._waiting):
            if step.budget <= 0 or step.num_sequences >= max_sequences or self._running.is_full:
                break
            if sequence.is_of_batch and not with_batches:
                break
            if self._whole_prompts and step.scheduled and len(sequence.token_ids) > step.budget:
                break
            num_cached = self._prefix_cache.find(sequence)
            # A sequence with output was preempted or replayed. Its stream is stalled, so it does not wait for others.
            can_wait = not sequence.num_output and not self._whole_prompts
            is_long = can_wait and len(sequence.token_ids) - num_cached > step.max_tokens
            if (is_long and has_long_prefill) or self._prefix_cache.must_wait(sequence, num_cached):
                num_overtaken += 1
                continue
            if not self._running.admit(sequence, num_cached, now):
                break
            sequence.has_long_prompt = is_long
            has_long_prefill = has_long_prefill or is_long
            step.new_requests.append(sequence.describe())
            max_tokens = self._max_chunk if self._whole_prompts else min(step.budget, self._max_chunk)
            count = min(sequence.num_unscheduled, max_tokens)
            self._running.allocate(sequence, count)
            step.scheduled.append(sequence.schedule(count))
            step.budget -= count
        self._num_deferred = num_overtaken + self._adapters.num_deferred

    def _schedule_long_prefill(self, step: PlannedStep, sequence: Sequence) -> None:
        """Schedule the long prompt with its reserved tokens, plus the rest of the budget if blocks are free."""
        count = step.long_prefill_count
        extended = min(sequence.num_unscheduled, count + step.budget, self._max_chunk)
        if self._running.has_blocks(sequence, extended):
            self._running.allocate(sequence, extended)
            step.budget -= extended - count
            count = extended
        step.scheduled.append(sequence.schedule(count))

    # Results of a step.

    def update_from_output(self, scheduled: SchedulerOutput, results: Items[RunnerOutput]) -> list[EngineCoreOutput]:
        """Record the results of a step. Call in the order in which steps were scheduled. Returns outputs for
        requests."""
        self._prefix_cache.finish_step()
        outputs = []
        for chunk, result in zip(scheduled.scheduled, results, strict=True):
            sequence = self._running.by_index[chunk.req_index]
            num_drafts = len(chunk.draft_ids)
            sequence.num_pending_ids -= num_drafts + chunk.sample
            if sequence.is_finished:
                sequence.num_scheduled -= chunk.count
                if not sequence.is_in_flight:
                    self._running.remove(sequence)
                continue
            sequence.num_computed += chunk.count
            num_before = len(sequence.token_ids)
            output = add_result(sequence, result, self._max_model_len)
            if result.forced_ids:
                num_sampled = min(len(sequence.token_ids) - num_before, len(result.accepted_ids) + 1)
                self._stats.num_forced_tokens += len(sequence.token_ids) - num_before - num_sampled
            if num_drafts:
                sequence.reject_drafts(num_drafts - len(result.accepted_ids))
                is_looked_up = self._speculator is not None and self._speculator.are_looked_up(sequence)
                self._stats.count_draft(num_drafts, len(result.accepted_ids), is_looked_up)
            if self._speculator is not None:
                if result.hidden_states is not None:
                    self._speculator.take_hidden_states(sequence, chunk.start, result.hidden_states)
                self._speculator.update(sequence)
            self._prefix_cache.cache_blocks(sequence, chunk.start)
            if self._has_windows:
                for block in sequence.pop_blocks_outside_windows():
                    self._pool.release(block)
            self._waiting.charge(sequence, len(sequence.token_ids) - num_before)
            if output is None:
                continue
            outputs.append(output)
            if output.finish_reason is not None:
                self.abort(sequence.request.id)
            elif sequence.must_switch_rope and not sequence.is_in_flight:
                self._running.requeue(sequence)
                sequence.switch_to_long_rope()
        return outputs

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, indices and queues are conserved. Slow: for tests and idle engines."""
        self._running.check_integrity()
        assert all(sequence.req_index is None and not any(sequence.block_tables) for sequence in self._waiting)
        live = {s.request.id for s in [*self._running, *self._waiting] if not s.is_finished}
        assert live == set(self._sequences), "a sequence is lost"
        assert self._num_online == sum(not one.is_of_batch for one in self._sequences.values()), "miscounted"
