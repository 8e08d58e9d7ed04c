"""Head norms, rope and the cache write of an attention layer in one launch, in Triton. The contracts stand at
the functions of the same names in `kernels/rope.py`.

A program has one token and a few heads that are all queries, all keys or all values:

    heads of a token   q0 .. q7 | q8 .. q13  .  . | k0  k1  .  .  .  . | v0  v1  .  .  .  .       (. masked)
    program            0        | 1               | 2                  | 3

so it reads the token's angles once for all of them, and what is done to a head is decided for the program as a whole.
For latent attention the token's first program has its row of the cache, the others its query heads.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.rope import Angles, HeadNorms

NUMBERS = 1024  # of a program
NUMBERS_PER_THREAD = 16  # 8 of each half of a head: loads of 16 bytes of a 16-bit type


def rope_and_cache(
    qkv: Tensor, heads: int, norms: HeadNorms | None, angles: Angles | None, cache: Tensor, slots: Tensor
) -> Tensor:
    tokens = qkv.shape[0]
    _, _, kv_heads, block_size, head_dim = cache.shape
    query = qkv.new_empty((tokens, heads, head_dim))
    tile, half, num_warps = _tile(max(heads, kv_heads), head_dim)
    grid = (tokens, triton.cdiv(heads, tile) + 2 * triton.cdiv(kv_heads, tile))
    if tokens:
        _rope_and_cache[grid](
            *(qkv, query, cache, slots),
            *((None, None) if angles is None else angles),
            *((None, None, 0.0) if norms is None else norms),
            *(qkv.stride(0), *cache.stride()[:4]),
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
    query: Tensor, latent: Tensor, norm: Tensor, eps: float, angles: Angles | None, cache: Tensor, slots: Tensor
) -> Tensor:
    tokens, heads, rope_dim = query.shape
    turned = query.new_empty(query.shape)
    tile, half, num_warps = _tile(heads, rope_dim)
    if tokens:
        _rope_and_latent[(tokens, 1 + triton.cdiv(heads, tile))](
            *(query, latent, norm, turned, cache, slots),
            *((None, None) if angles is None else angles),
            *(eps, query.stride(0), query.stride(1), latent.stride(0), cache.stride(0), cache.stride(3)),
            HEADS=heads,
            ROPE_DIM=rope_dim,
            RANK=norm.shape[0],
            BLOCK_SIZE=cache.shape[3],
            TILE=tile,
            HALF=half,
            RANK_BLOCK=triton.next_power_of_2(norm.shape[0]),
            num_warps=num_warps,
        )
    return turned


def _tile(heads: int, head_dim: int) -> tuple[int, int, int]:
    """Heads of a program, numbers of half a head, warps."""
    half = triton.next_power_of_2(triton.cdiv(head_dim, 2))
    tile = min(max(NUMBERS // (2 * half), 1), triton.next_power_of_2(heads))
    return tile, half, max(2 * tile * half // (32 * NUMBERS_PER_THREAD), 1)


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
    start = tl.where(is_query, 0, tl.where(is_value, HEADS + KV_HEADS, HEADS))
    first_tile = tl.where(is_query, 0, tl.where(is_value, query_tiles + kv_tiles, query_tiles))
    head = (tile - first_tile) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, HALF)[None, :]
    in_left = (head < count) & (column < middle)
    in_right = (head < count) & (column < HEAD_DIM - middle)
    places = qkv + token * qkv_row + (start + head) * HEAD_DIM + column
    left = tl.load(places, mask=in_left, other=0.0)  # (TILE, HALF): the first half of each head
    right = tl.load(places + middle, mask=in_right, other=0.0)

    if query_norm is not None:
        if is_query:
            left, right = _normed(left, right, query_norm, column, eps, HEAD_DIM, middle)
        elif not is_value:
            left, right = _normed(left, right, key_norm, column, eps, HEAD_DIM, middle)
    if cos is not None:
        if not is_value:
            left, right = _turned(left, right, cos + token * middle, sin + token * middle, column, middle)

    if is_query:
        places = query + (token * HEADS + head) * HEAD_DIM + column
        tl.store(places, left, mask=in_left)
        tl.store(places + middle, right, mask=in_right)
    else:
        slot = tl.load(slots + token)
        if slot >= 0:
            row = cache + slot // BLOCK_SIZE * cache_block + slot % BLOCK_SIZE * cache_offset
            places = row + tl.where(is_value, cache_part, 0) + head.to(tl.int64) * cache_head + column
            tl.store(places, left, mask=in_left)
            tl.store(places + middle, right, mask=in_right)


@triton.jit
def _normed(left, right, weight, column, eps, HEAD_DIM: tl.constexpr, middle: tl.constexpr):
    """rms norm of each head, rounded where `kernels.norm.rms_norm` rounds."""
    one, other = left.to(tl.float32), right.to(tl.float32)
    squares = tl.sum(one * one, 1) + tl.sum(other * other, 1)
    scale = tl.rsqrt(squares / HEAD_DIM + eps)[:, None]
    one, other = one * scale, other * scale
    if weight.dtype.element_ty == left.dtype:
        one, other = one.to(left.dtype).to(tl.float32), other.to(right.dtype).to(tl.float32)
    one *= tl.load(weight + column, mask=column < middle, other=0.0).to(tl.float32)
    other *= tl.load(weight + middle + column, mask=column < HEAD_DIM - middle, other=0.0).to(tl.float32)
    return one.to(left.dtype), other.to(right.dtype)


@triton.jit
def _turned(left, right, cos, sin, column, middle: tl.constexpr):
    """Each pair of a number on the left and one on the right turned by its angle."""
    along = tl.load(cos + column, mask=column < middle, other=0.0)
    across = tl.load(sin + column, mask=column < middle, other=0.0)
    one, other = left.to(tl.float32), right.to(tl.float32)
    return (one * along - other * across).to(left.dtype), (other * along + one * across).to(right.dtype)


@triton.jit
def _rope_and_latent(
    query,
    latent,
    norm,
    turned,
    cache,
    slots,
    cos,
    sin,
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
            number = tl.arange(0, RANK_BLOCK)
            inside = number < RANK
            wide = tl.load(source + number, mask=inside, other=0.0).to(tl.float32)
            wide *= tl.rsqrt(tl.sum(wide * wide, 0) / RANK + eps)
            factor = tl.load(norm + number, mask=inside, other=0.0).to(tl.float32)
            rounded = wide.to(latent.dtype.element_ty).to(tl.float32) * factor
            tl.store(row + number, rounded.to(cache.dtype.element_ty), mask=inside)
            _copy_turned(source + RANK + column, row + RANK + column, column >= 0, cos, sin, token, column, ROPE_DIM)
    else:
        head = (tile - 1) * TILE + tl.arange(0, TILE)[:, None]
        source = query + token * query_row + head * query_head + column
        target = turned + (token * HEADS + head) * ROPE_DIM + column
        _copy_turned(source, target, head < HEADS, cos, sin, token, column, ROPE_DIM)


@triton.jit
def _copy_turned(source, target, inside, cos, sin, token, column, ROPE_DIM: tl.constexpr):
    """Heads, one a row, from one place to another."""
    middle: tl.constexpr = (ROPE_DIM + 1) // 2
    in_left = inside & (column < middle)
    in_right = inside & (column < ROPE_DIM - middle)
    left = tl.load(source, mask=in_left, other=0.0)
    right = tl.load(source + middle, mask=in_right, other=0.0)
    if cos is not None:
        left, right = _turned(left, right, cos + token * middle, sin + token * middle, column, middle)
    tl.store(target, left, mask=in_left)
    tl.store(target + middle, right, mask=in_right)
