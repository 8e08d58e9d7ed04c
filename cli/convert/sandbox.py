"""Restricts this process before it reads an untrusted file: no network, no programs, limited memory and time.

Linux only: seccomp, which needs no privileges, and resource limits. The restrictions cannot be undone.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
from pathlib import Path

SYSCALLS = {  # by machine: number of seccomp(2), architecture as in linux/audit.h, forbidden calls
    "x86_64": (317, 0xC000003E, "41 42 53 57 58 59 62 101 200 234 310 311 322 425 438"),
    "aarch64": (277, 0xC00000B7, "198 199 203 117 129 130 131 221 270 271 281 425 438"),
}
"""Forbidden: socket, connect, socketpair, fork, vfork, execve, execveat, kill and tkill, ptrace, process_vm_readv and
_writev, io_uring_setup, pidfd_getfd."""
SET_MODE_FILTER = 1
ALL_THREADS = 1
NO_NEW_PRIVILEGES = 38
OTHER_ABI = 0x40000000  # from this number on, x86_64 repeats its calls
LOAD = 0x20
EQUALS = 0x15
AT_LEAST = 0x35
RETURN = 0x06
ALLOW = 0x7FFF0000
REFUSE = 0x00050000 | errno.EPERM
NUMBER_OFFSET = 0
ARCHITECTURE_OFFSET = 4


class SandboxError(Exception):
    """This system cannot restrict the process."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def restrict(memory: int, seconds: int, file_bytes: int) -> None:
    """memory: additional bytes of address space that the process may take. seconds: processor time. file_bytes: size of
    each file that it writes. Raises SandboxError."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    for kind, limit in (
        (resource.RLIMIT_AS, held + memory),
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_CORE, 0),
    ):
        _, hardest = resource.getrlimit(kind)
        lowered = limit if hardest == resource.RLIM_INFINITY else min(limit, hardest)
        resource.setrlimit(kind, (lowered, lowered))
    _forbid_calls()


def _forbid_calls() -> None:
    machine = platform.machine()
    if machine not in SYSCALLS:
        raise SandboxError(f"no list of system calls for {machine}")
    seccomp, architecture, numbers = SYSCALLS[machine]
    forbidden = [int(number) for number in numbers.split()]
    refuse_at = len(forbidden) + 5
    program = [(LOAD, 0, 0, ARCHITECTURE_OFFSET), (EQUALS, 0, refuse_at - 2, architecture), (LOAD, 0, 0, NUMBER_OFFSET)]
    for code, number in ((AT_LEAST, OTHER_ABI), *((EQUALS, number) for number in forbidden)):
        program.append((code, refuse_at - len(program) - 1, 0, number))
    program += [(RETURN, 0, 0, ALLOW), (RETURN, 0, 0, REFUSE)]
    packed = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
    libc = ctypes.CDLL(None, use_errno=True)
    filter_program = _Program(len(program), ctypes.addressof(packed))
    if libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.syscall(
        seccomp, SET_MODE_FILTER, ALL_THREADS, ctypes.byref(filter_program)
    ):
        raise SandboxError(f"seccomp: {os.strerror(ctypes.get_errno())}")
