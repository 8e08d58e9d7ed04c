"""A stand-in for vLLM's build of FlashAttention-3 on the Hub, with its signatures. Computes on a CPU and refuses the
same inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


class FlashLibrary:
    def __init__(self) -> None:
        self.plans = 0

    def get_scheduler_metadata(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> Tensor:
        assert page_size is not None and max_seqlen_k % page_size == 0
        assert len(cache_seqlens) == batch_size and cache_seqlens.dtype == torch.int32
        assert int(cache_seqlens.max()) <= max_seqlen_k
        self.plans += 1
        return torch.tensor([max_seqlen_q, max_seqlen_k, headdim + 1000 * (headdim_v or headdim)])

    def flash_attn_with_kvcache(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        k: Tensor | None = None,
        v: Tensor | None = None,
        qv: Tensor | None = None,
        rotary_cos: Tensor | None = None,
        rotary_sin: Tensor | None = None,
        cache_seqlens: Tensor | None = None,
        cache_batch_idx: Tensor | None = None,
        cache_leftpad: Tensor | None = None,
        page_table: Tensor | None = None,
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k_new: Tensor | None = None,
        max_seqlen_q: int | None = None,
        rotary_seqlens: Tensor | None = None,
        q_descale: Tensor | None = None,
        k_descale: Tensor | None = None,
        v_descale: Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        rotary_interleaved: bool = True,
        scheduler_metadata: Tensor | None = None,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
        return_softmax_lse: bool = False,
        s_aux: Tensor | None = None,
        cp_world_size: int = 1,
        cp_rank: int = 0,
        cp_tot_seqused_k: Tensor | None = None,
    ) -> Tensor:
        assert cache_seqlens is not None and page_table is not None and cu_seqlens_q is not None
        assert max_seqlen_q is not None and softmax_scale is not None and scheduler_metadata is not None
        assert q.dtype in (torch.bfloat16, torch.float16) and k_cache.dtype == v_cache.dtype == q.dtype
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1, "a copy"
        assert page_table.dtype == cu_seqlens_q.dtype == cache_seqlens.dtype == torch.int32
        assert s_aux is None or (s_aux.dtype == torch.bfloat16 and s_aux.shape == (q.shape[1],))
        assert q.shape[2] == k_cache.shape[3] and q.shape[2] % 8 == 0 and q.shape[2] <= 256
        assert (qv is None) == (v_cache.shape[3] <= 256) and causal
        headdims = k_cache.shape[3] + 1000 * v_cache.shape[3]
        assert scheduler_metadata.tolist() == [max_seqlen_q, page_table.shape[1] * k_cache.shape[1], headdims], "plan"
        counts = cu_seqlens_q.diff().tolist()
        assert max(counts) <= max_seqlen_q
        output = q.new_zeros((*q.shape[:2], v_cache.shape[3]))
        first = int(cu_seqlens_q[0])
        for sequence, count in enumerate(counts):
            rows = slice(first, first + count)
            first += count
            length = int(cache_seqlens[sequence])
            if not count or not length:
                continue
            blocks = page_table[sequence, : -(-length // k_cache.shape[1])].long()
            keys, values = (cache[blocks].flatten(0, 1)[:length].float() for cache in (k_cache, v_cache))
            queries = q[rows].float()
            if qv is not None:
                queries, keys = torch.cat((qv[rows].float(), queries), -1), torch.cat((values, keys), -1)
            group = q.shape[1] // k_cache.shape[2]
            keys, values = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", queries, keys) * softmax_scale
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            position = torch.arange(length - count, length)[:, None]
            key = torch.arange(length)[None]
            hidden = key > position
            if window_size[0] >= 0:
                hidden |= key < position - window_size[0]
            scores = scores.masked_fill(hidden, -math.inf)
            if s_aux is not None:
                scores = torch.cat((scores, s_aux.float()[:, None, None].expand(-1, count, 1)), -1)
            weights = torch.softmax(scores, -1)[..., :length]
            output[rows] = torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
        return output
