"""Continuous batching: each step, so many tokens for each sequence. There is no prefill or decode mode.

Running sequences go first, then waiting ones are admitted while the token budget, the rows and the blocks last. Who
generates gets a token in every step. One prompt of several steps is computed at a time, in at most half of each step if
shorter ones come, so that they need not wait for it. A running sequence that finds no block makes the last admitted one
go back to waiting, to be recomputed. Pure: in go sequences and a budget, out comes a Batch; results
are committed later, possibly several batches later.
"""

from __future__ import annotations

from collections.abc import Sequence as Items

from serve_llm.engine.schedule.batch import Batch, Chunk, ChunkResult, NewRow
from serve_llm.engine.schedule.blocks import BlockPool
from serve_llm.engine.schedule.policy import WaitingQueue
from serve_llm.engine.schedule.prefix_cache import PrefixCache
from serve_llm.engine.schedule.sequence import RELEASED, GroupLayout, Sequence, most_blocks
from serve_llm.engine.types import FinishReason, Output, Request, Stats


class Scheduler:
    """Owns all live sequences and all blocks. Not thread-safe: the loop calls it."""

    def __init__(
        self,
        groups: Items[GroupLayout],
        num_blocks: int,
        *,
        max_num_seqs: int,
        max_model_len: int,
        max_chunk: int,
        prefix_caching: bool,
        ahead: bool = False,
        rope_turns_at: int | None = None,
    ) -> None:
        """`max_chunk`: most tokens of one sequence in one step; bounds what a sliding window holds at a time.
        rope_turns_at: see `ModelSpec`.
        ahead: a sequence may be in several batches that are under way: workers have the id that they sampled last,
        before it is committed here."""
        self._groups = tuple(groups)
        self._pool = BlockPool(num_blocks)
        self._max_model_len = max_model_len
        self._max_chunk = max_chunk
        self._ahead = ahead
        self._rope_turns_at = rope_turns_at
        self._prefixes = PrefixCache(self._groups, self._pool, prefix_caching)
        self._sequences: dict[int, Sequence] = {}
        self._waiting = WaitingQueue()
        self._running: list[Sequence] = []  # in order of admission
        self._free_rows = list(range(max_num_seqs - 1, -1, -1))
        self._arrivals = 0
        self._stats = Stats()

    # requests in and out

    def add(self, request: Request, now: float) -> Output | None:
        """Take a request in. Returns its final output if nothing is left to compute."""
        self._arrivals += 1
        sequence = Sequence(request, self._groups, self._arrivals, now, self._rope_turns_at)
        if sequence.num_output and (reason := self._finish_reason(sequence)) is not None:
            return Output(id=request.id, token_ids=[], finish_reason=reason)
        self._sequences[request.id] = sequence
        self._waiting.add(sequence)
        return None

    def abort(self, request_id: int) -> None:
        """End a request without output; unknown ids (already finished) are fine."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is None:
            return
        sequence.ended = True
        if sequence.row is None:
            self._waiting.remove(sequence)
        elif not sequence.in_flight:
            self._leave(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def in_flight(self) -> list[int]:
        """Ids of the requests in batches whose results are not committed yet."""
        return [sequence.request.id for sequence in self._running if sequence.in_flight]

    def stats(self) -> Stats:
        """Counters so far and gauges now; the caller fills what it knows (steps)."""
        self._stats.num_running = len(self._running)
        self._stats.num_waiting = len(self._waiting)
        self._stats.kv_cache_usage = self._pool.usage
        return self._stats

    # a step

    def schedule(self, budget: int, now: float, depth: int = 1) -> Batch:
        """Choose what to compute next; at most `budget` tokens. Empty if nothing can be (all waits or is in flight).

        depth: batches that are to be under way at a time with other sequences in each. No batch takes more than its
        share of them, so that there is work for the others.
        """
        new_rows: list[NewRow] = []
        chunks: list[Chunk] = []
        preemptions, is_refused = self._stats.num_preemptions, False
        share = -(-len(self._running) // depth)
        admissible = -(-(len(self._running) + len(self._waiting)) // depth)
        ready = [sequence for sequence in self._running if not sequence.in_flight or self._may_go_on(sequence)]
        for_prompts = budget - sum(sequence.num_left == 1 for sequence in ready)
        long, long_count, limit = None, 0, budget
        for sequence in ready:
            count = min(sequence.num_left, budget, self._max_chunk)
            if count > 1:
                # A long prompt leaves half to the short ones that come after it.
                count = min(count, -(-for_prompts // 2) if sequence.is_long else for_prompts)
            if count <= 0 or len(chunks) + (long is not None) >= share or sequence.row is None:
                continue
            if is_refused and sequence.in_flight:
                continue  # one that is always in flight could never be preempted
            if not self._make_room(sequence, count):
                is_refused = True  # who comes later must not take the blocks that it waits for
                continue
            budget -= count
            if sequence.num_left > 1:
                for_prompts -= count
            if sequence.is_long and sequence.num_left > 1:
                long, long_count = sequence, count
            else:
                chunks.append(self._chunk(sequence, count))
        if self._stats.num_preemptions == preemptions and not is_refused:
            budget = self._admit(budget, limit, now, admissible - (long is not None), new_rows, chunks)
        if long is not None:
            chunks.append(self._chunk(long, self._extended(long, long_count, budget)))
        return Batch(new_rows, chunks)

    def _may_go_on(self, sequence: Sequence) -> bool:
        """Whether the next chunk of a sequence in flight can be computed before the last one is committed."""
        if not self._ahead or sequence.ended:
            return False
        if sequence.num_coming == 0:
            return True  # more of a prompt
        length = len(sequence.ids) + sequence.num_coming
        has_ended = length - sequence.num_prompt >= sequence.sampling.max_tokens or length >= self._max_model_len
        return not (has_ended or sequence.turns or sequence.sampling.reads_history)

    def _extended(self, sequence: Sequence, count: int, budget: int) -> int:
        """A chunk's tokens with what others left of the step's budget, if there are blocks free for them."""
        extended = min(sequence.num_left, count + budget, self._max_chunk)
        if sum(self._missing(sequence, extended)) > self._pool.num_free or not self._make_room(sequence, extended):
            return count
        return extended

    def _admit(
        self, budget: int, limit: int, now: float, share: int, new_rows: list[NewRow], chunks: list[Chunk]
    ) -> int:
        """Let waiting sequences in, in order, until the batch has `share` chunks. One that waits for another's prefix
        lets those behind it pass; so does one of more than `limit` tokens while another such is being computed.
        Returns what is left of the budget."""
        has_long = any(sequence.is_long and sequence.num_left > 1 for sequence in self._running)
        for sequence in self._waiting:
            if budget <= 0 or len(chunks) >= share or not self._free_rows:
                break
            hit = self._prefixes.find(sequence)
            # Who has sent tokens already is a stream that was preempted or replayed: it stands still.
            is_long = len(sequence.ids) - hit > limit and not sequence.num_output
            if self._prefixes.is_coming(sequence, hit) or (is_long and has_long):
                continue
            if not self._enter(sequence, hit, now):
                break
            sequence.is_long = is_long
            has_long = has_long or is_long
            new_rows.append(self._new_row(sequence))
            count = min(sequence.num_left, budget, self._max_chunk)
            self._make_room(sequence, count)
            chunks.append(self._chunk(sequence, count))
            budget -= count
        return budget

    def commit(self, batch: Batch, results: Items[ChunkResult]) -> list[Output]:
        """Book the result of a batch, in the order in which batches were scheduled. Returns what requests get."""
        by_row = {sequence.row: sequence for sequence in self._running}
        outputs = []
        for chunk, result in zip(batch.chunks, results, strict=True):
            sequence = by_row[chunk.row]
            sequence.num_coming -= chunk.sample
            if sequence.ended:
                sequence.num_scheduled -= chunk.count
                if not sequence.in_flight:
                    self._leave(sequence)
                continue
            sequence.num_computed += chunk.count
            self._prefixes.remember(sequence, chunk.start)
            self._release_behind_windows(sequence)
            output = self._output(sequence, chunk, result)
            if output is not None:
                outputs.append(output)
                if output.finish_reason is not None:
                    self.abort(sequence.request.id)
                elif sequence.turns and not sequence.in_flight:
                    self._step_back(sequence)
                    sequence.turn()
        return outputs

    def _output(self, sequence: Sequence, chunk: Chunk, result: ChunkResult) -> Output | None:
        if result.error is not None:
            return Output(id=sequence.request.id, token_ids=[], finish_reason=FinishReason.ERROR, error=result.error)
        if result.prompt_logprobs is not None:
            sequence.prompt_logprobs.extend(result.prompt_logprobs)
        if result.token_id is not None:
            sequence.ids.append(result.token_id)
            self._waiting.charge(sequence, 1)
        elif sequence.num_computed < len(sequence.ids):
            return None  # more of the prompt to come
        reason = self._finish_reason(sequence)
        output = Output(
            id=sequence.request.id,
            token_ids=[] if result.token_id is None else [result.token_id],
            finish_reason=reason,
            stop_id=result.token_id if reason is FinishReason.STOP else None,
            logprobs=None if result.logprobs is None else [result.logprobs],
        )
        if not sequence.reported:
            sequence.reported = True
            output.cached_tokens, output.queued_seconds = sequence.cached_tokens, sequence.queued_seconds
        if sequence.wants_prompt_logprobs:
            sequence.prompt_logprobs_sent = True
            output.prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        return output

    def _finish_reason(self, sequence: Sequence) -> FinishReason | None:
        reason = sequence.finish_reason()
        if reason is None and len(sequence.ids) >= self._max_model_len:
            return FinishReason.LENGTH
        return reason

    def _chunk(self, sequence: Sequence, count: int) -> Chunk:
        assert sequence.row is not None
        new_blocks = []
        for index, table in enumerate(sequence.tables):
            added = table[sequence.num_sent_blocks[index] :]
            new_blocks.append([max(block, 0) for block in added])  # a released entry is never looked at: any block does
            sequence.num_sent_blocks[index] = len(table)
        new_ids = sequence.ids[sequence.num_sent_ids :]
        sequence.num_sent_ids = len(sequence.ids)
        start = sequence.num_scheduled
        sequence.num_scheduled += count
        sample = sequence.num_left == 0 and sequence.sampling.max_tokens > 0
        sequence.num_coming += sample
        return Chunk(sequence.row, start, count, new_blocks, sample, new_ids)

    # rows and blocks

    def _new_row(self, sequence: Sequence) -> NewRow:
        assert sequence.row is not None
        sequence.num_sent_ids = len(sequence.ids)
        prompt_logprobs = sequence.sampling.prompt_logprobs if sequence.wants_prompt_logprobs else None
        ids, num_prompt = list(sequence.ids), sequence.num_prompt
        return NewRow(sequence.row, ids, num_prompt, sequence.sampling, prompt_logprobs, sequence.is_turned)

    def _enter(self, sequence: Sequence, hit: int, now: float) -> bool:
        """Give a waiting sequence a row and its cached prefix, if all that it has to compute now finds blocks."""
        cached = self._prefixes.tables(sequence, hit)
        revived = sum(block != RELEASED and self._pool.is_free(block) for blocks in cached for block in blocks)
        if self._most_blocks(len(sequence.ids)) - self._held(cached) + revived > self._pool.num_free:
            return False
        for table, blocks in zip(sequence.tables, cached, strict=True):
            for block in blocks:
                if block != RELEASED:
                    self._pool.acquire(block)
            table.extend(blocks)
        is_first = sequence.cached_tokens is None  # what is computed again after a preemption is not the tenant's doing
        self._waiting.admit(sequence, len(sequence.ids) - hit if is_first else 0)
        self._running.append(sequence)
        sequence.row = self._free_rows.pop()
        sequence.num_computed = sequence.num_scheduled = hit
        if is_first:
            sequence.cached_tokens, sequence.queued_seconds = hit, now - sequence.arrived_at
            self._stats.prefix_cache_queries += sequence.num_prompt
            self._stats.prefix_cache_hits += hit
        self._prefixes.begin(sequence)
        return True

    def _held(self, tables: Items[list[int]]) -> int:
        return sum(block != RELEASED for table in tables for block in table)

    def _most_blocks(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds at most at a time."""
        return sum(most_blocks(group, num_tokens, self._max_chunk) for group in self._groups)

    def _make_room(self, sequence: Sequence, count: int) -> bool:
        """Append blocks for the next `count` tokens, preempting later sequences if need be."""
        missing = self._missing(sequence, count)
        while sum(missing) > self._pool.num_free:
            victim = self._running[-1]
            if victim.in_flight:
                return False  # its result comes first; then there may be room
            self._preempt(victim)
            if victim is sequence:
                return False
        for table, number in zip(sequence.tables, missing, strict=True):
            table.extend(self._pool.allocate() for _ in range(number))
        return True

    def _missing(self, sequence: Sequence, count: int) -> list[int]:
        """How many more blocks the next `count` tokens need, group by group."""
        end = sequence.num_scheduled + count
        return [max(0, -(-end // g.block_size) - len(t)) for g, t in zip(self._groups, sequence.tables, strict=True)]

    def _preempt(self, sequence: Sequence) -> None:
        self._step_back(sequence)
        self._stats.num_preemptions += 1

    def _step_back(self, sequence: Sequence) -> None:
        """To the waiting ones, to be computed anew."""
        self._leave(sequence)
        sequence.num_computed = sequence.num_scheduled = 0
        sequence.num_sent_blocks = [0] * len(self._groups)
        sequence.prompt_logprobs = []
        self._waiting.add(sequence)

    def _leave(self, sequence: Sequence) -> None:
        """Give back the row and all blocks, the last ones first: the start of a prefix is worth most."""
        assert sequence.row is not None
        self._prefixes.end(sequence)
        for table in sequence.tables:
            for block in reversed(table):
                if block != RELEASED:
                    self._pool.release(block)
            table.clear()
        self._running.remove(sequence)
        self._free_rows.append(sequence.row)
        sequence.row = None

    def _release_behind_windows(self, sequence: Sequence) -> None:
        for group, table in zip(self._groups, sequence.tables, strict=True):
            if group.window is None:
                continue
            index = (sequence.num_computed - group.window + 1) // group.block_size - 1
            while index >= 0 and table[index] != RELEASED:
                self._pool.release(table[index])
                table[index] = RELEASED
                index -= 1

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, rows and queues are conserved (promise 4). Slow: for tests and idle."""
        self._pool.check_integrity([b for s in self._running for t in s.tables for b in t if b != RELEASED])
        rows = [sequence.row for sequence in self._running if sequence.row is not None]
        assert len(rows) == len(self._running), "a running sequence has no row"
        assert sorted([*self._free_rows, *rows]) == list(range(len(self._free_rows) + len(rows))), "a row is lost"
        assert all(sequence.row is None and not any(sequence.tables) for sequence in self._waiting)
        live = {s.request.id for s in [*self._running, *self._waiting] if not s.ended}
        assert live == set(self._sequences), "a sequence is lost"
        self._prefixes.check_integrity(self._running)
