"""The address by which other hosts reach this one, and the fingerprint that must be equal on all hosts of a service.

Linux only (netlink, /proc).
"""

from __future__ import annotations

import fcntl
import hashlib
import ipaddress
import os
import platform
import socket
import struct
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from serve_llm.common.errors import ModelError, OptionError
from serve_llm.common.gguf.checkpoint import list_links
from serve_llm.common.hub import read_json
from serve_llm.common.weight_files import INDEX

_GET_ADDRESSES = 22  # RTM_GETADDR
_DONE = 3  # NLMSG_DONE
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_REMOTE_END = 1  # IFA_ADDRESS, which differs from IFA_LOCAL on point-to-point links
_LOCAL_END = 2  # IFA_LOCAL
_SIOCGIFMTU = 0x8921


def list_addresses() -> dict[str, str]:
    """Address of this host (IPv4 and IPv6, as text) -> name of its interface. Raises OSError."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
        netlink.send(struct.pack("=IHHII", 24, _GET_ADDRESSES, _REQUEST_DUMP, 1, 0) + bytes(8))
        while True:
            data = memoryview(netlink.recv(1 << 16))
            while len(data) >= 16:
                length, kind = struct.unpack_from("=IH", data)
                if kind != _GET_ADDRESSES - 2:  # the end of the dump, or an error; replies are RTM_NEWADDR
                    if kind != _DONE:
                        raise OSError("the kernel does not list this host's addresses over netlink")
                    return addresses
                (index,) = struct.unpack_from("=I", data, 20)
                attributes = dict(_attributes(data[24:length]))
                packed = attributes.get(_LOCAL_END) or attributes[_REMOTE_END]
                addresses[str(ipaddress.ip_address(packed))] = socket.if_indextoname(index)
                data = data[(length + 3) & ~3 :]


def _attributes(data: memoryview) -> Iterator[tuple[int, bytes]]:
    """(kind, value) of netlink attributes, each padded to four bytes."""
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind, bytes(data[4:length])
        data = data[(length + 3) & ~3 :]


def find_own_address(master: str, given: str | None = None) -> str:
    """The address by which other hosts reach this one: `given` (--host-ip, SERVE_LLM_HOST_IP), else that of the
    interface that routes to `master` (a name or address, without port).

    Returns a loopback address only if `master` is written as one: then all "hosts" are this machine.
    Raises OptionError: the address is not this host's, the master's name is unknown, or there is no route to it.
    """
    if given is not None:
        if given not in list_addresses():
            raise OptionError(f"--host-ip {given} is not an address of this host, which has {_describe_addresses()}")
        return given
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(master, 1, type=socket.SOCK_DGRAM)[0]
    except OSError as error:
        raise OptionError(f"--master-addr {master}: {error.strerror} on {socket.gethostname()}; give an IP") from None
    with socket.socket(family, kind, protocol) as unsent:
        try:
            unsent.connect(target)  # only looks up the route for datagrams
        except OSError as error:
            raise OptionError(
                f"no route from this host to the master {master} ({target[0]}): {error.strerror}; this host has "
                f"{_describe_addresses()}; give --master-addr in a network that all hosts share"
            ) from None
        address = str(unsent.getsockname()[0])
    if ipaddress.ip_address(address).is_loopback and not _is_loopback(master):
        raise OptionError(
            f"--master-addr {master} is {target[0]} on {socket.gethostname()}, which other hosts cannot reach: "
            "give its IP instead of its name (or correct /etc/hosts)"
        )
    return address


def _is_loopback(written: str) -> bool:
    try:
        return ipaddress.ip_address(written).is_loopback
    except ValueError:
        return written == "localhost"


def _describe_addresses() -> str:
    return ", ".join(f"{address} ({name})" for address, name in list_addresses().items())


def find_interface(address: str) -> str:
    """The name of the interface that has the address, as for GLOO_SOCKET_IFNAME (for NCCL_SOCKET_IFNAME put `=` before
    it). Raises OptionError."""
    try:
        return list_addresses()[address]
    except KeyError:
        raise OptionError(f"{address} is not an address of this host, which has {_describe_addresses()}") from None


def read_mtu(interface: str) -> int:
    """The MTU of an interface in bytes. Raises OSError."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFMTU, struct.pack("16si12x", interface.encode(), 0))
    return int(struct.unpack_from("i", answer, 16)[0])


def host_id() -> str:
    """Equal for processes that share memory and process ids; different for two containers or namespaces of one kernel.
    Stable until the host or container restarts."""
    try:
        kernel = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        kernel = socket.gethostname()
    spaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid")]
    return " ".join([kernel, *spaces, f"shm:{os.stat('/dev/shm').st_dev}"])


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Versions and model files, which must be equal on all hosts."""

    host: str  # for messages; not compared
    serve_llm: str
    python: str  # major.minor
    torch: str
    config: str = ""  # hash of config.json
    weights: str = ""  # hash of the safetensors files: names, sizes, headers and index; of a GGUF file: its size


_TITLES = {"serve_llm": "serve-llm", "config": "config.json", "weights": "model weights"}


def fingerprint(model: Path | None) -> Fingerprint:
    """The fingerprint of this host. model: the checkpoint directory, None to omit the model. Reads headers, no weights.
    Raises ModelError if a file of the model is missing or truncated."""
    return Fingerprint(
        host=socket.gethostname(),
        serve_llm=version("serve-llm"),
        python=".".join(platform.python_version_tuple()[:2]),
        torch=version("torch"),
        config=_hash(_read(model / "config.json")) if model else "",
        weights=_weights_hash(model) if model else "",
    )


def difference(all_hosts: Sequence[Fingerprint], names: Sequence[str] | None = None) -> str | None:
    """Describe in one line how hosts differ from the first one; None if all are equal. names: host names to show
    (default: node number and host name)."""
    if names is None:
        names = [f"node {node} ({one.host})" for node, one in enumerate(all_hosts)]
    differences = []
    for name, other in zip(names[1:], all_hosts[1:], strict=True):
        for field in msgspec.structs.fields(Fingerprint)[1:]:
            here = getattr(all_hosts[0], field.name)
            there = getattr(other, field.name)
            if here != there:
                title = _TITLES.get(field.name, field.name)
                differences.append(f"{name} has {title} {there or 'none'}, {names[0]} has {here or 'none'}")
    return "; ".join(differences) or None


def _weights_hash(directory: Path) -> str:
    paths = sorted(directory.glob("*.safetensors"))
    index = directory / INDEX
    parts = []
    if index.is_file():
        listed = read_json(index).get("weight_map")
        if not isinstance(listed, dict):
            raise ModelError(f"{index} has no weight_map")
        parts.append(_read(index))
        paths = [directory / name for name in sorted({Path(str(name)).name for name in listed.values()})]
    for link in list_links(directory):  # config.json names their tensors
        parts.append(f"{link.name} {_size(link)}".encode())
    for path in paths:
        parts += [f"{path.name} {_size(path)}".encode(), _header(path)]
    return _hash(*parts)


def _header(path: Path) -> bytes:
    """The JSON header of a safetensors file: names, types, shapes and offsets of all tensors."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = file.read(length) if length <= _size(path) - 8 else b""
    except (OSError, struct.error) as error:
        raise ModelError(f"cannot read {path}: {error}") from None
    if len(header) != length:
        raise ModelError(f"{path} is not a complete safetensors file; was it truncated when it was copied?")
    return header


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelError(f"cannot read {path}: {error.strerror}") from None


def _hash(*parts: bytes) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:12]
