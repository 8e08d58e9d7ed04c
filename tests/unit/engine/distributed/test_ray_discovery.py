"""Which Ray cluster an engine uses."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from serve_llm.common.errors import OptionError
from serve_llm.engine.distributed.ray.discovery import LOCAL, find_cluster


def write_current_cluster(folder: Path, address: str) -> dict[str, str]:
    """Write the address of the current cluster as `ray start` does. Returns the environment that names the folder."""
    (folder / "ray").mkdir(exist_ok=True)
    (folder / "ray" / "ray_current_cluster").write_text(address)
    return {"RAY_TMPDIR": str(folder)}


def test_without_a_cluster_one_is_started_only_if_ray_was_asked_for(tmp_path: Path) -> None:
    environ = {"RAY_TMPDIR": str(tmp_path)}
    with pytest.raises(OptionError, match="not part of a Ray cluster: run `ray start --head`"):
        find_cluster(None, may_start=False, environ=environ)
    found = find_cluster("auto", may_start=True, environ=environ)
    assert found.address == LOCAL
    assert found.settings["RAY_AUTH_MODE"] == "token" and len(found.settings["RAY_AUTH_TOKEN"]) == 64
    chosen = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "3"}
    assert find_cluster(LOCAL, may_start=False, environ=chosen).settings == {"RAY_USAGE_STATS_ENABLED": "0"}


def test_the_cluster_that_this_host_is_part_of(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        environ = write_current_cluster(tmp_path, address)
        for asked in (None, "", "auto"):
            found = find_cluster(asked, may_start=True, environ=environ)
            assert (found.address, found.settings) == (address, {})
        by_name = address.replace("127.0.0.1", "localhost")
        assert find_cluster(by_name, may_start=False, environ={}).address == by_name


def test_a_cluster_that_has_ended_without_removing_its_file_is_none(tmp_path: Path) -> None:
    environ = write_current_cluster(tmp_path, "127.0.0.1:1")
    assert find_cluster(None, may_start=True, environ=environ).address == LOCAL
    with pytest.raises(OptionError, match="not part of a Ray cluster"):
        find_cluster(None, may_start=False, environ=environ)


def test_another_users_file_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as head:
        environ = write_current_cluster(tmp_path, f"127.0.0.1:{head.getsockname()[1]}")
        monkeypatch.setattr("os.getuid", lambda: 4711)
        assert find_cluster(None, may_start=True, environ=environ).address == LOCAL


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1", "nonsense:6379"])
def test_a_cluster_that_is_gone_is_said_at_once(address: str) -> None:
    with pytest.raises(OptionError, match=f"no Ray cluster answers at {address}"):
        find_cluster(address, may_start=True, environ={})


def test_addresses_of_rays_client_are_refused() -> None:
    with pytest.raises(OptionError, match="RAY_ADDRESS: ray://head:10001 is for Ray's client"):
        find_cluster("ray://head:10001", may_start=True, environ={})
