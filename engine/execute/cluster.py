"""The Ray cluster: found, connected to or started, and devices of it reserved.

Imports Ray, so only those import it who want Ray. Knows nothing of what runs in the reserved places. No torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.state import available_resources_per_node  # there is no public way to see what is free where
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from serve_llm.engine.errors import CapacityError, EngineError, OptionError
from serve_llm.engine.execute import placement
from serve_llm.engine.execute.discovery import LOCAL
from serve_llm.engine.execute.placement import Bundle, Node
from serve_llm.engine.execute.threads import usable_cores
from serve_llm.engine.parallel.layout import Grid

logger = logging.getLogger(__name__)

FREE_SECONDS = 15.0  # for devices that something else still has: what just ended gives them back a moment later
CREATE_SECONDS = 5.0  # for a placement group of devices that are free
POLL_SECONDS = 0.2
STORE_BYTES = 80_000_000  # of a cluster of our own, which keeps no objects

NODE_LABEL = "ray.io/node-id"  # Ray gives it to every node


def connect(address: str, num_ranks: int) -> bool:
    """Connect this process to a cluster, or start one here for so many ranks; see `discovery`. Whether this did it: not
    if it is connected. Raises OptionError if the cluster does not let it in."""
    if ray.is_initialized():
        return False
    options: dict[str, object] = {}
    if address == LOCAL:
        logger.info("This host is not part of a Ray cluster: starting one here")
        num_cpus = max(usable_cores(), num_ranks)  # ranks may outnumber cores
        options = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        # Ray puts the current directory first on its workers' path; this one is on it anyway.
        with contextlib.chdir(Path(os.__file__).parent):
            ray.init(address=address, logging_level="WARNING", log_to_driver=True, **options)
    except Exception as error:
        raise OptionError(f"cannot connect to the Ray cluster at {address}: {' '.join(str(error).split())}") from None
    return True


def node_address() -> str:
    """The IP by which Ray knows this node."""
    return str(ray.util.get_node_ip_address())


def kind_of_device(asked: str, group_id: str | None) -> str:
    """ "GPU" or "CPU": what ranks compute on. asked: --device. group_id: of a placement group that is given (hex)."""
    if asked != "auto":
        return {"cuda": "GPU", "cpu": "CPU"}[asked]
    if group_id is None:
        found = [entry["Resources"] for entry in ray.nodes() if entry["Alive"]]
    else:
        found = _group(group_id).bundle_specs
    return "GPU" if any(resources.get("GPU", 0) >= 1 for resources in found) else "CPU"


@dataclass(frozen=True)
class Reservation:
    """Devices that are ours until `end`."""

    kind: str  # "CPU" or "GPU"
    places: list[Node]  # by rank
    group: PlacementGroup
    bundles: list[int]  # by rank: which bundle of the group
    made: bool  # the group is ours

    def end(self) -> None:
        if self.made:
            remove_placement_group(self.group)


def reserve(grid: Grid, kind: str, group_id: str | None) -> Reservation:
    """A device for each rank. group_id: of a placement group (hex) to stay within.

    Raises CapacityError with counts per node: at once if the cluster has too few devices, after FREE_SECONDS if they
    are in use.
    """
    reservation = _take_given(grid, kind, group_id) if group_id is not None else _take_free(grid, kind)
    ranks = placement.bundles_of(reservation.places, grid)
    on = (f"rank {' '.join(map(str, own))} on {reservation.places[own[0]].address}" for own in ranks)
    logger.info("Ray places %s, one %s each", ", ".join(on), kind)
    for line in placement.spread_groups(reservation.places, grid):
        logger.warning("%s", line)
    return reservation


def _take_free(grid: Grid, kind: str) -> Reservation:
    deadline = time.monotonic() + FREE_SECONDS
    while True:
        places = _wait_for_places(lambda: _nodes(kind), grid, kind, "Ray cluster", deadline)
        ranges = placement.bundles_of(places, grid)
        # Each bundle is bound to its node. PACK alone would split groups, and begin anywhere.
        group = placement_group(
            [{kind: len(ranks)} for ranks in ranges],
            strategy="PACK",
            bundle_label_selector=[{NODE_LABEL: places[ranks[0]].id} for ranks in ranges],
        )
        if group.wait(CREATE_SECONDS):
            indices = [index for index, ranks in enumerate(ranges) for _ in ranks]
            return Reservation(kind, places, group, indices, made=True)
        remove_placement_group(group)  # somebody was faster
        if time.monotonic() > deadline:
            raise CapacityError(placement.too_few(_nodes(kind), grid, kind))


def _take_given(grid: Grid, kind: str, group_id: str) -> Reservation:
    group = _group(group_id)
    if not group.wait(CREATE_SECONDS):
        raise EngineError(f"the Ray placement group {group_id} that this runs in is not there")
    deadline = time.monotonic() + FREE_SECONDS

    def look() -> list[Node]:
        return placement.nodes_within(_bundles(group, group_id, kind), _nodes(kind))

    places = _wait_for_places(look, grid, kind, "Ray placement group", deadline)
    indices = placement.ranks_to_bundles(places, _bundles(group, group_id, kind))
    return Reservation(kind, places, group, indices, made=False)


def _wait_for_places(look: Callable[[], list[Node]], grid: Grid, kind: str, where: str, deadline: float) -> list[Node]:
    while True:
        nodes = look()
        try:
            return placement.place_ranks(nodes, grid, kind, where)
        except CapacityError:
            if sum(node.seen for node in nodes) < grid.size or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def _nodes(kind: str) -> list[Node]:
    here, free = ray.get_runtime_context().get_node_id(), available_resources_per_node()
    return [
        Node(
            id=entry["NodeID"],
            address=entry["NodeManagerAddress"],
            seen=int(entry["Resources"].get(kind, 0)),
            free=int(free.get(entry["NodeID"], {}).get(kind, 0)),
            is_driver=entry["NodeID"] == here,
        )
        for entry in ray.nodes()
        if entry["Alive"]
    ]


def _group(group_id: str) -> PlacementGroup:
    return PlacementGroup(PlacementGroupID(bytes.fromhex(group_id)))


def _bundles(group: PlacementGroup, group_id: str, kind: str) -> list[Bundle]:
    """What the group has, and what of it is free: whoever started this may use some."""
    node_of = placement_group_table(group)["bundles_to_node_id"]
    free = available_resources_per_node()
    return [
        Bundle(
            index=index,
            node_id=node_of[index],
            seen=int(resources.get(kind, 0)),
            free=int(free.get(node_of[index], {}).get(f"{kind}_group_{index}_{group_id}", 0)),
        )
        for index, resources in enumerate(group.bundle_specs)
    ]
