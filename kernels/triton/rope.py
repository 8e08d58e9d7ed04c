"""Head norms, rope and the cache write of an attention layer in one launch, in Triton.

Contracts: the functions of the same names in `kernels/rope.py`. A program has one token and a few heads that are all
queries, all keys or all values:

    heads of a token   q0 .. q7 | q8 .. q13  .  . | k0  k1  .  .  .  . | v0  v1  .  .  .  .       (. masked)
    program            0        | 1               | 2                  | 3

so it reads the token's angles once for all its heads, and all its heads take the same branches. For latent attention
the first program of a token writes the cache row, and the others rotate the query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels import cache_fp8
from serve_llm.kernels.rope import Angles, HeadNorms

ELEMENTS = 1024  # per program
LARGEST = tl.constexpr(cache_fp8.LARGEST)
ELEMENTS_PER_THREAD = 16  # 8 of each half of a head, so that a load of a 16-bit type has 16 bytes


def rope_and_cache(
    qkv: Tensor,
    heads: int,
    norms: HeadNorms | None,
    angles: Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    tokens = qkv.shape[0]
    _, _, kv_heads, block_size, head_dim = cache.shape
    query = qkv.new_empty((tokens, heads, head_dim))
    tile, half, num_warps = _tile_sizes(max(heads, kv_heads), head_dim)
    grid = (tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile))
    cos, sin = angles or (None, None)
    query_norm, key_norm, eps = norms or (None, None, 0.0)
    if tokens:
        _rope_and_cache[grid](
            qkv,
            query,
            cache,
            slots,
            cos,
            sin,
            query_norm,
            key_norm,
            cache_scales,
            eps,
            qkv.stride(0),
            cache.stride(0),
            cache.stride(1),
            cache.stride(2),
            cache.stride(3),
            HEADS=heads,
            KV_HEADS=kv_heads,
            HEAD_DIM=head_dim,
            BLOCK_SIZE=block_size,
            TILE=tile,
            HALF=half,
            num_warps=num_warps,
        )
    return query


def rope_and_latent(
    query: Tensor,
    latent: Tensor,
    norm: Tensor,
    eps: float,
    angles: Angles | None,
    cache: Tensor,
    slots: Tensor,
    cache_scales: Tensor | None = None,
) -> Tensor:
    tokens, heads, rope_dim = query.shape
    rotated = query.new_empty(query.shape)
    tile, half, num_warps = _tile_sizes(heads, rope_dim)
    cos, sin = angles or (None, None)
    if tokens:
        _rope_and_latent[(tokens, 1 + triton.cdiv(heads, tile))](
            query,
            latent,
            norm,
            rotated,
            cache,
            slots,
            cos,
            sin,
            cache_scales,
            eps,
            query.stride(0),
            query.stride(1),
            latent.stride(0),
            cache.stride(0),
            cache.stride(3),
            HEADS=heads,
            ROPE_DIM=rope_dim,
            RANK=norm.shape[0],
            BLOCK_SIZE=cache.shape[3],
            TILE=tile,
            HALF=half,
            RANK_BLOCK=triton.next_power_of_2(norm.shape[0]),
            num_warps=num_warps,
        )
    return rotated


def _tile_sizes(heads: int, head_dim: int) -> tuple[int, int, int]:
    """Return the heads of a program, the padded size of half a head, and the warps."""
    half = triton.next_power_of_2(triton.cdiv(head_dim, 2))
    tile = min(max(ELEMENTS // (2 * half), 1), triton.next_power_of_2(heads))
    return tile, half, max(2 * tile * half // (32 * ELEMENTS_PER_THREAD), 1)


@triton.jit
def _rope_and_cache(
    qkv,
    query,
    cache,
    slots,
    cos,
    sin,
    query_norm,
    key_norm,
    cache_scales,
    eps,
    qkv_row,
    cache_block,
    cache_part,
    cache_head,
    cache_offset,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    query_tiles: tl.constexpr = (HEADS + TILE - 1) // TILE
    kv_tiles: tl.constexpr = (KV_HEADS + TILE - 1) // TILE
    middle: tl.constexpr = (HEAD_DIM + 1) // 2
    is_query = tile < query_tiles
    is_value = tile >= query_tiles + kv_tiles
    count = tl.where(is_query, HEADS, KV_HEADS)
    first_head = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    first_tile = tl.where(is_query, 0, tl.where(is_value, query_tiles + kv_tiles, query_tiles))
    head = (tile - first_tile) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, HALF)[None, :]
    in_left = (head < count) & (column < middle)
    in_right = (head < count) & (column < HEAD_DIM - middle)
    source = qkv + token * qkv_row + (first_head + head) * HEAD_DIM + column
    left = tl.load(source, mask=in_left, other=0.0)  # (TILE, HALF): the first half of each head
    right = tl.load(source + middle, mask=in_right, other=0.0)

    if query_norm is not None:
        if is_query:
            left, right = _norm_heads(left, right, query_norm, column, eps, HEAD_DIM, middle)
        elif not is_value:
            left, right = _norm_heads(left, right, key_norm, column, eps, HEAD_DIM, middle)
    if cos is not None:
        if not is_value:
            left, right = _rotate(left, right, cos + token * middle, sin + token * middle, column, middle)

    if is_query:
        target = query + (token * HEADS + head) * HEAD_DIM + column
        tl.store(target, left, mask=in_left)
        tl.store(target + middle, right, mask=in_right)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = cache + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_offset
            target = row + tl.where(is_value, cache_part, 0) + head.to(tl.int64) * cache_head + column
            scale = tl.where(is_value, KV_HEADS, 0) + tl.minimum(head, KV_HEADS - 1)
            tl.store(target, _round_to(left, cache, cache_scales, scale), mask=in_left)
            tl.store(target + middle, _round_to(right, cache, cache_scales, scale), mask=in_right)


@triton.jit
def _round_to(values, target, cache_scales, scale):
    """Convert the values to the dtype of the tensor or pointers `target`; see `kernels.cache_fp8`.

    scale: index of the values' scale, if there are cache_scales.
    """
    if target.dtype.scalar.element_ty == tl.float8e4nv:
        values = values.to(tl.float32)
        if cache_scales is not None:
            values = values / tl.load(cache_scales + scale)
        values = tl.where(values > LARGEST, LARGEST, tl.where(values < -LARGEST, -LARGEST, values))  # keeps NaN
    return values.to(target.dtype.scalar.element_ty)


@triton.jit
def _norm_heads(left, right, weight, column, eps, HEAD_DIM: tl.constexpr, middle: tl.constexpr):
    """Apply the RMS norm to each head, rounded where `kernels.norm.rms_norm` rounds."""
    first = left.to(tl.float32)
    second = right.to(tl.float32)
    squares = tl.sum(first * first, 1) + tl.sum(second * second, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    first = first * scale
    second = second * scale
    if weight.dtype.element_ty == left.dtype:
        first = first.to(left.dtype).to(tl.float32)
        second = second.to(right.dtype).to(tl.float32)
    first *= tl.load(weight + column, mask=column < middle, other=0.0).to(tl.float32)
    second *= tl.load(weight + middle + column, mask=column < HEAD_DIM - middle, other=0.0).to(tl.float32)
    return first.to(left.dtype), second.to(right.dtype)


@triton.jit
def _rotate(left, right, cos, sin, column, middle: tl.constexpr):
    """Rotate each pair (left, right) by its angle."""
    cosine = tl.load(cos + column, mask=column < middle, other=0.0)
    sine = tl.load(sin + column, mask=column < middle, other=0.0)
    first = left.to(tl.float32)
    second = right.to(tl.float32)
    return (first * cosine - second * sine).to(left.dtype), (second * cosine + first * sine).to(right.dtype)


@triton.jit
def _rope_and_latent(
    query,
    latent,
    norm,
    rotated,
    cache,
    slots,
    cos,
    sin,
    cache_scales,
    eps,
    query_row,
    query_head,
    latent_row,
    cache_block,
    cache_offset,
    HEADS: tl.constexpr,
    ROPE_DIM: tl.constexpr,
    RANK: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr,
    HALF: tl.constexpr,
    RANK_BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    column = tl.arange(0, HALF)[None, :]
    if tile == 0:
        slot = tl.load(slots + token)
        if slot >= 0:
            source = latent + token * latent_row
            row = cache + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_offset
            dim = tl.arange(0, RANK_BLOCK)
            mask = dim < RANK
            values = tl.load(source + dim, mask=mask, other=0.0).to(tl.float32)
            values *= tl.rsqrt(tl.sum(values * values, 0) / RANK + eps)
            weight = tl.load(norm + dim, mask=mask, other=0.0).to(tl.float32)
            rounded = values.to(latent.dtype.element_ty).to(tl.float32) * weight
            stored = _round_to(rounded.to(latent.dtype.element_ty), cache, cache_scales, 0)
            tl.store(row + dim, stored, mask=mask)
            key = source + RANK + column
            target = row + RANK + column
            _copy_rotated(key, target, column >= 0, cos, sin, token, column, cache_scales, ROPE_DIM)
    else:
        head = (tile - 1) * TILE + tl.arange(0, TILE)[:, None]
        source = query + token * query_row + head * query_head + column
        target = rotated + (token * HEADS + head) * ROPE_DIM + column
        _copy_rotated(source, target, head < HEADS, cos, sin, token, column, None, ROPE_DIM)


@triton.jit
def _copy_rotated(source, target, mask, cos, sin, token, column, cache_scales, ROPE_DIM: tl.constexpr):
    """Copy heads, one per row, and rotate them if there are angles."""
    middle: tl.constexpr = (ROPE_DIM + 1) // 2
    in_left = mask & (column < middle)
    in_right = mask & (column < ROPE_DIM - middle)
    left = tl.load(source, mask=in_left, other=0.0)
    right = tl.load(source + middle, mask=in_right, other=0.0)
    if cos is not None:
        left, right = _rotate(left, right, cos + token * middle, sin + token * middle, column, middle)
    tl.store(target, _round_to(left, target, cache_scales, 0), mask=in_left)
    tl.store(target + middle, _round_to(right, target, cache_scales, 0), mask=in_right)
