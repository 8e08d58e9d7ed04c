"""What one host says of itself: limits, versions, model files. Torch-free, changes nothing, downloads nothing."""

from __future__ import annotations

import os
import resource
import socket
from pathlib import Path

import msgspec

from serve_llm.engine.errors import ModelError
from serve_llm.engine.hub import resolve_model
from serve_llm.engine.parallel import hosts


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    name: str
    address: str  # under which the others should reach it
    interface: str  # that has the address
    mtu: int  # of the interface, bytes
    probe_port: int  # where its `probe.Server` listens
    shm_bytes: int  # size of /dev/shm
    open_files: int  # soft limit
    locked_memory: int  # soft limit in bytes, -1: none
    cores: int  # that this process may use
    gpus: int
    infiniband: bool
    fingerprint: hosts.Fingerprint
    model_error: str = ""  # why the model has no fingerprint


def examine(rank: int, address: str, probe_port: int, model: str | None) -> HostReport:
    """This host's report. Raises OptionError if the address is not its own."""
    interface = hosts.interface_of(address)
    error = ""
    try:
        fingerprint = hosts.fingerprint(_cached(model) if model else None)
    except ModelError as problem:
        fingerprint, error = hosts.fingerprint(None), str(problem)
    return HostReport(
        rank=rank,
        name=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=hosts.mtu_of(interface),
        probe_port=probe_port,
        shm_bytes=_shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cores=len(os.sched_getaffinity(0)),
        gpus=_count("/proc/driver/nvidia/gpus"),
        infiniband=_count("/sys/class/infiniband") > 0,
        fingerprint=fingerprint,
        model_error=error,
    )


def _cached(model: str) -> Path:
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when huggingface_hub is imported, which only resolve_model does
    return resolve_model(model)


def _shm_bytes() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def _count(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0
