"""What the draft model keeps for requests, and what it recomputes."""

from __future__ import annotations

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.draft_model.draft_sequences import DraftSequence, DraftSequences
from serve_llm.engine.scheduler.sequence import KVCacheSpec, Sequence

GROUPS = (KVCacheSpec(block_size=4, window=None),)


def make_target(number: int, num_prompt: int = 10, grammar: str = "") -> Sequence:
    sampling = Sampling(max_tokens=50, seed=1, grammar=grammar, logprobs=2)
    return Sequence(EngineCoreRequest(id=number, prompt_ids=list(range(num_prompt)), sampling=sampling), GROUPS, 0, 0.0)


def compute(sequences: DraftSequences, draft: DraftSequence, guesses: list[int]) -> None:
    """Compute all ids except the last draft, as the draft model does."""
    sequence = draft.sequence
    count = sequence.num_unscheduled + len(guesses) - 1
    assert sequences.reserve(draft, count, {sequence.request.id})
    if draft.is_new:
        sequence.describe()
        draft.is_new = False
    sequence.schedule(sequence.num_unscheduled)
    sequence.num_pending_ids = 0
    sequence.token_ids += guesses
    sequence.num_computed = sequence.num_scheduled = len(sequence.token_ids) - 1
    sequence.num_sent_ids = sequence.num_computed
    assert draft.guesses == guesses


def test_right_guesses_stay_computed_and_wrong_ones_are_replaced() -> None:
    sequences = DraftSequences(GROUPS, 20, 4)
    target = make_target(1)
    target.token_ids.append(50)
    draft = sequences.follow(target)
    assert draft is not None
    compute(sequences, draft, [51, 52, 99])
    target.token_ids += [51, 52, 53]
    assert sequences.follow(target) is draft
    assert draft.sequence.token_ids == target.token_ids and draft.guesses == []
    assert (draft.sequence.num_computed, draft.sequence.num_unscheduled, draft.num_stale) == (13, 1, 0)
    compute(sequences, draft, [60, 61])
    target.token_ids += [70, 71]
    sequences.follow(target)
    assert (draft.sequence.num_computed, draft.sequence.num_unscheduled, draft.num_stale) == (14, 2, 14)
    sequences.check_integrity()
    sequences.forget(1)
    sequences.check_integrity()


def test_a_prompt_is_computed_once_for_all_its_choices() -> None:
    sequences = DraftSequences(GROUPS, 20, 4)
    first = make_target(1)
    draft = sequences.follow(first)
    assert draft is not None and draft.sequence.num_computed == 0
    compute(sequences, draft, [50])
    first.token_ids.append(50)
    sequences.follow(first)
    second = sequences.follow(make_target(2, grammar="start: /a/"))
    assert second is not None and second.sequence.num_computed == 8
    assert second.sequence.sampling.grammar == "" and second.sequence.sampling.logprobs is None
    sequences.check_integrity()


def test_the_request_that_was_followed_longest_ago_makes_room() -> None:
    sequences = DraftSequences(GROUPS, 6, 2)
    targets = [make_target(number, num_prompt=8) for number in range(3)]
    for target in targets[:2]:
        draft = sequences.follow(target)
        assert draft is not None and sequences.reserve(draft, 12, {target.request.id})
    assert sequences.follow(targets[2]) is None
    assert sequences.make_room({1}) and not sequences.make_room({1})
    draft = sequences.follow(targets[2])
    assert draft is not None and not sequences.reserve(draft, 16, {1, 2})
    assert sequences.reserve(draft, 16, {2})
    sequences.check_integrity()
