"""Snapshots of states under random loads: whatever is preempted, evicted, aborted or in flight, a sequence continues
from the state of exactly the tokens before it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import LOWEST_PRIORITY, Adapter, EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput, SchedulerOutput
from serve_llm.engine.scheduler.prompt_lookup import NgramDraft
from serve_llm.engine.scheduler.sequence import KVCacheSpec
from serve_llm.engine.scheduler.speculation import TextSpeculator
from serve_llm.engine.scheduler.state_snapshots import StateSnapshots
from support.scheduling import MAX_MODEL_LEN, Arrival, FakeWorkers, Load, expected_output, loads, token_after
from support.speculation import FreeDrafts

ADAPTERS = (None, Adapter("a", "/a", "digest a"), Adapter("b", "/b", "digest b"))
BASES = ([1, 2] * 15, [1, 2, 1, 2, 1, 2, 1, 2, 1, 3] + [4] * 20)


class State(NamedTuple):
    """What a state of a sequence was computed from."""

    ids: list[int]
    adapter: str
    uses_long_rope: bool


class WorkersWithStates(FakeWorkers):
    """States remember what they were computed from. Drafts are kept beside them until the next step."""

    def __init__(self, groups: tuple[KVCacheSpec, ...], long_rope_threshold: int, num_snapshots: int) -> None:
        super().__init__(groups, long_rope_threshold)
        self.num_snapshots = num_snapshots
        self.states: dict[int, State] = {}
        self.drafts: dict[int, tuple[int, ...]] = {}
        self.snapshots: dict[int, State] = {}

    def execute(self, batch: SchedulerOutput) -> list[RunnerOutput]:
        results = super().execute(batch)
        for new in batch.new_requests:
            adapter = "" if new.adapter is None else new.adapter.digest
            self.states[new.req_index] = State([], adapter, new.uses_long_rope)
            self.drafts[new.req_index] = ()
        for chunk in batch.scheduled:  # of all sequences, before any is computed
            if chunk.restored_snapshot is not None:
                restored = self.snapshots[chunk.restored_snapshot]
                assert restored[1:] == self.states[chunk.req_index][1:], "a state of another adapter or rope"
                self.states[chunk.req_index] = restored
        for chunk in batch.scheduled:
            index = chunk.req_index
            ids = self.ids[index] + self.held[index]
            state = self.states[index]
            accepted = self.drafts[index][: chunk.start - len(state.ids)]
            assert [*state.ids, *accepted] == ids[: chunk.start], "a state of other ids"
            num_known = chunk.count - len(chunk.draft_ids)
            for count, number in chunk.stored_snapshots:
                assert 0 < count <= num_known
                assert 0 <= number < self.num_snapshots
                self.snapshots[number] = state._replace(ids=ids[: chunk.start + count])
            self.states[index] = state._replace(ids=ids[: chunk.start + num_known])
            self.drafts[index] = chunk.draft_ids
        return results


class Guesses:
    """Knows the continuation, and is sometimes wrong."""

    def __init__(self, period: int) -> None:
        """period: one in so many guesses is wrong."""
        self.period = period

    def propose(self, token_ids: Sequence[int], count: int) -> NgramDraft:
        ids = list(token_ids)
        for _ in range(count):
            ids.append(51 if len(ids) % self.period == 0 else token_after(ids))
        return NgramDraft(ids[len(token_ids) :], 16)

    def finish(self, sequence: object) -> None:
        """Do nothing: there is no state."""


requests = st.fixed_dictionaries(
    {
        "parent": st.integers(0, 12),  # the request whose text it continues; above the number of those: a new text
        "cut": st.integers(1, MAX_MODEL_LEN),
        "suffix": st.lists(st.integers(0, 2), max_size=12),
        "max_tokens": st.integers(1, 20),
        "grammar": st.sampled_from(["", "", "a grammar"]),
        "logprobs": st.sampled_from([None, 1]),
        "step": st.integers(0, 40),
        "is_aborted": st.sampled_from([False, False, True]),
        "priority": st.sampled_from([0, 0, 1, LOWEST_PRIORITY]),
        "salt": st.sampled_from(["", "", "", "x"]),
        "adapter": st.sampled_from(ADAPTERS),
    }
)


@settings(max_examples=150)
@given(
    st.lists(requests, min_size=1, max_size=14),
    loads,
    st.integers(0, 5),  # snapshots
    st.integers(1, 12),  # least tokens of a branch
    st.sampled_from([0, 0, 1, 4]),  # drafts per sequence
    st.booleans(),  # adapters
)
def test_random_loads(specs, load: Load, num_snapshots, min_branch_tokens, num_drafts, has_adapters) -> None:
    texts = list(BASES)
    arrivals = []
    for number, spec in enumerate(specs):
        text = texts[spec["parent"] % len(texts)][: spec["cut"]] + spec["suffix"]
        sampling = Sampling(
            max_tokens=spec["max_tokens"],
            seed=0,
            stop_token_ids=(7,),
            grammar="" if num_drafts else spec["grammar"],
            logprobs=spec["logprobs"],
        )
        request = EngineCoreRequest(
            id=number,
            prompt_ids=text[: MAX_MODEL_LEN - 1],
            sampling=sampling,
            priority=spec["priority"],
            cache_salt=spec["salt"],
            adapter=spec["adapter"] if has_adapters else None,
        )
        texts.append(request.prompt_ids + expected_output(request)[0])
        arrivals.append(Arrival(request, spec["step"], spec["is_aborted"]))
    load = load._replace(caching=True)
    speculator = None
    if num_drafts:
        speculator = TextSpeculator(num_drafts, lambda request: Guesses(4), time.monotonic)
        speculator.costs = FreeDrafts()
    scheduler = load.build_scheduler(
        speculator=speculator,
        snapshots=StateSnapshots(load.groups, num_snapshots, min_branch_tokens),
        max_loras=1,
    )
    load.run(scheduler, arrivals, WorkersWithStates(load.groups, load.long_rope_threshold, num_snapshots))
