"""Ids that a grammar forces, under random loads: the same requests end in the same way, in whatever order things are
computed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.common.types import EngineCoreRequest, FinishReason, Sampling
from serve_llm.engine.scheduler.output import RunnerOutput
from serve_llm.engine.scheduler.scheduler import Scheduler
from support.scheduling import FULL, Arrival, Load, loads, logprobs_of

requests = st.tuples(
    st.lists(st.integers(0, 2), min_size=1, max_size=30),
    st.integers(1, 20),
    st.sampled_from(["", "a grammar", "a grammar"]),
    st.sampled_from([None, 1]),
    st.integers(0, 12),
    st.booleans(),
)


@settings(max_examples=150)
@given(st.lists(requests, min_size=1, max_size=12), loads)
def test_random_loads(specs, load: Load) -> None:
    arrivals = []
    for number, (prompt, max_tokens, grammar, logprobs, step, abort) in enumerate(specs):
        sampling = Sampling(max_tokens=max_tokens, seed=0, stop_token_ids=(7,), grammar=grammar, logprobs=logprobs)
        arrivals.append(Arrival(EngineCoreRequest(id=number, prompt_ids=prompt, sampling=sampling), step, abort))
    load.run(load.build_scheduler(), arrivals)


def test_forced_ids_of_a_long_prompt_are_no_prompt() -> None:
    """They do not count as a long prompt: they delay no other long prompt, and share a step with it."""
    scheduler = Scheduler(FULL, 100, max_num_seqs=4, max_model_len=64, max_chunk=8, prefix_caching=False)
    sampling = Sampling(max_tokens=30, seed=0, grammar="a grammar")
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1] * 20, sampling=sampling), 0.0)
    for _ in range(3):
        batch = scheduler.schedule(8, 0.0)
        token_id = 3 if batch.scheduled[0].sample else None
        forced = [] if token_id is None else [4, 5, 6]
        (output,) = scheduler.update_from_output(batch, [RunnerOutput(token_id, forced_ids=forced)]) or (None,)
    assert output is not None and output.token_ids == [3, 4, 5, 6]
    scheduler.add(EngineCoreRequest(id=2, prompt_ids=[2] * 20, sampling=sampling), 0.0)
    counts = {chunk.start: chunk.count for chunk in scheduler.schedule(8, 0.0).scheduled}
    assert counts == {20: 4, 0: 4}


def test_known_ids_go_out_with_their_logprobs() -> None:
    scheduler = Scheduler(FULL, 100, max_num_seqs=4, max_model_len=64, max_chunk=64, prefix_caching=True)
    sampling = Sampling(max_tokens=30, seed=0, grammar="a grammar", logprobs=0)
    scheduler.add(EngineCoreRequest(id=1, prompt_ids=[1, 2], sampling=sampling), 0.0)
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
