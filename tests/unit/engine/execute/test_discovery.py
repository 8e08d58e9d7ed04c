"""Which Ray cluster an engine uses; hosts are folders that look like /proc."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from serve_llm.engine.errors import OptionError
from serve_llm.engine.execute.discovery import LOCAL, clusters_here, environ_of, find_cluster


def add_process(proc: Path, pid: int, command: list[str], environ: dict[str, str]) -> None:
    directory = proc / str(pid)
    directory.mkdir(parents=True)
    (directory / "cmdline").write_bytes(b"".join(word.encode() + b"\0" for word in command))
    (directory / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))


def add_node(proc: Path, pid: int, address: str, **environ: str) -> None:
    add_process(proc, pid, ["/opt/ray/raylet/raylet", "--x=1", f"--gcs-address={address}"], environ)


def test_hosts_are_nodes_of_the_clusters_whose_raylets_they_run(tmp_path: Path) -> None:
    add_node(tmp_path, 1, "10.0.0.1:6379", RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH="/secret", HOME="/root")
    add_node(tmp_path, 2, "10.0.0.2:6379", HOME="/root")
    add_process(tmp_path, 3, ["/bin/python", "raylet", "--gcs-address=10.0.0.3:6379"], {})
    (tmp_path / "4").mkdir()  # has just ended
    (tmp_path / "self").mkdir()
    assert clusters_here(tmp_path) == {
        "10.0.0.1:6379": {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "/secret"},
        "10.0.0.2:6379": {"RAY_AUTH_MODE": "disabled"},
    }
    assert environ_of(tmp_path / "2") == {"HOME": "/root"}


def test_without_a_cluster_one_is_started_only_if_ray_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="not part of a Ray cluster: run `ray start --head`"):
        find_cluster(None, may_start=False, environ={}, proc=tmp_path)
    found = find_cluster("auto", may_start=True, environ={}, proc=tmp_path)
    assert found.address == LOCAL
    assert found.settings["RAY_AUTH_MODE"] == "token" and len(found.settings["RAY_AUTH_TOKEN"]) == 64
    chosen = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "3"}
    assert find_cluster(LOCAL, may_start=False, environ=chosen, proc=tmp_path).settings == {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_OF_SERVE_LLM": "1",
    }


def test_a_cluster_that_another_engine_has_started_is_its_own(tmp_path: Path) -> None:
    add_node(tmp_path, 1, "10.0.0.1:6379", **find_cluster(LOCAL, True, {}, tmp_path).settings)
    assert clusters_here(tmp_path) == {}


def test_the_cluster_that_this_host_is_part_of(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        add_node(tmp_path, 1, address, RAY_AUTH_MODE="token")
        found = find_cluster(None, may_start=False, environ={}, proc=tmp_path)
        assert (found.address, found.settings) == (address, {"RAY_AUTH_MODE": "token"})
        by_name = find_cluster(address.replace("127.0.0.1", "localhost"), may_start=False, environ={}, proc=tmp_path)
        assert by_name.settings == {"RAY_AUTH_MODE": "token"}
        chosen = find_cluster(None, may_start=False, environ={"RAY_AUTH_MODE": "disabled"}, proc=tmp_path)
        assert chosen.settings == {}
        add_node(tmp_path, 2, "10.0.0.2:6379")
        with pytest.raises(OptionError, match=r"part of 2 Ray clusters \(.*10\.0\.0\.2:6379.*\): set RAY_ADDRESS"):
            find_cluster(None, may_start=True, environ={}, proc=tmp_path)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nonsense:6379"])
def test_a_cluster_that_is_gone_is_said_at_once(tmp_path: Path, address: str) -> None:
    with pytest.raises(OptionError, match=f"no Ray cluster answers at {address}"):
        find_cluster(address, may_start=True, environ={}, proc=tmp_path)


def test_addresses_of_rays_client_are_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="RAY_ADDRESS: ray://head:10001 is for Ray's client"):
        find_cluster("ray://head:10001", may_start=True, environ={}, proc=tmp_path)
