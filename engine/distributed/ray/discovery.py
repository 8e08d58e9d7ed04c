"""Decides which Ray cluster to use, and with which settings, before Ray is imported: Ray reads its settings from the
environment at import.

Ray's own search may find a dead cluster; it then waits two minutes and ends the process. Imports neither Ray nor torch.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from serve_llm.common.errors import OptionError

ANSWER_SECONDS = 5.0  # time for a cluster's address to accept a connection
LOCAL = "local"  # address that means: start a cluster here


@dataclass(frozen=True)
class RayAddress:
    address: str  # host:port of the cluster's head, or LOCAL
    settings: dict[str, str] = field(default_factory=dict)  # environment variables to set before Ray is imported


def find_cluster(address: str | None, may_start: bool, environ: Mapping[str, str]) -> RayAddress:
    """Find the Ray cluster to use.

    address: RAY_ADDRESS; None, "" or "auto" for the cluster that this host is part of. may_start: whether to start a
    cluster here if this host is part of none. environ: of this process. Raises OptionError if there is no cluster.
    """
    if address in (None, "", "auto"):
        address = _read_current_cluster(environ)
        if address is None or _connection_error(address) is not None:
            if not may_start:
                raise OptionError(
                    "this host is not part of a Ray cluster: run `ray start --head` on one host and `ray start "
                    "--address` on the others, or lower --tensor-parallel-size or --pipeline-parallel-size"
                )
            address = LOCAL
    assert address is not None
    if address == LOCAL:
        return RayAddress(LOCAL, local_cluster_settings(environ))
    if "://" in address:
        raise OptionError(f"RAY_ADDRESS: {address} is for Ray's client; give host:port of the cluster's head instead")
    error = _connection_error(address)
    if error is not None:
        raise OptionError(
            f"no Ray cluster answers at {address} ({error}): start one with `ray start --head`, or set RAY_ADDRESS"
        )
    return RayAddress(address)


def _read_current_cluster(environ: Mapping[str, str]) -> str | None:
    """Read the address that `ray start` wrote on this host; None without such a file, or if another user owns it, who
    must not decide where our secrets go."""
    path = Path(environ.get("RAY_TMPDIR", "/tmp"), "ray", "ray_current_cluster")
    try:
        if path.stat().st_uid != os.getuid():
            return None
        return path.read_text().strip() or None
    except OSError:
        return None


def _connection_error(address: str) -> Exception | None:
    """Explain why host:port does not answer; None if it does. Ray itself would wait for minutes."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS).close()
    except (OSError, ValueError) as error:
        return error
    return None


def local_cluster_settings(environ: Mapping[str, str]) -> dict[str, str]:
    """Settings for a cluster that is started here, unless the user has set them.

    Anyone who can reach a cluster without a token may run code on it. This token is known only to this process and its
    children. If Ray generated the token, it would write it to the user's home, and all clusters started later would
    require it."""
    settings = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}  # Ray's default niceness is 15
    if "RAY_AUTH_MODE" not in environ:
        settings["RAY_AUTH_MODE"] = "token"
        settings["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    return {name: value for name, value in settings.items() if name not in environ}
