"""What an executor and its ranks say to each other besides steps: msgspec structs in msgpack, one ZeroMQ frame each.

A rank says Hello, is told to Begin, says Joined when it reaches its neighbours and Loaded when it has its weights; told
to Allocate, it says Ready. After that only steps follow, by another way, or Failed, which may come at any time.
"""

from __future__ import annotations

import os
import platform
import socket
from importlib.metadata import version
from pathlib import Path

import msgspec

from serve_llm.engine.config import Config
from serve_llm.engine.execute.memory import CacheLayout
from serve_llm.engine.parallel.shm import Handle


class Hello(msgspec.Struct, tag=True, frozen=True):
    rank: int
    host: str  # its name, for people
    host_id: str  # equal where memory can be shared
    pid: int
    versions: dict[str, str]


class Joined(msgspec.Struct, tag=True, frozen=True):
    """All neighbours have been reached."""


class Loaded(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # of KV cache that this rank has memory for


class Ready(msgspec.Struct, tag=True, frozen=True):
    layout: CacheLayout


class Failed(msgspec.Struct, tag=True, frozen=True):
    phase: str  # as in `PHASES`
    kind: str  # a class of `errors.BY_NAME`, or any other exception's
    message: str


class Rings(msgspec.Struct, frozen=True):
    """The shared memory that one rank uses, by rings."""

    steps: Handle
    reader: int  # which reader of `steps` this rank is
    answers: Handle | None  # the one rank that samples writes here
    tensor: list[Handle]  # of all ranks of its tensor-parallel group, in order; empty for a group of one
    previous: Handle | None  # from the stage before
    next: Handle | None  # to the next stage


class Begin(msgspec.Struct, tag=True, frozen=True):
    config: Config
    model: str  # config.json, from which every rank makes spec and weight map
    local_ranks: int  # that share this host's cores and memory, those of other engines included
    device_index: int  # among this host's GPUs
    log_level: str
    rings: Rings


class Allocate(msgspec.Struct, tag=True, frozen=True):
    num_blocks: int  # the same on all ranks


FromRank = Hello | Joined | Loaded | Ready | Failed
ToRank = Begin | Allocate

PHASES: dict[type | None, str] = {  # what a rank does after having sent this
    None: "while starting",
    Hello: "while joining the others",
    Joined: "while loading weights",
    Loaded: "while allocating the KV cache",
    Ready: "in a step",
}

encode = msgspec.msgpack.Encoder().encode
decode_from_rank = msgspec.msgpack.Decoder(FromRank).decode
decode_to_rank = msgspec.msgpack.Decoder(ToRank).decode


def versions() -> dict[str, str]:
    """What must be the same on all hosts."""
    return {"serve-llm": version("serve-llm"), "torch": version("torch"), "Python": platform.python_version()}


def host_id() -> str:
    """The same for two processes exactly if they run under one kernel and see each other in /proc."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip() + os.readlink("/proc/self/ns/pid")


def hello(rank: int) -> Hello:
    """This process as that rank."""
    return Hello(rank, socket.gethostname(), host_id(), os.getpid(), versions())
