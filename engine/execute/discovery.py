"""Which Ray cluster to use, and how it wants to be spoken to: found out before Ray is imported, which reads its
settings from the environment at that moment.

Ray's own search may find a cluster that is gone, and then waits for it for two minutes and ends the process; and it
does not know whether a cluster wants a token. No Ray, no torch.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serve_llm.engine.errors import OptionError

ANSWER_SECONDS = 5.0  # for a cluster's address to take a connection
LOCAL = "local"  # an address: start a cluster of our own here
_OURS = "RAY_OF_SERVE_LLM"  # set in the processes of such a cluster, which is for one engine only


@dataclass(frozen=True)
class Found:
    address: str  # host:port of the cluster's head, or LOCAL
    settings: dict[str, str] = field(default_factory=dict)  # for the environment, before Ray is imported


def find_cluster(address: str | None, may_start: bool, environ: Mapping[str, str], proc: Path = Path("/proc")) -> Found:
    """address: that the user gave, if any. may_start: a cluster here, where there is none. environ: of this process.

    Raises OptionError if there is no cluster.
    """
    known = clusters_here(proc)
    if address in (None, "", "auto"):
        if len(known) > 1:
            raise OptionError(f"this host is part of {len(known)} Ray clusters ({', '.join(known)}): set RAY_ADDRESS")
        if not known and not may_start:
            raise OptionError(
                "this host is not part of a Ray cluster: run `ray start --head` on one host and `ray start --address` "
                "on the others, or lower --tensor-parallel-size or --pipeline-parallel-size"
            )
        address = next(iter(known), LOCAL)
    assert address is not None
    if address == LOCAL:
        return Found(LOCAL, settings_of_our_own(environ))
    if "://" in address:
        raise OptionError(f"RAY_ADDRESS: {address} is for Ray's client; give host:port of the cluster's head instead")
    _check_answers(address)
    port = address.rpartition(":")[2]  # a host may have several names
    same = (settings for other, settings in known.items() if other.rpartition(":")[2] == port)
    return Found(address, {} if "RAY_AUTH_MODE" in environ else next(same, {}))


def clusters_here(proc: Path = Path("/proc")) -> dict[str, dict[str, str]]:
    """Address of each cluster that this host is a node of -> the RAY_AUTH_* of its processes. Without those that an
    engine has started for itself."""
    found: dict[str, dict[str, str]] = {}
    for command, environ in _processes("raylet", proc):
        for argument in command if _OURS not in environ else ():
            if argument.startswith("--gcs-address="):
                settings = {name: value for name, value in environ.items() if name.startswith("RAY_AUTH_")}
                found[argument.partition("=")[2]] = settings or {"RAY_AUTH_MODE": "disabled"}
    return dict(sorted(found.items()))


def _processes(name: str, proc: Path) -> Iterator[tuple[list[str], dict[str, str]]]:
    """Command line and environment of the processes of that name that belong to this user."""
    for directory in proc.glob("[0-9]*"):
        try:
            if directory.stat().st_uid != os.getuid():
                continue  # another user's, who must not decide where our secrets go
            command = (directory / "cmdline").read_bytes().decode(errors="replace").split("\0")
            if Path(command[0]).name == name:
                yield command, environ_of(directory)
        except OSError:
            continue


def environ_of(process: Path) -> dict[str, str]:
    """What a process had in its environment when it started. process: its directory in /proc. Raises OSError."""
    entries = (process / "environ").read_bytes().decode(errors="replace").split("\0")
    return {name: value for name, _, value in (entry.partition("=") for entry in entries) if name}


def settings_of_our_own(environ: Mapping[str, str]) -> dict[str, str]:
    """For a cluster that is started here, where the user has not said otherwise.

    Whoever reaches a cluster without token may run anything on it. This token is nowhere but in this process and
    those that it starts; without a word from us, Ray writes one to the user's home, and all clusters that start later
    want it."""
    wanted = {_OURS: "1", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # niceness is 15 otherwise
    if "RAY_AUTH_MODE" not in environ:
        wanted |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    return {name: value for name, value in wanted.items() if name not in environ}


def _check_answers(address: str) -> None:
    """Raises OptionError unless something listens there: Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        raise OptionError(
            f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`, or set RAY_ADDRESS"
        ) from None
