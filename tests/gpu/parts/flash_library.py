"""FlashAttention-3 from vLLM's wheel, with the interface of vLLM's build on the Hub.

`wheels.py` packages the library as `vllm_fa3`. It uses torch's stable interface, so it loads into other versions of
torch than the one it was built for.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

import torch
from torch import Tensor


class FlashLibrary:
    """See `serve_llm.kernels.backends.flash_attention.FlashLibrary`. Raises ImportError without the wheel, OSError if
    it cannot be loaded."""

    def __init__(self) -> None:
        found = importlib.util.find_spec("vllm_fa3")
        if found is None or found.origin is None:
            raise ImportError("there is no package vllm_fa3 (python3 tests/gpu/wheels.py)")
        torch.ops.load_library(str(Path(found.origin).with_name("_vllm_fa3_C.abi3.so")))

    def get_scheduler_metadata(
        self,
        *,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        headdim_v: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype,
        cu_seqlens_q: Tensor,
        page_size: int,
        causal: bool,
        window_size: tuple[int, int],
        has_softcap: bool,
        num_splits: int,
    ) -> Tensor:
        sizes = batch_size, max_seqlen_q, max_seqlen_k, num_heads_q, num_heads_kv, headdim, headdim_v, qkv_dtype
        lengths = cache_seqlens, cu_seqlens_q, None, None, None, None, page_size, 0
        how = causal, *window_size, has_softcap, num_splits, None, 0
        made: Tensor = torch.ops._vllm_fa3_C.get_scheduler_metadata(*sizes, *lengths, *how)
        return made

    def flash_attn_with_kvcache(
        self,
        *,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        qv: Tensor | None,
        cache_seqlens: Tensor,
        page_table: Tensor,
        cu_seqlens_q: Tensor,
        max_seqlen_q: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        softcap: float,
        scheduler_metadata: Tensor | None,
        num_splits: int,
        s_aux: Tensor | None,
    ) -> Tensor:
        tensors = q, k_cache, v_cache, None, None, qv, None
        lengths = cu_seqlens_q, None, None, None, cache_seqlens, max_seqlen_q, None, page_table
        unused = [None] * 8  # parts of batches, padding on the left, rotations, scales of 8-bit numbers
        how = softmax_scale, causal, *window_size, softcap, True, scheduler_metadata, num_splits, None, 0, s_aux
        found: list[Tensor] = torch.ops._vllm_fa3_C.fwd(*tensors, *lengths, *unused, *how, 1, 0, None)
        return found[0]

    def attend(self, query: Tensor, key: Tensor, value: Tensor, causal: bool) -> Tensor:
        """Compute attention without a cache. query: (sequences, tokens, heads, head_dim); key and value: with kv_heads
        instead."""
        how = query.shape[3] ** -0.5, causal, -1, -1, 0.0, True, None, 1, None, 0, None
        found: list[Tensor] = torch.ops._vllm_fa3_C.fwd(query, key, value, *[None] * 20, *how, 1, 0, None)
        return found[0]


def install(folder: Path) -> None:
    """Give this process and its children a package `kernels`, whose `get_kernel` returns this library instead of
    contacting the Hub. Raises what `FlashLibrary` raises."""
    FlashLibrary()
    package = folder / "kernels" / "__init__.py"
    package.parent.mkdir()
    package.write_text("from parts.flash_library import get_kernel\n")
    sys.path.insert(0, str(folder))
    os.environ["PYTHONPATH"] = os.pathsep.join((str(folder), os.environ.get("PYTHONPATH", "")))


def get_kernel(repository: str, revision: str) -> FlashLibrary:
    """Stand in for the Hub package's function. Returns the only library for any name."""
    del repository, revision
    return FlashLibrary()
