"""What node 0 and the other nodes of a service say to each other: msgspec structs in msgpack over `parallel.encrypted`.

A node says Join and is told to Run ranks, or Refused; it sends a Report every second and whenever a rank ends, and
Failed if it cannot go on. Node 0 says Serving once, and End. How ranks fare with their work is none of this: that is
`control`.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec

from serve_llm.engine.errors import OptionError
from serve_llm.engine.fields import option_name
from serve_llm.engine.options import Options, fields


class Join(msgspec.Struct, tag=True, frozen=True):
    node: int
    nnodes: int
    host: str
    address: str


class Seen(msgspec.Struct, array_like=True, frozen=True):
    """A rank, as its node sees it."""

    pid: int
    state: str  # as of `roster.Launched`
    ended: str  # how; "" while it runs


class Report(msgspec.Struct, tag=True, frozen=True):
    ranks: dict[int, Seen]


class Failed(msgspec.Struct, tag=True, frozen=True):
    kind: str  # a class of `errors.BY_NAME`
    message: str


class Run(msgspec.Struct, tag=True, frozen=True):
    ranks: list[int]
    on_gpus: bool  # one each
    options: Options  # of node 0, without secrets
    url: str  # where ranks say Hello


class Refused(msgspec.Struct, tag=True, frozen=True):
    reason: str


class Serving(msgspec.Struct, tag=True, frozen=True):
    """An engine has served, so whatever ends one from now on is no mistake in options or model: another takes its
    place, and the node may join that."""


class End(msgspec.Struct, tag=True, frozen=True):
    cause: str  # "" if all is in order


FromNode = Join | Report | Failed
ToNode = Run | Refused | Serving | End

encode = msgspec.msgpack.Encoder().encode
decode_from_node = msgspec.msgpack.Decoder(FromNode).decode
decode_to_node = msgspec.msgpack.Decoder(ToNode).decode

# What may be different on every node, or is compared in another way.
_OWN = {"node_rank", "host_ip", "host", "port", "log_level", "download_dir"}


def without_secrets(options: Options) -> Options:
    return replace(options, api_key=(), cluster_secret=None)


def check_same(here: Options, first: Options) -> None:
    """What is said on this node as well must be what node 0 says. Raises OptionError naming the first difference."""
    for option in fields():
        own, other = getattr(here, option.name), getattr(first, option.name)
        unsaid = "" if option.name == "model" else option.default
        if option.metadata.get("secret") or option.name in _OWN or own in (unsaid, other):
            continue
        name = "the model" if option.name == "model" else f"--{option_name(option)}"
        raise OptionError(f"node {here.node_rank} was started with {name} {own}, node 0 with {other}")
