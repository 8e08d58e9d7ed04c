"""Environment variables that torch's libraries read when an engine or worker process starts."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec


def set_library_defaults(environ: MutableMapping[str, str]) -> None:
    """Set the variables that the environment of a new process lacks."""
    if find_spec("serve_llm.kernels.cpu.compiled") is not None:
        # The compiled kernels have their own threads. torch's OpenMP threads have little to do and must not spin.
        environ.setdefault("OMP_WAIT_POLICY", "passive")
    # On AVX2, MKL's float32 products otherwise give a row other bits among few rows than among many.
    environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # Hide warnings: torch's store prints one per rank on a host whose address has no name.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
