"""Prompt lookup: the longest earlier match of a text's end, the latest of several, and its continuation."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.types import EngineCoreRequest, Sampling
from serve_llm.engine.scheduler.ngram_index import MAX_CANDIDATES, hash_end
from serve_llm.engine.scheduler.prompt_lookup import PromptLookup
from serve_llm.engine.scheduler.recent_texts import MAX_GROUPS, MAX_IDS, RecentTextGroups, RecentTexts
from serve_llm.engine.scheduler.sequence import Sequence


def search(ids: list[int], least: int, most: int, count: int) -> list[int]:
    """Search by trying every position."""
    best, best_length = None, least - 1
    for end in range(len(ids) - 1, 0, -1):
        length = 0
        while length < min(most, end) and ids[end - 1 - length] == ids[-1 - length]:
            length += 1
        if length > best_length:
            best, best_length = end, length
    if best is None:
        return []
    text = list(ids)
    for number in range(count):
        text.append(text[best + number])
    return text[len(ids) :]


def propose(lookup: PromptLookup, ids: list[int], count: int) -> list[int]:
    return list(lookup.propose(ids, count).token_ids)


def test_longest_then_latest() -> None:
    ids = [1, 2, 3, 10, 9, 1, 2, 3, 11, 0, 1, 2, 3, 12, 9, 1, 2, 3]
    assert PromptLookup(3, 4).propose(ids, 3) == ([11, 0, 1], 4), "9 1 2 3 has occurred before"
    assert PromptLookup(3, 3).propose(ids, 3) == ([12, 9, 1], 3), "the latest 1 2 3"
    assert PromptLookup(5, 8).propose(ids, 3) == ((), 0)


def test_an_occurrence_is_followed_while_the_text_goes_on_so() -> None:
    lookup = PromptLookup(2, 4)
    ids = [1, 2, 3, 4, 5, 6, 9, 3, 4, 7, 8, 9, 1, 2]
    assert lookup.propose(ids, 2) == ([3, 4], 2)
    ids += [3, 4]
    assert lookup.propose(ids, 2) == ([5, 6], 4), "not the latest 3 4"
    ids += [7]
    assert lookup.propose(ids, 2) == ([8, 9], 3), "the text goes on otherwise: another is found"
    ids += [0]
    assert lookup.propose(ids, 2) == ((), 0)


def test_a_text_that_repeats_itself_goes_on_so() -> None:
    assert propose(PromptLookup(3, 8), [5, 6, 7, 7, 7, 7], 4) == [7, 7, 7, 7]
    assert propose(PromptLookup(2, 8), [1, 2, 1, 2, 1], 5) == [2, 1, 2, 1, 2]


def test_short_texts_have_no_drafts() -> None:
    for length in range(4):
        assert propose(PromptLookup(3, 8), [1] * length, 4) == []
    assert propose(PromptLookup(3, 8), [1] * 4, 4) == [1, 1, 1, 1]


@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=MAX_CANDIDATES),
    st.lists(st.lists(st.integers(0, 3), max_size=3), max_size=8),
    st.integers(1, 4),
    st.integers(0, 4),
    st.integers(1, 6),
)
def test_as_a_search_of_all_positions(
    prompt: list[int], pieces: list[list[int]], least: int, more: int, count: int
) -> None:
    lookup = PromptLookup(least, least + more)
    ids = list(prompt)
    guessed: list[int] = []
    for piece in [[], *pieces]:
        ids += piece
        found = propose(lookup, ids, 12)
        if guessed[: len(piece)] == piece and guessed:
            assert found[: 12 - len(piece)] == guessed[len(piece) :], "the guess was right: it goes on"
        elif len(ids) <= MAX_CANDIDATES:  # few enough occurrences that all are examined
            assert found[:count] == search(ids, least, least + more, count)
        else:
            assert all(draft in ids for draft in found)
        guessed = found


def test_memory_is_bounded_and_so_is_the_work_of_a_step() -> None:
    rng = random.Random(3)
    lookup = PromptLookup(3, 8)
    ids = [rng.randrange(50_000) for _ in range(200_000)]
    ids += ids[1000:1010]
    assert propose(lookup, ids, 4) == ids[1010:1014]
    assert len(lookup._index._latest) == 1 << 16 and len(lookup._index._previous) < len(ids)
    same = PromptLookup(3, 8)
    assert propose(same, [1] * 10_000, 2) == [1, 1]


def make_request(
    number: int, prompt: list[int], output: list[int], tenant: int = 0, salt: str = ""
) -> EngineCoreRequest:
    sampling = Sampling(max_tokens=9, seed=0)
    return EngineCoreRequest(
        id=number, prompt_ids=prompt, output_ids=output, sampling=sampling, tenant=tenant, cache_salt=salt
    )


def test_recent_outputs_of_the_same_key_and_salt() -> None:
    groups = RecentTextGroups(2, 4)
    first = make_request(1, [1, 2, 3], [4, 5, 6, 7])
    PromptLookup(2, 4, groups.find(first)).finish(Sequence(first, (), 0, 0.0))
    for tenant, salt, expected in ((0, "", ([6, 7], 2)), (1, "", ((), 0)), (0, "a", ((), 0))):
        recent = groups.find(make_request(2, [], [], tenant, salt))
        assert PromptLookup(2, 4, recent).propose([9, 4, 5], 3) == expected
    recent = groups.find(first)
    assert propose(PromptLookup(2, 4, recent), [9, 6, 7], 3) == [], "nothing follows the end of a text"
    assert propose(PromptLookup(2, 4, recent), [9, 2, 3], 3) == [], "prompts are not kept"
    assert propose(PromptLookup(2, 4, recent), [4, 5, 8, 4, 5], 1) == [8], "the text itself comes first"
    assert propose(PromptLookup(2, 4, recent), [5, 6, 8, 4, 5, 6], 1) == [7], "unless the other occurrence is longer"


def test_recent_outputs_are_bounded() -> None:
    recent = RecentTexts(2, 4)
    for number in range(100):
        recent.add(list(range(number, number + 1000)))
        assert len(recent._ids) <= MAX_IDS
        end = [number + 900, number + 901]
        assert recent.find(end, hash_end(end, 2), 2, 1) == ([number + 902, number + 903], 2)
    recent.add(list(range(10**6, 10**6 + 10 * MAX_IDS)))
    assert len(recent._ids) <= MAX_IDS
    groups = RecentTextGroups(2, 4)
    for tenant in range(2 * MAX_GROUPS):
        groups.find(make_request(1, [], [], tenant))
    assert len(groups._groups) == MAX_GROUPS
