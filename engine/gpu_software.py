"""Software that a host's GPUs need: a driver that fits torch, and a compiler for Triton's launchers.

Torch-free, so that it can be used before torch is imported, and by `serve-llm check`.
"""

from __future__ import annotations

import os
import re
import shutil
import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

DRIVER_FILE = Path("/proc/driver/nvidia/version")
MIN_DRIVERS = {12: 525, 13: 580}  # major version of CUDA -> lowest driver version that runs all its minor versions


class GpuSoftware(NamedTuple):
    driver: str | None  # version; None if none is loaded
    torch: str  # version
    cuda: str | None  # version that torch was built for; None without CUDA


def read_gpu_software(driver_file: Path = DRIVER_FILE) -> GpuSoftware:
    """Read the versions from files."""
    try:
        found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", driver_file.read_text())
    except OSError:
        found = None
    spec = find_spec("torch")  # does not import it
    assert spec is not None and spec.origin is not None, "torch is a requirement"
    values = dict(re.findall(r"^(__version__|cuda)\b[^=]*= *'([^']*)'", _read_version_file(spec.origin), re.MULTILINE))
    return GpuSoftware(found.group() if found else None, values.get("__version__", "?"), values.get("cuda"))


def _read_version_file(origin: str) -> str:
    return Path(origin).with_name("version.py").read_text()


def explain_unusable_gpus(software: GpuSoftware) -> str | None:
    """Explain why torch cannot use the GPUs of this host, with a remedy; None if the versions do not explain it."""
    driver, torch, cuda = software
    if cuda is None:
        return f"torch {torch} was built without CUDA; install the wheel of torch {torch.partition('+')[0]} from PyPI"
    if driver is None:
        return (
            f"torch {torch} finds no NVIDIA driver; load it (nvidia-smi tells whether it runs), and start a container "
            "with --gpus all"
        )
    least = MIN_DRIVERS.get(int(cuda.partition(".")[0]))
    if least is not None and int(driver.partition(".")[0]) < least:
        return (
            f"torch {torch} is built for CUDA {cuda}, which needs driver {least} or newer, but this host has {driver}; "
            "update the driver"
        )
    return None


def find_missing_compiler() -> str | None:
    """Name what Triton lacks to compile the launchers of its kernels, with a remedy; None if nothing is missing."""
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        return "Triton needs a C compiler at run time but finds none; install gcc and libc6-dev, or set CC"
    include = Path(sysconfig.get_paths(scheme="posix_prefix")["include"])
    if not (include / "Python.h").is_file():
        return f"Triton needs Python.h at run time, and {include} has none; install python3-dev of the same version"
    return None
