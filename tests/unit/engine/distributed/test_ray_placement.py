"""Placement of ranks on a Ray cluster."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_llm.common.errors import CapacityError
from serve_llm.common.splits import name_numbers
from serve_llm.engine.distributed.ray.placement import (
    Bundle,
    RayNode,
    assign_bundles,
    check_engines,
    describe_spread_groups,
    place_ranks,
    plan_bundles,
    select_nodes,
    wait_for_devices,
)
from serve_llm.engine.parallel.layout import ParallelLayout


def cluster(*free: int, driver: int | None = 0) -> list[RayNode]:
    return [RayNode(f"id{i}", f"10.0.0.{i + 1}", count, count, i == driver) for i, count in enumerate(free)]


def placed(nodes: list[RayNode], tensor: int, pipeline: int = 1) -> str:
    return "".join(node.id.removeprefix("id") for node in place_ranks(nodes, ParallelLayout(tensor, pipeline), "GPU"))


@pytest.mark.parametrize(
    ("nodes", "tensor", "pipeline", "expected"),
    [
        (cluster(2, 2), 2, 2, "0011"),
        (cluster(2, 2, driver=1), 2, 2, "1100"),
        (cluster(0, 2, 2), 2, 2, "1122"),  # a head node without devices
        (cluster(4, 4), 2, 2, "0000"),  # the second stage stays near the first
        (cluster(1, 4), 2, 2, "1111"),
        (cluster(3, 4), 4, 1, "1111"),
        (cluster(8, 8), 8, 2, "0000000011111111"),
        (cluster(2, 4), 2, 2, "1111"),  # as a whole on another node rather than in two parts
        (cluster(1, 1), 1, 2, "01"),
        (cluster(2, 2), 4, 1, "0011"),  # no node can hold the group
        (cluster(1, 2, 1), 4, 1, "0112"),
        (cluster(1, 3, 1), 4, 1, "0111"),  # over as few nodes as possible
        (cluster(3, 3), 2, 3, "001101"),  # two whole groups, and one on the rest
    ],
)
def test_places(nodes: list[RayNode], tensor: int, pipeline: int, expected: str) -> None:
    assert placed(nodes, tensor, pipeline) == expected


def test_addresses_are_ordered_as_numbers() -> None:
    nodes = [RayNode("a", "10.0.0.10", 1, 1), RayNode("b", "10.0.0.9", 1, 1), RayNode("c", "fd00::1", 1, 1)]
    assert [node.id for node in place_ranks(nodes, ParallelLayout(1, 3), "CPU")] == ["b", "a", "c"]


def test_too_few_devices_are_counted_per_node() -> None:
    nodes = [RayNode("a", "10.0.0.2", 2, 0), RayNode("b", "10.0.0.1", 2, 1, is_driver=True)]
    with pytest.raises(CapacityError) as raised:
        place_ranks(nodes, ParallelLayout(2, 1), "GPU")
    assert str(raised.value) == (
        "2 ranks need 2 GPUs, but the Ray cluster has 4, of which 1 are free (10.0.0.1 (this node) 1 of 2 free; "
        "10.0.0.2 0 of 2 free): stop what uses the others, or lower --tensor-parallel-size or --pipeline-parallel-size"
    )
    with pytest.raises(
        CapacityError, match=r"5 ranks need 5 CPUs, but the Ray cluster has 0.*no nodes.*make the Ray cluster larger"
    ):
        place_ranks([], ParallelLayout(5, 1), "CPU")


def test_too_few_devices_for_all_engines() -> None:
    check_engines(cluster(4, 2), ParallelLayout(2, 1), 3, "CPU")
    with pytest.raises(CapacityError) as raised:
        check_engines(cluster(4, 3), ParallelLayout(2, 1), 4, "CPU")
    assert str(raised.value) == (
        "4 engines with 2 ranks each need 8 CPUs, but the Ray cluster has 7: make it larger, or lower "
        "--data-parallel-size to 3"
    )


def test_a_spread_group_is_said() -> None:
    grid = ParallelLayout(2, 3)
    places = place_ranks(cluster(3, 3), grid, "GPU")
    (line,) = describe_spread_groups(places, grid)
    assert "group of stage 2" in line and "10.0.0.1, 10.0.0.2" in line
    assert plan_bundles(places, grid) == [range(2), range(2, 4), range(4, 5), range(5, 6)]


GRIDS = st.builds(ParallelLayout, st.integers(1, 5), st.integers(1, 4))
CLUSTERS = st.lists(st.integers(0, 6), min_size=1, max_size=6).flatmap(
    lambda free: st.builds(lambda driver: cluster(*free, driver=driver), st.integers(0, len(free) - 1))
)


@given(CLUSTERS, GRIDS, st.randoms())
def test_every_plan_is_sound(nodes: list[RayNode], grid: ParallelLayout, shuffler: random.Random) -> None:
    if sum(node.free for node in nodes) < grid.size:
        with pytest.raises(CapacityError):
            place_ranks(nodes, grid, "CPU")
        return
    places = place_ranks(nodes, grid, "CPU")
    assert len(places) == grid.size
    assert all(places.count(node) <= node.free for node in nodes)
    shuffled = list(nodes)
    shuffler.shuffle(shuffled)
    assert place_ranks(shuffled, grid, "CPU") == places
    # as many whole groups as the cluster can hold
    whole = grid.pp_size - len(describe_spread_groups(places, grid))
    assert whole == min(grid.pp_size, sum(node.free // grid.tp_size for node in nodes))
    driver = next(node for node in nodes if node.is_driver)
    is_whole = any(node.free >= grid.size for node in nodes)
    assert not is_whole or len(set(places)) == 1
    near = grid.size if is_whole else grid.tp_size
    assert driver.free < near or places[:near] == [driver] * near
    bundles = plan_bundles(places, grid)
    assert [rank for bundle in bundles for rank in bundle] == list(range(grid.size))
    for ranks in bundles:
        assert len({places[rank].id for rank in ranks}) == len({grid.pp_rank(rank) for rank in ranks}) == 1


@given(CLUSTERS, GRIDS, st.data())
def test_given_bundles_are_filled_and_never_overfilled(
    nodes: list[RayNode], grid: ParallelLayout, data: st.DataObject
) -> None:
    spots = data.draw(st.lists(st.tuples(st.sampled_from(nodes), st.integers(0, 3)), max_size=20))
    bundles = [Bundle(index, node.id, free + index % 2, free) for index, (node, free) in enumerate(spots)]
    within = select_nodes(bundles, nodes)
    if sum(bundle.free for bundle in bundles) < grid.size:
        with pytest.raises(CapacityError, match="the Ray placement group has"):
            place_ranks(within, grid, "CPU", "Ray placement group")
        return
    places = place_ranks(within, grid, "CPU")
    chosen = assign_bundles(places, bundles)
    by_index = {bundle.index: bundle for bundle in bundles}
    assert [by_index[index].node_id for index in chosen] == [node.id for node in places]
    assert all(chosen.count(index) <= by_index[index].free for index in chosen)


def test_ranks_are_named_by_their_ends() -> None:
    bundles = plan_bundles(place_ranks(cluster(2, 1), ParallelLayout(3, 1), "GPU"), ParallelLayout(3, 1))
    assert [name_numbers("rank", ranks) for ranks in bundles] == ["ranks 0-1", "rank 2"]


def test_a_replacement_waits_for_lost_nodes_for_a_while() -> None:
    looks = [cluster(2), cluster(2), cluster(2, 2), cluster(2, 2)]
    wait_for_devices(lambda: looks.pop(0), 4, seconds=3600.0, poll_seconds=0.0)
    assert len(looks) == 1, "it returns when the node is back"
    wait_for_devices(lambda: looks.pop(0), 8, seconds=0.0, poll_seconds=0.0)
    assert looks == [], "the time is up"
