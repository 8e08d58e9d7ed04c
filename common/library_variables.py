"""Environment variables that torch's libraries read when an engine or worker process starts."""

from __future__ import annotations

from collections.abc import MutableMapping
from importlib.util import find_spec


def set_library_defaults(environ: MutableMapping[str, str]) -> None:
    """Set those variables that are missing from the environment of a new process."""
    if find_spec("serve_llm.kernels.cpu.compiled") is not None:
        # The compiled kernels have their own threads, so torch's OpenMP threads are mostly idle and must not spin.
        environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Without this, a row of MKL's float32 products on AVX2 has different bits in small and in large batches.
    environ.setdefault("MKL_CBWR", "AUTO,STRICT")
    # Hide warnings: torch's store prints one per rank on a host whose address has no name.
    environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
