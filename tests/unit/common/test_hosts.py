"""The kernel's addresses of this host, and the facts that hosts compare."""

from __future__ import annotations

import json
import socket
import sys
from importlib.metadata import version
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from serve_llm.common import hosts
from serve_llm.common.errors import ModelError, OptionError
from support.namespaces import Machines, why_not


def test_loopback_only_if_the_master_is_written_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts.find_own_address("127.0.0.1") == hosts.find_own_address("localhost") == "127.0.0.1"
    # A name that /etc/hosts maps to 127.0.1.1, as Debian does for the host's own name.
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, type: [(socket.AF_INET, type, 17, "", ("127.0.1.1", 1))])
    with pytest.raises(OptionError, match=r"--master-addr box is 127.0.1.1 on .* give its IP"):
        hosts.find_own_address("box")


def test_given_address_must_be_ours() -> None:
    assert hosts.find_own_address("10.1.2.3", "127.0.0.1") == "127.0.0.1"
    with pytest.raises(
        OptionError, match=r"--host-ip 192.0.2.1 is not an address of this host, which has .*127.0.0.1 \(lo\)"
    ):
        hosts.find_own_address("10.1.2.3", "192.0.2.1")


def test_unknown_master() -> None:
    with pytest.raises(OptionError, match=r"--master-addr no-such-host.invalid: .*; give an IP"):
        hosts.find_own_address("no-such-host.invalid")


def test_interface_and_mtu() -> None:
    assert hosts.find_interface("127.0.0.1") == "lo"
    assert hosts.read_mtu("lo") == int(Path("/sys/class/net/lo/mtu").read_text())
    names = {name for _, name in socket.if_nameindex()}
    assert set(hosts.list_addresses().values()) <= names
    with pytest.raises(OptionError, match="not an address of this host"):
        hosts.find_interface("192.0.2.1")


PROBE = """
import sys
from serve_llm.common.errors import OptionError
from serve_llm.common import hosts
for master in sys.argv[1:]:
    try:
        address = hosts.find_own_address(master)
        print(address, hosts.find_interface(address), hosts.read_mtu(hosts.find_interface(address)))
    except OptionError as error:
        print(error)
print(hosts.host_id())
"""


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_two_machines() -> None:
    """Several addresses and no default route: the master's network decides."""
    with Machines(2) as machines:
        machines[1].ip("link", "add", "other", "type", "bridge")
        machines[1].ip("addr", "add", "10.9.0.1/24", "dev", "other")
        machines[1].ip("addr", "add", "10.78.0.2/24", "dev", "eth0")  # a second address on the same interface
        machines[1].ip("link", "set", "other", "up")
        machines[1].set_mtu(1400)
        runs = [
            machine.run(sys.executable, "-P", "-c", PROBE, "10.77.0.1", "10.78.0.1", "10.99.0.1")
            for machine in (machines[1], machines[1], machines[0])
        ]
        assert all(run.returncode == 0 for run in runs), runs
        first, again, other = (run.stdout.splitlines() for run in runs)
    assert first[:2] == ["10.77.0.2 eth0 1400", "10.78.0.2 eth0 1400"]
    assert first[2].startswith("no route from this host to the master 10.99.0.1") and "10.9.0.1 (other)" in first[2]
    assert other[0] == "10.77.0.1 eth0 1500"
    assert first[3] == again[3] and len({first[3], other[3], hosts.host_id()}) == 3


def checkpoint(folder: Path, weight: float = 1.0, name: str = "a", files: int = 1) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    if files == 1:
        save_file({name: torch.full((4,), weight)}, folder / "model.safetensors")
    else:
        for number in range(files):
            save_file({f"{name}{number}": torch.full((4,), weight)}, folder / f"model-{number}.safetensors")
        listed = {f"{name}{number}": f"model-{number}.safetensors" for number in range(files)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": listed}))
    return folder


@pytest.mark.parametrize("files", [1, 2])
def test_equal_copies_have_equal_fingerprints(tmp_path: Path, files: int) -> None:
    first, second = (hosts.fingerprint(checkpoint(tmp_path / name, files=files)) for name in "ab")
    assert first == second and first.torch == version("torch")
    assert hosts.difference([first, second]) is None
    assert hosts.fingerprint(None).weights == ""


def test_other_files_have_other_fingerprints(tmp_path: Path) -> None:
    plain = hosts.fingerprint(checkpoint(tmp_path / "plain"))
    renamed = hosts.fingerprint(checkpoint(tmp_path / "renamed", name="b"))
    assert plain.config == renamed.config and plain.weights != renamed.weights
    for folder, size in (("short", 100), ("long", 200)):
        (checkpoint(tmp_path / folder) / "model.gguf").write_bytes(bytes(size))
    assert hosts.fingerprint(tmp_path / "short").weights != hosts.fingerprint(tmp_path / "long").weights
    other = checkpoint(tmp_path / "config")
    (other / "config.json").write_text("{}")
    assert hosts.fingerprint(other).config != plain.config


def test_missing_and_broken_files(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path / "shards", files=2)
    (directory / "model-1.safetensors").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*model-1.safetensors: No such file"):
        hosts.fingerprint(directory)
    (directory / "model-1.safetensors").write_bytes((1000).to_bytes(8, "little") + b"{")
    with pytest.raises(ModelError, match="truncated"):
        hosts.fingerprint(directory)
    (directory / "model-1.safetensors").write_bytes(b"12")
    with pytest.raises(ModelError, match="cannot read"):
        hosts.fingerprint(directory)
    (directory / "config.json").unlink()
    with pytest.raises(ModelError, match=r"cannot read .*config.json"):
        hosts.fingerprint(directory)


def test_differences_in_one_line() -> None:
    first = hosts.Fingerprint(host="red", serve_llm="1.0", python="3.11", torch="2.13.0", config="c", weights="w")
    other = msgspec.structs.replace(first, host="blue", torch="2.12.0")
    third = msgspec.structs.replace(first, host="green", weights="")
    assert hosts.difference([first, msgspec.structs.replace(first, host="pink")]) is None
    assert hosts.difference([first, other, third]) == (
        "node 1 (blue) has torch 2.12.0, node 0 (red) has 2.13.0; "
        "node 2 (green) has model weights none, node 0 (red) has w"
    )
