"""Translate out-of-memory errors of torch and NumPy into messages that say which options to change."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from serve_llm.common.errors import CapacityError, EngineError, ServeError

_REMEDIES: dict[type[ServeError], str] = {
    CapacityError: "lower --kv-cache-memory, --gpu-memory-utilization, --max-num-seqs or --max-model-len, or use more "
    "ranks",  # at start
    EngineError: "lower --max-num-batched-tokens, --max-num-seqs, --kv-cache-memory or --gpu-memory-utilization",
}
_OUT_OF_MEMORY = re.compile("can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_TORCH_ADVICE = re.compile(" Including non-PyTorch memory| Search for `cuda| CUDA kernel errors might be")


@contextlib.contextmanager
def translate_oom(kind: type[ServeError], when: str) -> Iterator[None]:
    """Raise `kind`, CapacityError or EngineError, if memory runs out inside. when: for the message, such as "in a
    step"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        raise kind(f"out of memory {when}: {_describe(error)}; {_REMEDIES[kind]}") from error


def _is_out_of_memory(error: Exception) -> bool:
    # torch's CPU allocator raises a plain RuntimeError; so do CUDA graphs, Triton kernels being loaded, and cuBLAS.
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _describe(error: Exception) -> str:
    """Torch's message without its statistics and advice."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _TORCH_ADVICE.split(text, maxsplit=1)[0].rstrip(".")
