"""Messages between an executor and its workers, besides steps: msgspec structs in msgpack, one ZeroMQ frame each.

    worker                             executor
    WorkerHello                  ->
                                 <-    SetupChannels, to one rank of each other host and to the host of the store
    ChannelsReady                ->
                                 <-    InitWorker
    GroupsReady, then LoadDone   ->
                                 <-    AllocateCache
    CacheReady                   ->

Afterwards there are only steps, on the step channel, and an ExpertsPlaced for each placement of experts. A worker may
send Failed at any time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from serve_llm.common.hosts import Fingerprint, fingerprint, host_id
from serve_llm.common.messages import Failed
from serve_llm.common.types import EPLBStats
from serve_llm.engine.config import Config
from serve_llm.engine.parallel.shm import ShmHandle
from serve_llm.engine.worker.cpu_threads import CpuThreads
from serve_llm.engine.worker.kv_cache import HostMemory, KVCacheConfig

LOAD_SECONDS = 3600.0  # time to load weights, possibly over a slow network
LOOPBACK = "127.0.0.1"  # address if all ranks are on one host


class WorkerHello(msgspec.Struct, tag=True, frozen=True):
    rank: int
    host: str  # name for log and error messages
    host_id: str  # equal for processes that can share memory
    address: str  # the host's address for ranks on other hosts; "" if there are none
    pid: int
    fingerprint: Fingerprint


class WorkerAlive(msgspec.Struct, tag=True, frozen=True):
    """Registers its connection as the rank's heartbeat: a lost connection means a lost rank."""

    rank: int


class GroupsReady(msgspec.Struct, tag=True, frozen=True):
    """The worker has joined its process groups."""


class DraftShard(msgspec.Struct, frozen=True):
    """What a rank holds of a draft model."""

    weight_bytes: int
    kv_cache_config: KVCacheConfig


class LoadDone(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # KV cache blocks that this rank has memory for
    weight_bytes: int
    threads: CpuThreads
    num_slots: int = 0  # blocks that --kv-offload-memory holds here
    host: str = msgspec.field(default_factory=socket.gethostname)  # name of the rank's host for log and error messages
    draft: DraftShard | None = None  # None if this rank holds no draft model


class CacheReady(msgspec.Struct, tag=True, frozen=True):
    kv_cache_config: KVCacheConfig
    host_memory: HostMemory | None = None  # see `Worker.host_memory`


class ExpertsPlaced(msgspec.Struct, tag=True, frozen=True):
    stats: EPLBStats  # what this rank has done so far


class RankRings(msgspec.Struct, frozen=True):
    """The shared memory through which a rank exchanges tensors with ranks on the same host."""

    tensor: list[ShmHandle]  # one per rank of its tensor-parallel group on this host, in order; empty if it is alone
    previous: ShmHandle | None  # from the previous pipeline stage
    next: ShmHandle | None  # to the next pipeline stage


class ExpertGroupSetup(msgspec.Struct, frozen=True):
    """How a rank reaches its expert-parallel group: the ranks with its number in all data-parallel engines."""

    rings: list[ShmHandle]  # rings of all members, engine by engine; empty on GPUs and if members are on several hosts
    store: str  # address of the key-value store for the rendezvous; used if there are no rings
    store_port: int


class StepRings(msgspec.Struct, tag=True, frozen=True):
    """Where a rank on the engine's host reads steps."""

    steps: ShmHandle
    reader: int  # index of this rank's reader of `steps`
    answers: ShmHandle | None  # where the rank that samples writes results; None for other ranks


class StepsUrl(msgspec.Struct, tag=True, frozen=True):
    """Where a rank on another host reads steps and sends results."""

    url: str


class ChannelsReady(msgspec.Struct, tag=True, frozen=True):
    rings: dict[int, RankRings]  # by rank
    store_port: int  # 0 if this process hosts no store


class Rendezvous(msgspec.Struct, frozen=True):
    """How ranks rendezvous through torch.distributed."""

    host_ids: list[str]  # one per rank of its tensor-parallel group, in order
    store: str  # address of the key-value store
    store_port: int


class SetupChannels(msgspec.Struct, tag=True, frozen=True):
    """Create the rings between `ranks`, which are on this host, and host the key-value store if requested."""

    tp_size: int
    pp_size: int
    ranks: list[int]
    step_bytes: int  # see `HostSetup`
    host_store: bool


class DraftSetup(msgspec.Struct, frozen=True):
    """The draft model of which each rank of the last stage holds a shard."""

    config: Config
    model: str  # its config.json


class InitWorker(msgspec.Struct, tag=True, frozen=True):
    """Join the process groups, then load the model."""

    config: Config
    model: str  # config.json, from which each rank builds spec and weight map
    local_ranks: int  # ranks that share this host's cores and memory, including those of other engines
    device_index: int  # index among this host's GPUs
    log_level: str
    steps: StepRings | StepsUrl
    rings: RankRings
    rendezvous: Rendezvous | None  # None if all ranks are on one host and on CPUs
    expert_group: ExpertGroupSetup | None = None  # None if no other engine holds experts
    log_format: str = "text"
    logs_progress: bool = False  # one rank of each host logs the progress of loading
    draft: DraftSetup | None = None  # None if this rank holds no draft model


class AllocateCache(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # the same on all ranks
    num_slots: int = 0  # in host memory, the same on all ranks


FromRank = WorkerHello | WorkerAlive | ChannelsReady | GroupsReady | LoadDone | CacheReady | ExpertsPlaced | Failed
ToRank = SetupChannels | InitWorker | AllocateCache

PHASES: dict[type | None, str] = {  # what a rank does after it has sent this message
    None: "while starting",
    WorkerHello: "while joining the others",
    ChannelsReady: "while joining the others",
    GroupsReady: "while loading weights",
    LoadDone: "while allocating the KV cache",
    CacheReady: "in a step",
    ExpertsPlaced: "in a step",
}

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def build_hello(rank: int, address: str = "", directory: str | None = None) -> WorkerHello:
    """Build the hello of this process. directory: the local checkpoint, if it must be compared with other hosts'."""
    model = Path(directory) if directory else None
    return WorkerHello(rank, socket.gethostname(), host_id(), address, os.getpid(), fingerprint(model))
