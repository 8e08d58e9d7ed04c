"""On which nodes of a cluster the ranks go: pure planning over counts of devices. No Ray, no torch.

A tensor-parallel group talks in every layer, stages only at their borders; so a group stays on one node where that is
possible at all. Same nodes, same plan: nodes are taken in a fixed order, the engine's own first.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from serve_llm.engine.errors import CapacityError
from serve_llm.engine.parallel.layout import Grid


@dataclass(frozen=True)
class Node:
    """A node of the cluster, and its devices of the kind that ranks compute on."""

    id: str
    address: str  # IP
    seen: int
    free: int
    is_driver: bool = False  # the engine runs there


@dataclass(frozen=True)
class Bundle:
    """Of a placement group that was given to us."""

    index: int
    node_id: str
    seen: int
    free: int


def place_ranks(nodes: Sequence[Node], grid: Grid, kind: str, where: str = "Ray cluster") -> list[Node]:
    """The node of each rank. kind: of device, "CPU" or "GPU". where: what the nodes are, for people.

    Groups that no node can hold any more, which are those of the last stages, are spread over as few nodes as possible.
    Raises CapacityError that counts devices per node if too few are free.
    """
    if sum(node.free for node in nodes) < grid.size:
        raise CapacityError(too_few(nodes, grid, kind, where))
    ordered = sorted(nodes, key=_order)
    left = {node.id: node.free for node in ordered}
    places: list[Node] = []
    for _ in range(grid.pipeline):
        whole = next((node for node in ordered if left[node.id] >= grid.tensor), None)
        group = [whole] * grid.tensor if whole else _spread(ordered, left, grid.tensor)
        for node in group:
            left[node.id] -= 1
        places += group
    return places


def _order(node: Node) -> tuple[bool, int, int, str]:
    address = ipaddress.ip_address(node.address)
    return (not node.is_driver, address.version, int(address), node.id)


def _spread(ordered: Sequence[Node], left: dict[str, int], size: int) -> list[Node]:
    """The fullest nodes first, each with all that it has left; in the order of nodes again."""
    taken: dict[str, int] = {}
    for node in sorted(ordered, key=lambda node: -left[node.id]):
        taken[node.id] = min(left[node.id], size - sum(taken.values()))
    return [node for node in ordered for _ in range(taken[node.id])]


def too_few(nodes: Sequence[Node], grid: Grid, kind: str, where: str = "Ray cluster") -> str:
    """Counts and remedies, for people."""
    seen, free = sum(node.seen for node in nodes), sum(node.free for node in nodes)
    each = "; ".join(
        f"{node.address}{' (this node)' if node.is_driver else ''} {node.free} of {node.seen} free"
        for node in sorted(nodes, key=_order)
    )
    remedy = f"make the {where} larger" if seen < grid.size else "end what uses the others"
    return (
        f"{grid.size} ranks need {grid.size} {kind}s, but the {where} has {seen}, of which {free} are free "
        f"({each or 'no nodes'}): {remedy}, or lower --tensor-parallel-size or --pipeline-parallel-size"
    )


def bundles_of(places: Sequence[Node], grid: Grid) -> list[range]:
    """Ranks that belong together: of one stage, on one node."""
    found = []
    for _, members in groupby(range(grid.size), key=lambda rank: (grid.stage(rank), places[rank].id)):
        ranks = list(members)
        found.append(range(ranks[0], ranks[-1] + 1))
    return found


def spread_groups(places: Sequence[Node], grid: Grid) -> list[str]:
    """A warning for each tensor-parallel group that is on several nodes."""
    lines = []
    for stage in range(grid.pipeline):
        addresses = [places[rank].address for rank in grid.tensor_group(grid.rank(stage, 0))]
        ids = {places[rank].id for rank in grid.tensor_group(grid.rank(stage, 0))}
        if len(ids) > 1:
            lines.append(
                f"No node has {grid.tensor} devices for the tensor-parallel group of stage {stage}: it is spread over "
                f"{', '.join(dict.fromkeys(addresses))}, and every layer waits for the network between them"
            )
    return lines


def nodes_within(bundles: Sequence[Bundle], nodes: Sequence[Node]) -> list[Node]:
    """The nodes on which there are bundles, with what these have there."""
    found = []
    for node in nodes:
        here = [bundle for bundle in bundles if bundle.node_id == node.id]
        if here:
            seen, free = sum(bundle.seen for bundle in here), sum(bundle.free for bundle in here)
            found.append(Node(node.id, node.address, seen, free, node.is_driver))
    return found


def ranks_to_bundles(places: Sequence[Node], bundles: Sequence[Bundle]) -> list[int]:
    """The index of each rank's bundle, given nodes from `nodes_within`: per node in the order of the bundles."""
    slots = {
        node.id: [
            bundle.index
            for bundle in sorted(bundles, key=lambda bundle: bundle.index)
            if bundle.node_id == node.id
            for _ in range(bundle.free)
        ]
        for node in places
    }
    return [slots[node.id].pop(0) for node in places]
