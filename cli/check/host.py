"""The facts about one host: limits, versions, model files. Imports no torch, changes nothing, downloads nothing."""

from __future__ import annotations

import os
import resource
import socket

import msgspec

from serve_llm.cli.check.invariance import InvarianceReport, check_invariance
from serve_llm.common import hosts
from serve_llm.common.errors import ModelError
from serve_llm.common.hub import resolve_model
from serve_llm.engine.gpu_software import explain_unusable_gpus, find_missing_compiler, read_gpu_software


class HostReport(msgspec.Struct, frozen=True, kw_only=True):
    rank: int
    name: str
    address: str  # address at which the other hosts reach it
    interface: str  # with that address
    mtu: int  # the interface's, in bytes
    probe_port: int  # where its `probe.ProbeServer` listens
    shm_bytes: int  # size of /dev/shm
    open_files: int  # hard limit, to which the server raises the soft one; -1 if there is none
    locked_memory: int  # soft limit in bytes; -1 if there is none
    cores: int  # available to this process
    gpus: int
    gpu_problem: str = ""  # why torch or Triton cannot use them
    infiniband: bool
    fingerprint: hosts.Fingerprint
    model_error: str = ""  # why the model files cannot be used
    invariance: InvarianceReport | None = None  # for the model's linear layers; None on a host with GPUs


def inspect_host(rank: int, address: str, probe_port: int, model: str | None) -> HostReport:
    """Report on this host. Raises OptionError if the address does not belong to it."""
    interface = hosts.find_interface(address)
    error = ""
    gpus = _count_entries("/proc/driver/nvidia/gpus")
    gpu_problem = (explain_unusable_gpus(read_gpu_software()) or find_missing_compiler() or "") if gpus else ""
    invariance = None
    try:
        directory = resolve_model(model, cached_only=True) if model else None
        fingerprint = hosts.fingerprint(directory)
        if directory is not None and gpus == 0:
            invariance = check_invariance(directory)
    except ModelError as problem:
        fingerprint = hosts.fingerprint(None)
        error = str(problem)
    return HostReport(
        rank=rank,
        name=socket.gethostname(),
        address=address,
        interface=interface,
        mtu=hosts.read_mtu(interface),
        probe_port=probe_port,
        shm_bytes=_read_shm_bytes(),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[1],
        locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        cores=len(os.sched_getaffinity(0)),
        gpus=gpus,
        gpu_problem=gpu_problem,
        infiniband=_count_entries("/sys/class/infiniband") > 0,
        fingerprint=fingerprint,
        model_error=error,
        invariance=invariance,
    )


def _read_shm_bytes() -> int:
    try:
        status = os.statvfs("/dev/shm")
    except OSError:
        return 0
    return status.f_frsize * status.f_blocks


def _count_entries(folder: str) -> int:
    try:
        return len(os.listdir(folder))
    except OSError:
        return 0
