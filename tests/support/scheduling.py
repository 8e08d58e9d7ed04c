"""Workers for tests of the scheduler, and a loop that drives both.

The workers are played by a function of the ids: a token depends on everything before it, so that a sequence computed
from a wrong prefix, a stale block or a stale id would end differently.
"""

from __future__ import annotations

import zlib
from array import array

from serve_llm.common.types import Output, Sampling, TokenLogprobs
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.sequence import GroupLayout

FULL = (GroupLayout(4, None),)
MIXED = (GroupLayout(4, None), GroupLayout(8, 6))


def token_after(ids: list[int]) -> int:
    return zlib.crc32(array("q", ids).tobytes()) % 50


def forced_after(ids: list[int]) -> list[int]:
    """The ids that a grammar demands after these, if a request has one: none to five, which end no text."""
    return [50 + number for number in range(max(0, token_after([*ids, 1]) % 9 - 3))]


def logprobs_of(token_id: int) -> TokenLogprobs:
    return TokenLogprobs(-float(token_id), token_id, [], [])


class FakeWorkers:
    """Rows, tables and block contents, as workers keep them. A block remembers which prefix was written into it, and
    by which rope."""

    def __init__(self, groups: tuple[GroupLayout, ...], long_rope_threshold: int = 1000) -> None:
        self.groups, self.long_rope_threshold = groups, long_rope_threshold
        self.uses_long_rope: dict[int, bool] = {}
        self.sampling: dict[int, Sampling] = {}
        self.ids: dict[int, list[int]] = {}
        self.held: dict[int, list[int]] = {}  # sampled, and not heard of from the scheduler yet
        self.tables: dict[int, list[list[int]]] = {}
        self.slots: dict[tuple[int, int, int], tuple[bool, list[int]]] = {}
        # (group, block, offset) -> whether by the long RoPE factors, and the ids up to there

    def execute(self, batch: SchedulerOutput) -> list[RunnerOutput]:
        for new in batch.new_requests:
            self.ids[new.req_index], self.held[new.req_index] = list(new.token_ids), []
            self.tables[new.req_index] = [[] for _ in self.groups]
            self.uses_long_rope[new.req_index] = new.uses_long_rope
            self.sampling[new.req_index] = new.sampling
        results = []
        for chunk in batch.scheduled:
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


def drive(scheduler, workers, arrivals, budget, depth, ahead=False) -> dict[int, list[Output]]:
    got: dict[int, list[Output]] = {}
    under_way: list[tuple[SchedulerOutput, list[RunnerOutput]]] = []
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
            batch = scheduler.schedule(budget, float(step), 1 if ahead else depth)
            assert batch.num_tokens <= budget
            indices = {chunk.req_index for chunk in batch.scheduled}
            if not ahead:
                in_flight = {chunk.req_index for other, _ in under_way for chunk in other.scheduled}
                admitted = {new.req_index for new in batch.new_requests}
                assert not indices & in_flight, "in two batches"
                assert len(indices - admitted) <= -(-running // depth), "more than its share"
            scheduler.check_integrity()
            if not batch.scheduled:
                break
            under_way.append((batch, workers.execute(batch)))
        if doomed and step % 3 == 0:
            scheduler.abort(doomed.pop())
            scheduler.check_integrity()
        if under_way:
            for output in scheduler.update_from_output(*under_way.pop(0)):
                got[output.id].append(output)
            scheduler.check_integrity()
        step += 1
        assert step < 10_000, "no progress"
    return got
