"""Plans on which nodes of a cluster ranks run, from counts of devices. No Ray, no torch.

A tensor-parallel group communicates in every layer, pipeline stages only at their borders; so an engine stays on one
node if possible, and otherwise at least each group. The plan is deterministic: nodes are taken in a fixed order, the
engine's own first.
"""

from __future__ import annotations

import ipaddress
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from serve_llm.common.errors import CapacityError
from serve_llm.engine.parallel.layout import ParallelLayout

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RayNode:
    """A node of the cluster. seen, free: its total and unused devices of the kind that ranks compute on."""

    id: str
    address: str  # IP
    seen: int
    free: int
    is_driver: bool = False  # whether the engine runs there


@dataclass(frozen=True)
class Bundle:
    """A bundle of a placement group that the server runs in."""

    index: int
    node_id: str
    seen: int
    free: int


def place_ranks(
    nodes: Sequence[RayNode], layout: ParallelLayout, kind: str, where: str = "Ray cluster"
) -> list[RayNode]:
    """Choose the node of each rank. kind: of device, "CPU" or "GPU". where: what the nodes belong to, for messages.

    All ranks are on one node if any has enough devices. A tensor-parallel group that no node can hold is spread over as
    few nodes as possible. Raises CapacityError, with the counts per node, if too few devices are free.
    """
    if sum(node.free for node in nodes) < layout.size:
        raise CapacityError(describe_shortage(nodes, layout, kind, where))
    ordered = sorted(nodes, key=_order)
    left = {node.id: node.free for node in ordered}
    roomy = next((node for node in ordered if node.free >= layout.size), None)
    if roomy is not None:
        return [roomy] * layout.size
    places: list[RayNode] = []
    for _ in range(layout.pp_size):
        whole = next((node for node in ordered if left[node.id] >= layout.tp_size), None)
        group = [whole] * layout.tp_size if whole else _spread(ordered, left, layout.tp_size)
        for node in group:
            left[node.id] -= 1
        places += group
    return places


def _order(node: RayNode) -> tuple[bool, int, int, str]:
    address = ipaddress.ip_address(node.address)
    return (not node.is_driver, address.version, int(address), node.id)


def _spread(ordered: Sequence[RayNode], left: dict[str, int], size: int) -> list[RayNode]:
    """Use all free devices of the nodes with the most of them; returns nodes in their order."""
    taken: dict[str, int] = {}
    for node in sorted(ordered, key=lambda node: -left[node.id]):
        taken[node.id] = min(left[node.id], size - sum(taken.values()))
    return [node for node in ordered for _ in range(taken[node.id])]


def describe_shortage(nodes: Sequence[RayNode], layout: ParallelLayout, kind: str, where: str = "Ray cluster") -> str:
    """Build the message that too few devices are free, with counts and remedies."""
    seen = sum(node.seen for node in nodes)
    free = sum(node.free for node in nodes)
    each = "; ".join(
        f"{node.address}{' (this node)' if node.is_driver else ''} {node.free} of {node.seen} free"
        for node in sorted(nodes, key=_order)
    )
    remedy = f"make the {where} larger" if seen < layout.size else "stop what uses the others"
    return (
        f"{layout.size} ranks need {layout.size} {kind}s, but the {where} has {seen}, of which {free} are free "
        f"({each or 'no nodes'}): {remedy}, or lower --tensor-parallel-size or --pipeline-parallel-size"
    )


def check_engines(
    nodes: Sequence[RayNode], layout: ParallelLayout, num_engines: int, kind: str, where: str = "Ray cluster"
) -> None:
    """Raise CapacityError if the nodes cannot hold all data-parallel engines even when otherwise unused."""
    seen = sum(node.seen for node in nodes)
    needed = num_engines * layout.size
    if num_engines > 1 and needed > seen >= layout.size:
        each = "a rank" if layout.size == 1 else f"{layout.size} ranks"
        raise CapacityError(
            f"{num_engines} engines with {each} each need {needed} {kind}s, but the {where} has {seen}: make it "
            f"larger, or lower --data-parallel-size to {seen // layout.size}"
        )


def wait_for_devices(
    look: Callable[[], Sequence[RayNode]], num_devices: int, seconds: float, poll_seconds: float
) -> None:
    """Wait until the nodes have this many devices, used ones included, or the time is up. look: lists the nodes."""
    deadline = time.monotonic() + seconds
    has_logged = False
    while (seen := sum(node.seen for node in look())) < num_devices and time.monotonic() < deadline:
        if not has_logged:
            logger.warning("The Ray cluster has %d of %d devices: waiting %.0f s for nodes", seen, num_devices, seconds)
            has_logged = True
        time.sleep(poll_seconds)


def plan_bundles(places: Sequence[RayNode], layout: ParallelLayout) -> list[range]:
    """Group ranks into bundles: the ranks of one stage on one node."""
    bundles = []
    for _, members in groupby(range(layout.size), key=lambda rank: (layout.pp_rank(rank), places[rank].id)):
        ranks = list(members)
        bundles.append(range(ranks[0], ranks[-1] + 1))
    return bundles


def describe_spread_groups(places: Sequence[RayNode], layout: ParallelLayout) -> list[str]:
    """Warnings for tensor-parallel groups that are on several nodes."""
    lines = []
    for stage in range(layout.pp_size):
        addresses = [places[rank].address for rank in layout.tp_group(layout.rank(stage, 0))]
        ids = {places[rank].id for rank in layout.tp_group(layout.rank(stage, 0))}
        if len(ids) > 1:
            lines.append(
                f"No node has {layout.tp_size} devices for the tensor-parallel group of stage {stage}: it is spread "
                f"over {', '.join(dict.fromkeys(addresses))}, and every layer waits for the network between them"
            )
    return lines


def select_nodes(bundles: Sequence[Bundle], nodes: Sequence[RayNode]) -> list[RayNode]:
    """The nodes that have bundles, with the devices of these bundles."""
    selected = []
    for node in nodes:
        here = [bundle for bundle in bundles if bundle.node_id == node.id]
        if here:
            seen = sum(bundle.seen for bundle in here)
            free = sum(bundle.free for bundle in here)
            selected.append(RayNode(node.id, node.address, seen, free, node.is_driver))
    return selected


def assign_bundles(places: Sequence[RayNode], bundles: Sequence[Bundle]) -> list[int]:
    """The index of each rank's bundle, given nodes from `select_nodes`: per node in the order of the bundles."""
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
