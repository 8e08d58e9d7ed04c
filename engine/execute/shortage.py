"""Memory that runs out, said in the user's words: a start that does not fit, a step that took too much.

Knows how torch and numpy complain, nothing of models.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator

import torch

from serve_llm.engine.errors import CapacityError, EngineError, ServeError

_REMEDIES: dict[type[ServeError], str] = {
    CapacityError: "lower --kv-cache-memory, --gpu-memory-utilization, --max-num-seqs or --max-model-len, or use more "
    "ranks",  # at start
    EngineError: "lower --max-num-batched-tokens, --max-num-seqs, --kv-cache-memory or --gpu-memory-utilization",
}
_SHORTAGE = re.compile("can't allocate memory|out of memory|CUBLAS_STATUS_ALLOC_FAILED")
_ADDED = re.compile(" Including non-PyTorch memory| Search for `cuda| CUDA kernel errors might be")


@contextlib.contextmanager
def told_as(kind: type[ServeError], when: str) -> Iterator[None]:
    """Raises `kind`, CapacityError or EngineError, where memory runs out inside. when: such as "in a step"."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not _is_shortage(error):
            raise
        raise kind(f"out of memory {when}: {_words(error)}; {_REMEDIES[kind]}") from error


def _is_shortage(error: Exception) -> bool:
    # torch's allocator of CPU memory raises a RuntimeError like any other; so does what allocates by itself on a GPU:
    # a captured graph, a Triton kernel when it is loaded, cuBLAS.
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or _SHORTAGE.search(str(error)) is not None


def _words(error: Exception) -> str:
    """What was asked for, without the statistics and the advice that torch adds."""
    text = " ".join(str(error).split()) or type(error).__name__
    return _ADDED.split(text, maxsplit=1)[0].rstrip(".")
