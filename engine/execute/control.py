"""What an executor and its ranks say to each other besides steps: msgspec structs in msgpack, one ZeroMQ frame each.

A rank says Hello, is told to Begin, says Joined when it reaches its neighbours and Loaded when it has its weights; told
to Allocate, it says Ready. Where there are several hosts, one rank of each is told to Wire first and answers Wired.
After that only steps follow, by another way, or Failed, which may come at any time.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.execute.threads import Threads
from serve_llm.engine.parallel.hosts import Fingerprint, fingerprint, host_id
from serve_llm.engine.parallel.shm import Handle

LOOPBACK = "127.0.0.1"  # where ranks meet that are all on one host


class Hello(msgspec.Struct, tag=True, frozen=True):
    rank: int
    host: str  # its name, for people
    host_id: str  # equal where memory can be shared
    address: str  # of the host, for ranks on others; "" if there are none
    pid: int
    fingerprint: Fingerprint


class Alive(msgspec.Struct, tag=True, frozen=True):
    """Says so by the connection that it came from: when that is lost, so is the rank."""

    rank: int


class Joined(msgspec.Struct, tag=True, frozen=True):
    """All neighbours have been reached."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # of KV cache that this rank has memory for
    threads: Threads


class Ready(msgspec.Struct, tag=True, frozen=True):
    layout: CacheLayout


class Failed(msgspec.Struct, tag=True, frozen=True):
    phase: str  # as in `PHASES`
    kind: str  # a class of `errors.BY_NAME`, or any other exception's
    message: str


class Rings(msgspec.Struct, frozen=True):
    """The shared memory through which one rank reaches its neighbours on the same host."""

    tensor: list[Handle]  # of the ranks of its tensor-parallel group on this host, in order; empty if it is alone
    previous: Handle | None  # from the stage before
    next: Handle | None  # to the next stage


class Column(msgspec.Struct, frozen=True):
    """How a rank reaches those at its place in the engines with which it shares out experts."""

    rings: list[Handle]  # of all of them, engine by engine; on GPUs none
    store_port: int  # on GPUs: of the key-value store on this host where they meet


class RingEnds(msgspec.Struct, tag=True, frozen=True):
    """How a rank on the engine's host gets steps."""

    steps: Handle
    reader: int  # which reader of `steps` this rank is
    answers: Handle | None  # the one rank that samples writes here


class StepsUrl(msgspec.Struct, tag=True, frozen=True):
    """How a rank on another host gets steps, and answers."""

    url: str


class Wired(msgspec.Struct, tag=True, frozen=True):
    rings: dict[int, Rings]  # by rank
    store_port: int  # 0: it hosts none


class Span(msgspec.Struct, frozen=True):
    """What ranks need to reach others on other hosts."""

    host_ids: list[str]  # of all ranks, in order
    store: str  # address of the key-value store where they meet
    store_port: int


class Wire(msgspec.Struct, tag=True, frozen=True):
    """Make the rings between these ranks, which run on this host; host the store for all."""

    tensor: int
    pipeline: int
    ranks: list[int]
    step_bytes: int
    host_store: bool


class Begin(msgspec.Struct, tag=True, frozen=True):
    config: Config
    model: str  # config.json, from which every rank makes spec and weight map
    local_ranks: int  # that share this host's cores and memory, those of other engines included
    device_index: int  # among this host's GPUs
    log_level: str
    steps: RingEnds | StepsUrl
    rings: Rings
    span: Span | None  # None: all ranks are on one host
    column: Column | None = None  # None: no other engine holds experts


class Allocate(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # the same on all ranks


FromRank = Hello | Alive | Wired | Joined | Loaded | Ready | Failed
ToRank = Wire | Begin | Allocate

PHASES: dict[type | None, str] = {  # what a rank does after having sent this
    None: "while starting",
    Hello: "while joining the others",
    Wired: "while joining the others",
    Joined: "while loading weights",
    Loaded: "while allocating the KV cache",
    Ready: "in a step",
}

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def hello(rank: int, address: str = "", directory: str | None = None) -> Hello:
    """This process as that rank. directory: the checkpoint on this host, where it is compared with others'."""
    model = Path(directory) if directory else None
    return Hello(rank, socket.gethostname(), host_id(), address, os.getpid(), fingerprint(model))
