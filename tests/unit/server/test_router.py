"""Routing: affinity to cached prefixes, bounded memory of them, no overloaded engine."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_llm.server.engines.router import OVERLOAD_FACTOR, OVERLOAD_SLACK, REQUEST_TOKENS, Router

SIZE = 4  # tokens per block
LONG = list(range(100 * SIZE))

# One of a few prefixes of some length, and a mostly unique tail.
PROMPTS = st.builds(
    lambda prefix, length, tail: [prefix] * length + tail,
    st.integers(0, 3),
    st.integers(0, 40),
    st.lists(st.integers(4, 6), max_size=5),
)
# Events: a prompt with its number of choices, the first output of an open request, or its end.
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), PROMPTS, st.integers(1, 3)),
        st.tuples(st.sampled_from(["began", "ended"]), st.integers(0, 1000), st.just(0)),
    ),
    max_size=120,
)


@settings(max_examples=200)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=4), EVENTS)
def test_loads_balance_memory_is_bounded_and_no_engine_is_overloaded(capacities: list[int], events: list) -> None:
    balancer = Router(capacities, SIZE)
    open_at: dict[int, int] = {}
    next_id = 0
    for kind, what, choices in events:
        if kind == "place":
            before = [load.num_open for load in balancer.loads]
            ids = range(next_id, next_id := next_id + choices)
            engine = balancer.place(ids, what)
            assert before[engine] <= OVERLOAD_FACTOR * min(before) + OVERLOAD_SLACK
            open_at |= dict.fromkeys(ids, engine)
        elif open_at:
            request_id = list(open_at)[what % len(open_at)]
            if kind == "began":
                balancer.mark_computed(request_id)
            else:
                assert balancer.release(request_id) == open_at.pop(request_id)
                assert balancer.release(request_id) is None
        for engine, load in enumerate(balancer.loads):
            assert load.num_open == list(open_at.values()).count(engine)
            assert load.waiting_tokens >= 0
            assert len(balancer._sent[engine]) <= capacities[engine]
    for request_id in open_at:
        balancer.release(request_id)
    assert all(load.tokens == 0 for load in balancer.loads)


@given(st.integers(2, 5), st.lists(PROMPTS, min_size=1, max_size=30), PROMPTS)
def test_on_idle_engines_a_prompt_follows_its_longest_prefix(
    num_engines: int, sent: list[list[int]], new: list[int]
) -> None:
    balancer = Router([1000] * num_engines, SIZE)
    known: dict[int, list[list[int]]] = {engine: [] for engine in range(num_engines)}
    for number, prompt in enumerate([*sent, new]):
        shared = [max((common(prompt, other) for other in known[one]), default=0) for one in range(num_engines)]
        engine = balancer.place([number], prompt)
        assert shared[engine] == max(shared)
        known[engine].append(prompt)
        balancer.release(number)


def common(one: list[int], other: list[int]) -> int:
    """Return the number of leading full blocks in common."""
    equal = 0
    while equal < min(len(one), len(other)) and one[equal] == other[equal]:
        equal += 1
    return equal // SIZE


def test_ties_go_to_the_least_loaded_then_round_robin() -> None:
    balancer = Router([100] * 3, SIZE)
    assert [balancer.place([number], [number]) for number in range(6)] == [0, 1, 2, 0, 1, 2]
    balancer.release(4)
    assert balancer.place([6], [6]) == 1


def test_a_cached_prefix_outweighs_as_much_load_as_its_tokens() -> None:
    balancer = Router([1000] * 2, SIZE)
    home = balancer.place([0], LONG)
    balancer.mark_computed(0)
    assert balancer.place([1], LONG) == home, "400 tokens saved, one open request more"
    balancer.mark_computed(1)
    for number in range(2, 2 + len(LONG) // REQUEST_TOKENS):
        balancer.place([number], LONG)
        balancer.mark_computed(number)
    assert balancer.place([99], LONG) != home, "the others wait for their places in every step"
    short = Router([1000] * 2, SIZE)
    assert short.place([0], LONG[: 2 * SIZE]) != short.place([1], LONG[: 2 * SIZE])


def test_prompt_tokens_count_until_the_first_output() -> None:
    balancer = Router([1000] * 2, SIZE)
    assert balancer.place([0], [7] * 1000) == 0
    assert [balancer.place([number], [number]) for number in range(1, 8)] == [1] * 7
    balancer.mark_computed(0)
    assert balancer.loads[0].tokens == REQUEST_TOKENS
    assert balancer.place([8], [8]) == 0


def test_prompts_with_different_salts_share_no_prefix() -> None:
    balancer = Router([1000] * 2, SIZE)
    home = balancer.place([0], LONG, "a")
    balancer.release(0)
    assert balancer.place([1], LONG, "b") != home
    balancer.release(1)
    assert balancer.place([2], LONG, "a") == home


def test_least_recently_used_prefixes_are_evicted_from_their_end() -> None:
    balancer = Router([10, 10], SIZE)
    first, second = [1] * 10 * SIZE, [2] * 5 * SIZE
    home = balancer.place([0], first)
    balancer.release(0)
    balancer.place([1], [3])  # round-robin: the other engine
    balancer.release(1)
    assert balancer.place([2], second) == home
    keys = balancer._keys(first, "")
    assert balancer._num_cached(home, keys) == 5 * SIZE, "half of the first prompt had to go: its second half"
    assert balancer._num_cached(home, balancer._keys(second, "")) == 5 * SIZE


def test_without_prefix_caching_only_load_counts() -> None:
    balancer = Router([0, 0], SIZE)
    assert [balancer.place([number], LONG) for number in range(4)] == [0, 1, 0, 1]
