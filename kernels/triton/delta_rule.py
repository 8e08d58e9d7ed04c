"""Gated DeltaNet between its projections, in Triton. Contract: `gated_delta_rule` in `kernels/delta_rule.py`.

Three launches: the convolution of all tokens, then each sequence's tokens one after the other for pieces of each head's
state, which stay in registers, then the inputs that the next step's convolution reads. A program computes one sequence
whatever else is in the step, so bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.delta_rule import NORM_EPS, DeltaRule

CHANNELS = 128  # per program
TOKENS = 16  # per program
COLUMNS = 32  # columns of a head's state per program


def gated_delta_rule(
    qkv: Tensor,
    gates: Tensor,
    layer: DeltaRule,
    cache: Tensor,
    slots: Sequence[int],
    query_starts: Sequence[int],
    context_lens: Sequence[int],
    *,
    on_device: Lengths | None = None,
) -> Tensor:
    device = qkv.device
    if on_device is None:
        starts, contexts = (torch.tensor(one, dtype=torch.int32, device=device) for one in (query_starts, context_lens))
    else:
        starts = on_device.query_starts
        contexts = on_device.context_lens
    places = torch.tensor(slots, dtype=torch.int64).to(device, non_blocking=True)
    kernel, channels = layer.conv.shape
    num_sequences = len(context_lens)
    longest = max(end - first for first, end in pairwise(query_starts))
    mixed = torch.empty((len(qkv), channels), dtype=qkv.dtype, device=device)
    output = torch.empty((len(qkv), layer.heads, layer.value_dim), dtype=qkv.dtype, device=device)
    shared = (places, starts, contexts, cache, cache.stride(0), qkv, qkv.stride(0))
    blocks = triton.cdiv(channels, CHANNELS)
    _convolve[(num_sequences, blocks, triton.cdiv(longest, TOKENS))](
        *shared, layer.conv, mixed, CHANNELS=channels, KERNEL=kernel, BLOCK=CHANNELS, TOKENS=TOKENS
    )
    _advance[(num_sequences, layer.heads, triton.cdiv(layer.value_dim, COLUMNS))](
        *shared[:5],
        mixed,
        gates,
        gates.stride(0),
        layer.decay,
        layer.decay_bias,
        layer.key_heads,
        output,
        layer.key_dim**-0.5,
        NORM_EPS,
        CHANNELS=channels,
        INPUTS=(kernel - 1) * channels,
        HEADS=layer.heads,
        KEY_HEADS=layer.num_key_heads,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        ROW=layer.row,
        KEY_BLOCK=triton.next_power_of_2(layer.key_dim),
        COLUMNS=COLUMNS,
    )
    _keep_inputs[(num_sequences, blocks)](*shared, CHANNELS=channels, KERNEL=kernel, BLOCK=CHANNELS)
    return output


@triton.jit
def _load_inputs(token, first, channel, qkv, qkv_token, past, num_old, CHANNELS: tl.constexpr, KERNEL: tl.constexpr):
    """Load the convolution's inputs at a token, as float32. Before the step's `first` token of the sequence, they are
    those that the cache keeps at `past`, in `num_old` channels, and 0 in the others."""
    new = tl.load(qkv + token * qkv_token + channel, mask=channel < tl.where(token >= first, CHANNELS, 0), other=0.0)
    row = token - first + KERNEL - 1
    old = tl.load(past + row * CHANNELS, mask=channel < tl.where(token < first, num_old, 0), other=0.0)
    return new.to(tl.float32) + old


@triton.jit
def _convolve(
    slots,
    starts,
    contexts,
    cache,
    cache_slot,
    qkv,
    qkv_token,
    conv,
    mixed,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Convolve some tokens of a sequence in some channels."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    first = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    num_old = tl.where(tl.load(contexts + sequence) > end - first, CHANNELS, 0)  # channels with earlier inputs
    past = cache + tl.load(slots + sequence) * cache_slot + channel
    begin = first + tl.program_id(2) * TOKENS
    for number in range(tl.minimum(TOKENS, end - begin)):
        token = begin + number
        total = tl.zeros([BLOCK], tl.float32)
        for tap in range(KERNEL):
            source = token + tap - (KERNEL - 1)
            numbers = _load_inputs(source, first, channel, qkv, qkv_token, past, num_old, CHANNELS, KERNEL)
            weight = tl.load(conv + tap * CHANNELS + channel, mask=mask, other=0.0)
            total += numbers * weight.to(tl.float32)
        total = total.to(mixed.dtype.element_ty).to(tl.float32)
        result = total / (1.0 + tl.exp(-total))
        tl.store(mixed + token * CHANNELS + channel, result.to(mixed.dtype.element_ty), mask=mask)


@triton.jit
def _advance(
    slots,
    starts,
    contexts,
    cache,
    cache_slot,
    mixed,
    gates,
    gates_token,
    decay,
    decay_bias,
    key_heads,
    output,
    scale,
    eps,
    CHANNELS: tl.constexpr,
    INPUTS: tl.constexpr,
    HEADS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Update some columns of a head's state by all tokens of a sequence."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    first = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    num_old = tl.where(tl.load(contexts + sequence) > end - first, VALUE_DIM, 0)  # columns with a state
    element = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = element < KEY_DIM
    in_value = column < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    place = cache + tl.load(slots + sequence) * cache_slot + INPUTS + head * KEY_DIM * ROW
    place += element[:, None] * ROW + column[None, :]
    state = tl.load(place, mask=in_key[:, None] & (column < num_old)[None, :], other=0.0)
    key_head = tl.load(key_heads + head)
    rate = tl.exp(tl.load(decay + head))
    bias = tl.load(decay_bias + head)
    for number in range(end - first):
        token = first + number
        row = mixed + token * CHANNELS
        query = tl.load(row + key_head * KEY_DIM + element, mask=in_key, other=0.0).to(tl.float32)
        key = tl.load(row + (KEY_HEADS + key_head) * KEY_DIM + element, mask=in_key, other=0.0).to(tl.float32)
        value_at = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(value_at, mask=in_value, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        beta = tl.load(gates + token * gates_token + head).to(tl.float32)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(mixed.dtype.element_ty).to(tl.float32)
        x = tl.load(gates + token * gates_token + HEADS + head).to(tl.float32) + bias
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        state *= tl.exp(-rate * softplus)
        change = (value - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0).to(output.dtype.element_ty)
        tl.store(output + (token * HEADS + head) * VALUE_DIM + column, result, mask=in_value)
    tl.store(place, state, mask=inside)


@triton.jit
def _keep_inputs(
    slots,
    starts,
    contexts,
    cache,
    cache_slot,
    qkv,
    qkv_token,
    CHANNELS: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Store the last inputs of a sequence in some channels, the oldest first."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    first = tl.load(starts + sequence).to(tl.int64)
    end = tl.load(starts + sequence + 1).to(tl.int64)
    num_old = tl.where(tl.load(contexts + sequence) > end - first, CHANNELS, 0)  # channels with earlier inputs
    past = cache + tl.load(slots + sequence) * cache_slot + channel
    for row in range(KERNEL - 1):
        source = end - (KERNEL - 1) + row
        numbers = _load_inputs(source, first, channel, qkv, qkv_token, past, num_old, CHANNELS, KERNEL)
        tl.store(past + row * CHANNELS, numbers, mask=mask)
