"""Attention by FlashAttention-3 (arXiv:2407.08608) on Hopper GPUs, in vLLM's build of it.

The native code comes from the Hugging Face Hub through the package `kernels`, so it is used only if the extra
`serve-llm[cuda]` is installed. `kernels` refuses publishers that the Hub does not trust, and asks the Hub at each start
which commit REVISION is now, unless HF_HUB_OFFLINE=1 makes it take what the cache has. The log names the commit.

It computes prompts and decodes in one launch. A plan divides keys among the GPU's multiprocessors; it is computed on
the device from the lengths, once per step and KV group, and again in each replay of a captured step. A row's bits
depend on the rest of the batch. Unlike `paged_attention`, it reads masked values with weight 0, so the cache must not
contain NaN there: `allocate_cache` fills it with zeros.
"""

from __future__ import annotations

import importlib
import logging
import re
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Protocol

import torch
from torch import Tensor

from serve_llm.kernels import attention
from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.backends.backend import AttentionForm, BackendRequirements, Offer

logger = logging.getLogger(__name__)

REPOSITORY = "kernels-community/vllm-flash-attn3"
REVISION = "v1"  # branch with this version of the interface
DTYPES = (torch.bfloat16, torch.float16)
LATENT = (576, 512)  # the only head_dim and value_dim of latent caches
TOLERANCE = 0.02  # share of the largest result: each factor is rounded to 8 bits or more


class FlashLibrary(Protocol):
    """The part of the Hub package that is used. Arguments are passed by name."""

    def flash_attn_with_kvcache(self, **arguments: Any) -> Tensor: ...

    def get_scheduler_metadata(self, **arguments: Any) -> Tensor | None: ...


def offer(requirements: BackendRequirements) -> Offer:
    """See `Offer`. Runs each form once, and offers nothing if the results differ from those of `kernels.attention`."""
    if requirements.batch_invariant:
        return "its results depend on the rest of the batch, which --batch-invariant rules out"
    if requirements.capability is None or requirements.capability[0] != 9:
        found = "no GPU" if requirements.capability is None else "{}.{}".format(*requirements.capability)
        return f"it needs a GPU of compute capability 9.0 (H100, H200); found: {found}"
    if requirements.dtype not in DTYPES:
        return f"it computes bfloat16 and float16, not {str(requirements.dtype).removeprefix('torch.')}"
    if requirements.cache_dtype not in (None, requirements.dtype):
        return "it would round queries to 8 bits as well to read a KV cache in fp8"
    for form in sorted(requirements.attention_forms, key=repr):
        if obstacle := _find_obstacle(form):
            return obstacle
    try:
        library = load_library()
    except ImportError:
        return "the extra serve-llm[cuda] is not installed"
    except Exception as error:  # raised for the network, the Hub, files in its cache, or the linker
        return f"{REPOSITORY} cannot be loaded: {_first_line(error)}"
    paged_attention = FlashAttention(library)
    for form in sorted(requirements.attention_forms, key=repr):
        try:
            is_right = try_form(paged_attention, form, requirements)
        except Exception as error:  # rejected by native code
            return f"it failed in a trial: {_first_line(error)}"
        if not is_right:
            return f"its results were wrong in a trial with heads of {form.head_dim}"
    logger.info("FlashAttention-3: commit %s of %s (%s)", find_commit(library) or "unknown", REPOSITORY, REVISION)
    return {"paged_attention": paged_attention}


def load_library() -> FlashLibrary:
    """Raises ImportError without the package `kernels`, and anything that the package raises."""
    get_kernel = getattr(importlib.import_module("kernels"), "get_kernel", None)
    if get_kernel is None:
        raise ImportError("a different package is called kernels")
    library: FlashLibrary = get_kernel(REPOSITORY, revision=REVISION)
    return library


def find_commit(library: FlashLibrary) -> str | None:
    """The commit from which `kernels` loaded the library, which is the name of a folder of the Hub's cache."""
    found = re.search(r"/snapshots/([0-9a-f]{40})/", str(getattr(library, "__file__", "")))
    return None if found is None else found.group(1)


class FlashAttention:
    """A version of `kernels.attention.paged_attention` without ALiBi."""

    def __init__(self, library: FlashLibrary) -> None:
        self._library = library

    def __call__(
        self,
        query: Tensor,
        cache: Tensor,
        block_table: Tensor,
        query_starts: Sequence[int],
        context_lens: Sequence[int],
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        alibi_slopes: Tensor | None = None,
        value_dim: int | None = None,
        on_device: Lengths,
    ) -> Tensor:
        assert alibi_slopes is None
        keys = cache[:, 0].transpose(1, 2)  # (blocks, block_size, kv_heads, head_dim)
        latent_query = None
        if value_dim is None:
            values = cache[:, 1].transpose(1, 2)
        else:  # the rotated parts of queries and keys, and apart from them those that are values as well
            latent_query = query[..., :value_dim]
            query = query[..., value_dim:]
            values = keys[..., :value_dim]
            keys = keys[..., value_dim:]
        # The lists are upper bounds: a sequence with several queries may have all of them.
        is_decode = all(end - start <= 1 for start, end in pairwise(query_starts))
        max_queries = 1 if is_decode else query_starts[-1]
        shape: dict[str, Any] = {
            "max_seqlen_q": max_queries,
            "cu_seqlens_q": on_device.query_starts,
            "cache_seqlens": on_device.context_lens,
            "causal": True,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "num_splits": 0,  # the library chooses
        }
        plan_key = ("flash", query.shape[1:], keys.shape[1:], block_table.shape[1], value_dim, window, softcap)
        if plan_key not in on_device.plans:
            on_device.plans[plan_key] = self._library.get_scheduler_metadata(
                batch_size=len(query_starts) - 1,
                max_seqlen_k=block_table.shape[1] * keys.shape[1],
                num_heads_q=query.shape[1],
                num_heads_kv=keys.shape[2],
                headdim=keys.shape[3],
                headdim_v=values.shape[3],
                qkv_dtype=query.dtype,
                page_size=keys.shape[1],
                has_softcap=softcap is not None,
                **shape,
            )
        return self._library.flash_attn_with_kvcache(
            q=query,
            k_cache=keys,
            v_cache=values,
            qv=latent_query,
            page_table=block_table,
            softmax_scale=scale,
            softcap=softcap or 0.0,
            scheduler_metadata=on_device.plans[plan_key],
            s_aux=None if sinks is None else sinks.bfloat16(),  # as gpt-oss stores them
            **shape,
        )


def try_form(paged_attention: FlashAttention, form: AttentionForm, requirements: BackendRequirements) -> bool:
    """Whether the results are correct for a decode, a prompt after a cached prefix, and padding."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(requirements.dtype)

    counts = (1, 9, 1)
    contexts = (37, 20, 0)
    heads, kv_heads, parts = (16, 1, 1) if form.value_dim is not None else (4, 2, 2)
    starts = [0, *torch.tensor(counts).cumsum(0).tolist()]
    query = draw(starts[-1], heads, form.head_dim)
    layers = draw(7, 3, parts, kv_heads, 16, form.head_dim)  # a block holds all layers
    table = torch.tensor([[4, 2, 6], [1, 5, 0], [0, 0, 0]], dtype=torch.int32)
    how: dict[str, Any] = {
        "scale": form.head_dim**-0.5,
        "window": 11 if form.has_window else None,
        "softcap": 3.0 if form.has_softcap else None,
        "sinks": torch.arange(heads) / 8.0 if form.has_sinks else None,
        "value_dim": form.value_dim,
    }
    exact = attention.paged_attention(
        query[: starts[2]].float(), layers[:, 1].float(), table[:2], starts[:3], contexts[:2], **how
    )
    device = requirements.device
    if how["sinks"] is not None:
        how["sinks"] = how["sinks"].to(device)
    lengths = Lengths(
        torch.tensor(starts, dtype=torch.int32, device=device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
    )
    found = paged_attention(
        query.to(device),
        layers.to(device)[:, 1],
        table.to(device),
        starts,
        contexts,
        on_device=lengths,
        **how,
    ).cpu()
    is_close = (found[: starts[2]].float() - exact).abs().max() <= TOLERANCE * exact.abs().max()
    return bool(is_close) and not found[starts[2] :].any()


def _find_obstacle(form: AttentionForm) -> str | None:
    """The reason why it does not support this form; None if it does."""
    if form.has_alibi:
        return "it has no ALiBi"
    if form.value_dim is not None:
        if (form.head_dim, form.value_dim) != LATENT:
            return f"its latent attention has rows of {LATENT[0]} numbers, not {form.head_dim}"
    elif form.head_dim % 8 or form.head_dim > 256:
        return f"it has no heads of {form.head_dim} numbers"
    return None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
