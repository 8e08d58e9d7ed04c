"""Connects to a Ray cluster, or starts one, and reserves devices of it. Imports Ray; no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import ray
from ray._private.state import (
    available_resources_per_node,  # there is no public API for the free resources of each node
)
from ray._raylet import PlacementGroupID
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from serve_llm.common.errors import CapacityError, EngineError, OptionError
from serve_llm.common.splits import name_numbers
from serve_llm.engine.distributed.ray import placement
from serve_llm.engine.distributed.ray.discovery import LOCAL
from serve_llm.engine.distributed.ray.placement import Bundle, RayNode
from serve_llm.engine.parallel.layout import ParallelLayout
from serve_llm.engine.worker.cpu_threads import count_usable_cores

logger = logging.getLogger(__name__)

FREE_SECONDS = 15.0  # wait for devices in use: those of processes that have just ended are freed after a moment
NODE_SECONDS = 60.0  # how long a replaced engine waits for missing nodes: a lost one may return
TURN_SECONDS = 1.0  # additional time for each other engine that reserves devices at the same time
CREATE_SECONDS = 5.0  # time for a placement group on free devices
CREATE_POLL_SECONDS = 0.05
TAKEN_POLLS = 4  # give up a group after this many checks without free devices; devices of a pending group count as used
POLL_SECONDS = 0.2
STORE_BYTES = 80_000_000  # object store of a cluster that is started here; it stores no objects

NODE_LABEL = "ray.io/node-id"  # Ray defines it on every node


def connect(address: str, num_ranks: int) -> bool:
    """Connect this process to a cluster, or start one here for `num_ranks`. address: see `RayAddress`. Returns False if
    this process was connected already. Raises OptionError if the connection fails."""
    if ray.is_initialized():
        return False
    options: dict[str, object] = {}
    if address == LOCAL:
        logger.info("This host is not part of a Ray cluster: starting one here")
        num_cpus = max(count_usable_cores(), num_ranks)  # ranks may outnumber cores
        options = {"num_cpus": num_cpus, "include_dashboard": False, "object_store_memory": STORE_BYTES}
    try:
        # Ray puts the current directory first in its workers' sys.path. This directory is in it anyway.
        with contextlib.chdir(Path(os.__file__).parent):
            ray.init(address=address, logging_level="WARNING", log_to_driver=True, **options)
    except Exception as error:
        raise OptionError(f"cannot connect to the Ray cluster at {address}: {' '.join(str(error).split())}") from None
    return True


def get_node_address() -> str:
    """The IP by which Ray knows this node."""
    return str(ray.util.get_node_ip_address())


def choose_device_kind(asked: str, group_id: str | None) -> str:
    """The resource that ranks compute on, "GPU" or "CPU". asked: --device. group_id: of the placement group to stay
    within, in hex."""
    if asked != "auto":
        return {"cuda": "GPU", "cpu": "CPU"}[asked]
    if group_id is None:
        resources_by_node = [entry["Resources"] for entry in ray.nodes() if entry["Alive"]]
    else:
        resources_by_node = _group(group_id).bundle_specs
    return "GPU" if any(resources.get("GPU", 0) >= 1 for resources in resources_by_node) else "CPU"


@dataclass(frozen=True)
class Reservation:
    """Devices reserved until `end`."""

    kind: str  # "CPU" or "GPU"
    places: list[RayNode]  # by rank
    group: PlacementGroup
    bundles: list[int]  # by rank: index of its bundle
    owns_group: bool  # whether `end` removes the group

    def end(self) -> None:
        if self.owns_group:
            remove_placement_group(self.group)


def reserve(
    layout: ParallelLayout, kind: str, group_id: str | None, num_engines: int = 1, *, replaces: bool = False
) -> Reservation:
    """Reserve a device for each rank. group_id: of the placement group to stay within, in hex. num_engines: that
    reserve theirs there at the same time, including this one. replaces: whether engines have served before.

    Raises CapacityError with counts per node: if there are too few devices for all engines, immediately or, with
    `replaces`, after NODE_SECONDS; if they are in use, after FREE_SECONDS.
    """
    if replaces and group_id is None:
        placement.wait_for_devices(lambda: _nodes(kind), num_engines * layout.size, NODE_SECONDS, POLL_SECONDS)
    deadline = time.monotonic() + FREE_SECONDS + TURN_SECONDS * (num_engines - 1)
    if group_id is not None:
        reservation = _take_given(layout, kind, group_id, num_engines, deadline)
    else:
        placement.check_engines(_nodes(kind), layout, num_engines, kind)
        reservation = _take_free(layout, kind, deadline)
    bundles = placement.plan_bundles(reservation.places, layout)
    on = (f"{name_numbers('rank', ranks)} on {reservation.places[ranks[0]].address}" for ranks in bundles)
    logger.info("Ray places %s, one %s each", ", ".join(on), kind)
    for line in placement.describe_spread_groups(reservation.places, layout):
        logger.warning("%s", line)
    return reservation


def _take_free(layout: ParallelLayout, kind: str, deadline: float) -> Reservation:
    while True:
        places = _wait_for_places(lambda: _nodes(kind), layout, kind, "Ray cluster", deadline)
        ranges = placement.plan_bundles(places, layout)
        # Labels bind each bundle to its node. PACK alone may split tensor-parallel groups.
        group = placement_group(
            [{kind: len(ranks)} for ranks in ranges],
            strategy="PACK",
            bundle_label_selector=[{NODE_LABEL: places[ranks[0]].id} for ranks in ranges],
        )
        if _is_created(group, places, kind):
            indices = [index for index, ranks in enumerate(ranges) for _ in ranks]
            return Reservation(kind, places, group, indices, owns_group=True)
        remove_placement_group(group)  # another process has taken the devices
        if time.monotonic() > deadline:
            raise CapacityError(placement.describe_shortage(_nodes(kind), layout, kind))


def _is_created(group: PlacementGroup, places: list[RayNode], kind: str) -> bool:
    """Wait for a placement group. Returns False if another process has taken its devices, such as another engine that
    planned at the same time."""
    deadline = time.monotonic() + CREATE_SECONDS
    taken_polls = 0
    while not group.wait(0):  # Ray waits for whole seconds
        free = {node.id: node.free for node in _nodes(kind)}
        is_taken = any(free.get(node.id, 0) < places.count(node) for node in places)
        is_pending = placement_group_table(group)["state"] == "PENDING"  # otherwise the group may have taken them
        taken_polls = taken_polls + 1 if is_taken and is_pending else 0
        if taken_polls == TAKEN_POLLS or time.monotonic() > deadline:
            return bool(group.wait(0))
        time.sleep(CREATE_POLL_SECONDS)
    return True


def _take_given(layout: ParallelLayout, kind: str, group_id: str, num_engines: int, deadline: float) -> Reservation:
    group = _group(group_id)
    if not group.wait(CREATE_SECONDS):
        raise EngineError(f"the Ray placement group {group_id} that this runs in is not there")

    def look() -> list[RayNode]:
        return placement.select_nodes(_bundles(group, group_id, kind), _nodes(kind))

    placement.check_engines(look(), layout, num_engines, kind, "Ray placement group")
    places = _wait_for_places(look, layout, kind, "Ray placement group", deadline)
    indices = placement.assign_bundles(places, _bundles(group, group_id, kind))
    return Reservation(kind, places, group, indices, owns_group=False)


def _wait_for_places(
    look: Callable[[], list[RayNode]], layout: ParallelLayout, kind: str, where: str, deadline: float
) -> list[RayNode]:
    while True:
        nodes = look()
        try:
            return placement.place_ranks(nodes, layout, kind, where)
        except CapacityError:
            if sum(node.seen for node in nodes) < layout.size or time.monotonic() > deadline:
                raise
        time.sleep(POLL_SECONDS)


def _nodes(kind: str) -> list[RayNode]:
    here = ray.get_runtime_context().get_node_id()
    free = available_resources_per_node()
    return [
        RayNode(
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
    """List the group's bundles with their free devices: the process that created the group may use some."""
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
