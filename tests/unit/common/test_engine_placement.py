"""Which hosts have which ranks of each engine."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.engine_placement import EnginePlacement
from serve_llm.common.options.sources import make_options


def place(engines: int, nodes: int, split: str | None = None, ranks: int = 4) -> EnginePlacement:
    hosts = {"nnodes": nodes, "master_addr": "h:1"} if nodes > 1 else {}
    shape = {"data_parallel_size": engines, "tensor_parallel_size": ranks, "data_parallel_split": split}
    return EnginePlacement.from_options(make_options("demo", **hosts, **shape))


@pytest.mark.parametrize(
    ("engines", "nodes", "split", "expected"),
    [
        (1, 1, None, [{0: range(4)}]),
        (2, 1, None, [{0: range(4)}] * 2),
        (1, 3, None, [{0: range(2), 1: range(2, 3), 2: range(3, 4)}]),
        (3, 2, None, [{0: range(4)}, {0: range(4)}, {1: range(4)}]),
        (2, 3, None, [{0: range(2), 1: range(2, 4)}, {2: range(4)}]),
        (3, 3, "0,2,1", [{1: range(4)}, {1: range(4)}, {2: range(4)}]),
    ],
)
def test_places(engines: int, nodes: int, split: str | None, expected: list[dict[int, range]]) -> None:
    placement = place(engines, nodes, split)
    assert [placement.ranks(engine) for engine in range(engines)] == expected


def test_the_port_of_the_first_engine_with_other_hosts_is_that_of_the_master_address() -> None:
    assert place(1, 1).ports(29500) == {}
    assert place(1, 2).ports(29500) == {0: 29500}
    assert place(5, 2, "2,3").ports(29500) == {2: 29500, 3: 29501, 4: 29502}


def test_engines_that_share_a_host() -> None:
    assert place(3, 1).engines_by_rank(2) == (3, 3, 3, 3)
    assert place(2, 3).engines_by_rank(0) == (1, 1, 1, 1)
    assert place(3, 2).engines_by_rank(2) == (1, 1, 1, 1)
    assert place(3, 2).engines_by_rank(0) == (2, 2, 2, 2)


@given(engines=st.integers(1, 12), nodes=st.integers(1, 12), ranks=st.integers(1, 12))
def test_every_rank_has_one_host_and_every_host_a_rank(engines: int, nodes: int, ranks: int) -> None:
    if ranks < -(-nodes // engines):
        return
    placement = place(engines, nodes, ranks=ranks)
    found = [placement.ranks(engine) for engine in range(engines)]
    assert all([rank for part in hosts.values() for rank in part] == list(range(ranks)) for hosts in found)
    assert sorted({node for hosts in found for node in hosts}) == list(range(nodes))
    if engines >= nodes:
        assert all(len(hosts) == 1 for hosts in found)
        counts = [len(placement.engines(node)) for node in range(nodes)]
        assert max(counts) - min(counts) <= 1
