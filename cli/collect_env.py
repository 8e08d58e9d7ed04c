"""`serve-llm collect-env`: print versions, processor, GPUs and settings, for a bug report. Keys and tokens are hidden.

It runs as a separate program because it imports torch.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from serve_llm.common.errors import OptionError
from serve_llm.common.logs import write_final_error

PACKAGES = (
    "serve-llm torch triton transformers tokenizers safetensors huggingface-hub llguidance numpy fastapi uvicorn "
    "uvloop pydantic pyzmq msgspec ray nvidia-nccl-cu13 opentelemetry-sdk"
).split()
_VARIABLES = re.compile(r"(SERVE_LLM|HF|CUDA|NCCL|GLOO|OMP|GOMP|KMP|MKL|ONEDNN|TORCH|TRITON|RAY|OTEL)_|LD_PRELOAD$")
_SECRETS = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|HEADERS")
_URL_USER = re.compile(r"//[^/@\s]*@")
_CPU_FLAGS = ("avx2", "avx512f", "avx_vnni", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8")
_GPU_QUERY = "--query-gpu=index,name,driver_version,memory.total,compute_cap,mig.mode.current"


def create_parser() -> argparse.ArgumentParser:
    description = "Print versions, processor, GPUs, limits and settings, for a bug report. Keys and tokens are hidden."
    return argparse.ArgumentParser("serve-llm collect-env", description=description)


def collect(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Names and values for the report, in the order in which they are printed."""
    yield "Python", f"{platform.python_version()} ({sys.executable})"
    yield "system", f"{read_system_name()}, {platform.platform()}"
    for name in PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue
    yield from _describe_processor(Path("/proc/cpuinfo").read_text())
    yield "kernels", describe_kernels()
    yield from _describe_memory()
    yield from describe_gpus()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield "open files", f"{soft} (at most {hard})"
    yield from list_settings(environ)


def read_system_name(file: Path = Path("/etc/os-release")) -> str:
    try:
        found = re.search(r'^PRETTY_NAME="?([^"\n]*)', file.read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found.group(1) if found else "unknown system"


def _describe_processor(cpuinfo: str) -> Iterator[tuple[str, str]]:
    from serve_llm.engine.worker.cpu_threads import count_usable_cores

    fields = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in cpuinfo.splitlines())}
    name = fields.get("model name", platform.machine())
    yield "processor", f"{name}, {os.cpu_count()} cores, {count_usable_cores()} of them usable"
    flags = fields.get("flags", "").split()
    yield "instructions", " ".join(flag for flag in _CPU_FLAGS if flag in flags) or "none of those that kernels use"


def describe_kernels() -> str:
    """The variant of the CPU kernels in use, or why there is none."""
    from serve_llm.kernels.cpu.library import Library, find

    path = find()
    if path is None:
        return "none compiled: plain torch operations, which are much slower"
    try:
        library = Library(path)
    except (OSError, ValueError) as error:
        return f"unusable: {error}"
    missing = f"; not compiled: {', '.join(library.missing)}" if library.missing else ""
    return f"{library.variant} of {', '.join(library.variants)} ({path.name}){missing}"


def _describe_memory() -> Iterator[tuple[str, str]]:
    from serve_llm.engine.worker.kv_cache import find_free_memory

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    yield "memory", f"{total / 2**30:.1f} GiB, {find_free_memory() / 2**30:.1f} GiB of it free for this process"
    try:
        yield "/dev/shm", f"{shutil.disk_usage('/dev/shm').total / 2**30:.1f} GiB"
    except OSError as error:
        yield "/dev/shm", f"none: {error.strerror}"


def describe_gpus() -> Iterator[tuple[str, str]]:
    """What nvidia-smi lists and, if torch cannot use it, why."""
    import torch

    from serve_llm.engine.gpu_software import explain_unusable_gpus, read_gpu_software

    command = ["nvidia-smi", _GPU_QUERY, "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        yield "GPUs", "none found (no nvidia-smi that answers)"
        return
    if done.returncode != 0:
        yield "GPUs", " ".join(f"none found: {done.stdout} {done.stderr}".split())
        return
    yield from (("GPU", line) for line in done.stdout.strip().splitlines())
    yield "CUDA of torch", str(torch.version.cuda)
    if not torch.cuda.is_available():
        yield "GPUs of torch", explain_unusable_gpus(read_gpu_software()) or "none, though nvidia-smi lists some"


def list_settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The variables that affect the program; for secret ones, only that they are set."""
    for name in sorted(environ):
        if _VARIABLES.match(name):
            yield name, "(set)" if _SECRETS.search(name) else _URL_USER.sub("//(hidden)@", environ[name])


def main(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Returns the exit code."""
    unknown = create_parser().parse_known_args(argv)[1]
    if unknown:
        write_final_error(OptionError(f"collect-env: unexpected argument {unknown[0]!r}; it takes none"))
        return 2
    for name, value in collect(environ):
        sys.stdout.write(f"{name:<18} {value}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:], os.environ))
