"""Fake workers for tests of the scheduler, and a loop that drives both.

A function of the ids stands in for the workers: a token depends on everything before it, so that a sequence computed
from a wrong prefix, a stale block or a stale id would end differently.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from typing import Any, NamedTuple

from hypothesis import strategies as st

from serve_llm.common.types import EngineCoreOutput, EngineCoreRequest, FinishReason, Sampling, TokenLogprobs
from serve_llm.engine.scheduler.offload import OffloadManager
from serve_llm.engine.scheduler.output import BlockCopy, RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from serve_llm.engine.scheduler.sequence import KVCacheSpec

FULL = (KVCacheSpec(4, None),)
MIXED = (KVCacheSpec(4, None), KVCacheSpec(8, 6))
MAX_MODEL_LEN = 40  # for random loads


def token_after(ids: list[int]) -> int:
    return zlib.crc32(array("q", ids).tobytes()) % 50


def forced_after(ids: list[int]) -> list[int]:
    """Return the ids that a request's grammar forces after these: none to five, which end no text."""
    return [50 + number for number in range(max(0, token_after([*ids, 1]) % 9 - 3))]


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), token_id, [], [])


def expected_output(request: EngineCoreRequest) -> tuple[list[int], FinishReason]:
    """Return the ids of a request computed alone, one id at a time."""
    ids = list(request.prompt_ids)
    forced: list[int] = []
    while True:
        output = ids[len(request.prompt_ids) :]
        if output and output[-1] in request.sampling.stop_token_ids:
            return output, FinishReason.STOP
        if len(output) >= request.sampling.max_tokens or len(ids) >= MAX_MODEL_LEN:
            return output, FinishReason.LENGTH
        if forced:
            ids.append(forced.pop(0))
        else:
            ids.append(token_after(ids))
            forced = forced_after(ids) if request.sampling.grammar else []


class FakeWorkers:
    """Indexes, tables and block contents, as workers keep them. A block remembers which prefix was written into it and
    with which RoPE factors."""

    def __init__(self, groups: tuple[KVCacheSpec, ...], long_rope_threshold: int = 1000) -> None:
        self.groups, self.long_rope_threshold = groups, long_rope_threshold
        self.uses_long_rope: dict[int, bool] = {}
        self.sampling: dict[int, Sampling] = {}
        self.ids: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}  # sampled, but not yet confirmed by the scheduler
        self.tables: dict[int, list[list[int]]] = {}
        self.slots: dict[tuple[int, int, int], tuple[bool, list[int]]] = {}
        # (group, block, offset) -> whether the long RoPE factors were used, and the ids up to that point
        self.adapters: dict[int, str] = {}  # slot -> digest
        self.used_adapters: dict[int, tuple[int, str]] = {}  # by request index: slot and digest
        self.host: dict[int, dict[tuple[int, int], Any]] = {}  # slot -> content of a block, by (group, offset)

    def _copy(self, copy: BlockCopy) -> None:
        places = [(index, offset) for index, group in enumerate(self.groups) for offset in range(group.block_size)]
        if copy.to_device:
            for index, offset in places:
                self.slots[index, copy.block, offset] = self.host[copy.slot].get((index, offset))
        else:
            self.host[copy.slot] = {place: self.slots.get((place[0], copy.block, place[1])) for place in places}

    def execute(self, batch: SchedulerOutput) -> list[RunnerOutput]:
        for copy in batch.copies:
            self._copy(copy)
        for new in batch.new_requests:
            self.used_adapters.pop(new.req_index, None)
            if new.adapter is not None and new.adapter_slot is not None:
                self.adapters[new.adapter_slot] = new.adapter.digest
                self.used_adapters[new.req_index] = new.adapter_slot, new.adapter.digest
            self.ids[new.req_index], self.held[new.req_index] = list(new.token_ids), []
            self.tables[new.req_index] = [[] for _ in self.groups]
            self.uses_long_rope[new.req_index] = new.uses_long_rope
            self.sampling[new.req_index] = new.sampling
        results = []
        for chunk in batch.scheduled:
            if chunk.req_index in self.used_adapters:
                slot, digest = self.used_adapters[chunk.req_index]
                assert self.adapters[slot] == digest, "another adapter"
            end, held = chunk.start + chunk.count, self.held[chunk.req_index]
            assert chunk.new_token_ids == held[: len(chunk.new_token_ids)], "another id than the one that was sampled"
            self.ids[chunk.req_index] += chunk.new_token_ids
            del held[: len(chunk.new_token_ids)]
            ids, uses_long_rope = self.ids[chunk.req_index] + held, self.uses_long_rope[chunk.req_index]
            assert not (held and chunk.draft_ids), "drafts after ids that the scheduler does not know"
            ids += chunk.draft_ids
            new_blocks = chunk.new_blocks or [[] for _ in self.groups]
            for index, (group, blocks) in enumerate(zip(self.groups, new_blocks, strict=True)):
                table = self.tables[chunk.req_index][index]
                table.extend(blocks)
                for position in range(chunk.start, end):
                    block, offset = table[position // group.block_size], position % group.block_size
                    self.slots[index, block, offset] = uses_long_rope, ids[: position + 1]
                oldest = 0 if group.window is None else max(0, chunk.start - group.window + 1)
                for position in range(oldest, end):
                    block, offset = table[position // group.block_size], position % group.block_size
                    assert self.slots[index, block, offset] == (uses_long_rope, ids[: position + 1]), (
                        "another prefix's keys"
                    )
            result = RunnerOutput()
            if chunk.logprobs_start is not None:
                next_ids = self.ids[chunk.req_index][chunk.logprobs_start + 1 : end + 1]
                result.known_logprobs = tuple(logprobs_of(token_id) for token_id in next_ids)
            if chunk.sample:
                assert end == len(ids) and uses_long_rope == (end > self.long_rope_threshold)
                sampling = self.sampling[chunk.req_index]
                known = len(ids) - len(chunk.draft_ids)
                result.token_id = token_after(ids[:known])
                while known < len(ids) and ids[known] == result.token_id:
                    result.accepted_ids += (result.token_id,)
                    if sampling.logprobs is not None:
                        result.known_logprobs += (logprobs_of(result.token_id),)
                    known += 1
                    result.token_id = token_after(ids[:known])
                if sampling.logprobs is not None:
                    result.logprobs = logprobs_of(result.token_id)
                if sampling.grammar:
                    result.forced_ids = tuple(forced_after([*ids, result.token_id]))
                held += [*result.accepted_ids, result.token_id, *result.forced_ids]
            results.append(result)
        return results


def drive(scheduler, workers, arrivals, budget, depth, ahead=False, offload=None) -> dict[int, list[EngineCoreOutput]]:
    """Run the scheduler to the end. offload: its `OffloadManager`, if it has one. Batches are executed as late as
    possible."""
    got: dict[int, list[EngineCoreOutput]] = {}
    under_way: list[SchedulerOutput] = []
    doomed: list[int] = []
    step = 0
    while arrivals or scheduler.has_work:
        for request, abort in arrivals.pop(step, []):
            assert scheduler.add(request, float(step)) is None
            got[request.id] = []
            if abort:
                doomed.append(request.id)
        while len(under_way) < depth:
            running = scheduler.stats().num_running
            if offload is not None:
                offload.exchange()
            batch = scheduler.schedule(budget, float(step), 1 if ahead else depth)
            assert batch.num_tokens <= budget
            indices = {chunk.req_index for chunk in batch.scheduled}
            if not ahead:
                in_flight = {chunk.req_index for other in under_way for chunk in other.scheduled}
                admitted = {new.req_index for new in batch.new_requests}
                assert not indices & in_flight, "in two batches"
                assert len(indices - admitted) <= -(-running // depth), "more than its share"
            scheduler.check_integrity()
            if not batch.scheduled:
                break
            under_way.append(batch)
        if doomed and step % 3 == 0:
            scheduler.abort(doomed.pop())
            scheduler.check_integrity()
        if under_way:
            batch = under_way.pop(0)
            for output in scheduler.update_from_output(batch, workers.execute(batch)):
                got[output.id].append(output)
            scheduler.check_integrity()
        step += 1
        assert step < 10_000, "no progress"
    return got


class Arrival(NamedTuple):
    request: EngineCoreRequest
    step: int
    is_aborted: bool


class Load(NamedTuple):
    """The resources of a scheduler in a test of random loads."""

    groups: tuple[KVCacheSpec, ...]
    budget: int  # tokens
    rows: int
    depth: int  # batches in flight
    spare: int  # blocks beyond the smallest pool
    caching: bool  # prefix caching
    ahead: bool  # whether a sequence may be in several batches
    long_rope_threshold: int  # tokens of the longest sequence that uses the short RoPE factors

    def build_scheduler(self, **options: Any) -> Scheduler:
        smallest = 10 + (5 + self.spare if len(self.groups) == 2 else 0)
        return Scheduler(
            self.groups,
            smallest + self.spare,
            max_num_seqs=self.rows,
            max_model_len=MAX_MODEL_LEN,
            max_chunk=self.budget,
            prefix_caching=self.caching,
            async_scheduling=self.ahead,
            long_rope_threshold=self.long_rope_threshold,
            **options,
        )

    def run(
        self,
        scheduler: Scheduler,
        arrivals: Iterable[Arrival],
        workers: FakeWorkers | None = None,
        offload: OffloadManager | None = None,
    ) -> None:
        """Run the load. Asserts that each request that was not aborted ends as if it had run alone."""
        by_step: dict[int, list[tuple[EngineCoreRequest, bool]]] = {}
        wanted: list[EngineCoreRequest] = []
        for request, step, is_aborted in arrivals:
            by_step.setdefault(step, []).append((request, is_aborted))
            if not is_aborted:
                wanted.append(request)
        workers = workers or FakeWorkers(self.groups, self.long_rope_threshold)
        got = drive(scheduler, workers, by_step, self.budget, self.depth, self.ahead, offload)
        for request in wanted:
            outputs = got[request.id]
            ids, reason = expected_output(request)
            assert [token_id for output in outputs for token_id in output.token_ids] == ids
            assert [output.finish_reason for output in outputs if output.finish_reason] == [reason]
            assert outputs[-1].stop_id == (ids[-1] if reason is FinishReason.STOP else None)
            if request.sampling.logprobs is not None:
                assert [one for output in outputs for one in output.logprobs or ()] == [logprobs_of(i) for i in ids]


loads = st.builds(
    Load,
    st.sampled_from([FULL, MIXED]),
    st.integers(1, 40),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 20),
    st.booleans(),
    st.booleans(),
    st.sampled_from([1000, 6, 15]),
)
