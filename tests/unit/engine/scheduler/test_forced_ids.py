"""Ids that a grammar demands, under random loads: as many requests end alike, whatever is computed when."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import FinishReason, Request, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from support.scheduling import FULL, MIXED, FakeWorkers, drive, forced_after, logprobs_of, token_after

MAX_MODEL_LEN = 40


def expected_output(request: Request) -> tuple[list[int], FinishReason]:
    """The ids of a request whose forced ids are appended one at a time."""
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


requests = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 20),
    st.sampled_from(["", "a grammar", "a grammar"]),
    st.sampled_from([None, 1]),
    st.integers(0, 12),
    st.booleans(),
)


@settings(max_examples=150)
@given(
    st.lists(requests, min_size=1, max_size=12),
    st.sampled_from([FULL, MIXED]),
    st.integers(1, 40),  # token budget
    st.integers(1, 4),  # rows
    st.integers(1, 3),  # batches under way
    st.integers(0, 20),  # blocks beyond the smallest pool
    st.booleans(),  # prefix caching
    st.booleans(),  # whether a sequence may be in several batches
    st.sampled_from([1000, 6, 15]),  # tokens of the longest sequence that uses the short RoPE factors
)
def test_random_loads(specs, groups, budget, rows, depth, spare, caching, ahead, long_rope_threshold) -> None:
    smallest = 10 + (5 + spare if len(groups) == 2 else 0)
    scheduler = Scheduler(
        groups,
        smallest + spare,
        max_num_seqs=rows,
        max_model_len=MAX_MODEL_LEN,
        max_chunk=budget,
        prefix_caching=caching,
        async_scheduling=ahead,
        long_rope_threshold=long_rope_threshold,
    )
    arrivals: dict[int, list[tuple[Request, bool]]] = {}
    wanted: dict[int, Request] = {}
    for number, (prompt, max_tokens, grammar, logprobs, step, abort) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,), grammar=grammar, logprobs=logprobs)
        request = Request(id=number, prompt_ids=prompt, sampling=sampling)
        arrivals.setdefault(step, []).append((request, abort))
        if not abort:
            wanted[number] = request
    got = drive(scheduler, FakeWorkers(groups, long_rope_threshold), arrivals, budget, depth, ahead)
    for number, request in wanted.items():
        ids, reason = expected_output(request)
        assert [i for o in got[number] for i in o.token_ids] == ids
        assert [o.finish_reason for o in got[number] if o.finish_reason] == [reason]
        assert got[number][-1].stop_id == (ids[-1] if reason is FinishReason.STOP else None)
        if request.sampling.logprobs is not None:
            assert [entry for o in got[number] for entry in o.logprobs or ()] == [logprobs_of(i) for i in ids]


def test_forced_ids_of_a_long_prompt_are_no_prompt() -> None:
    """They hold up no other long prompt, and share a step with it."""
    scheduler = Scheduler(FULL, 100, max_num_seqs=4, max_model_len=64, max_chunk=8, prefix_caching=False)
    sampling = Sampling(max_tokens=30, seed=0, grammar="a grammar")
    scheduler.add(Request(id=1, prompt_ids=[1] * 20, sampling=sampling), 0.0)
    for _ in range(3):
        batch = scheduler.schedule(8, 0.0)
        token_id = 3 if batch.scheduled[0].sample else None
        forced = [] if token_id is None else [4, 5, 6]
        (output,) = scheduler.update_from_output(batch, [RunnerOutput(token_id, forced_ids=forced)]) or (None,)
    assert output is not None and output.token_ids == [3, 4, 5, 6]
    scheduler.add(Request(id=2, prompt_ids=[2] * 20, sampling=sampling), 0.0)
    counts = {chunk.start: chunk.count for chunk in scheduler.schedule(8, 0.0).scheduled}
    assert counts == {20: 4, 0: 4}


def test_known_ids_go_out_with_their_logprobs() -> None:
    scheduler = Scheduler(FULL, 100, max_num_seqs=4, max_model_len=64, max_chunk=64, prefix_caching=True)
    sampling = Sampling(max_tokens=30, seed=0, grammar="a grammar", logprobs=0)
    scheduler.add(Request(id=1, prompt_ids=[1, 2], sampling=sampling), 0.0)
    first = scheduler.schedule(8, 0.0)
    result = RunnerOutput(3, logprobs=logprobs_of(3), forced_ids=[4, 5], ends_text=True)
    (output,) = scheduler.update_from_output(first, [result])
    assert output.token_ids == [3] and output.logprobs == [logprobs_of(3)] and output.finish_reason is None
    second = scheduler.schedule(8, 0.0)
    (chunk,) = second.scheduled
    assert (chunk.start, chunk.sample, chunk.logprobs_start) == (2, False, 2)
    (output,) = scheduler.update_from_output(second, [RunnerOutput(known_logprobs=[logprobs_of(4), logprobs_of(5)])])
    assert output.token_ids == [4, 5] and output.logprobs == [logprobs_of(4), logprobs_of(5)]
    assert output.finish_reason is FinishReason.STOP and output.stop_id is None
    assert not scheduler.has_work
