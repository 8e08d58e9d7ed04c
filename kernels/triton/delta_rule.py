"""Gated DeltaNet between its projections, in Triton. Contract: `gated_delta_rule` in `kernels/delta_rule.py`.

Three launches: the convolution of all tokens, then each sequence's tokens one after the other for pieces of each head's
state, which stay in registers, then the inputs that the next step reads, of the convolution and of drafts. A program
computes one sequence whatever else is in the step, so bits do not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.delta_rule import NORM_EPS, DeltaRule, DraftCounts

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
    drafts: DraftCounts | None = None,
    on_device: Lengths | None = None,
) -> Tensor:
    device = qkv.device
    if on_device is None:
        starts, contexts = (torch.tensor(one, dtype=torch.int32, device=device) for one in (query_starts, context_lens))
    else:
        starts = on_device.query_starts
        contexts = on_device.context_lens
    kernel, channels = layer.conv.shape
    num_sequences = len(context_lens)
    drafts = drafts or DraftCounts.none(num_sequences)
    rows = [start + before for start, before in zip(query_starts, accumulate(drafts.accepted, initial=0), strict=True)]
    plan = [slots, drafts.accepted, drafts.new, rows[:-1]]
    plans = torch.tensor(plan, dtype=torch.int64).T.contiguous().to(device, non_blocking=True)
    longest = max(end - first for first, end in pairwise(rows))
    mixed = torch.empty((rows[-1], channels), dtype=qkv.dtype, device=device)
    output = torch.empty((len(qkv), layer.heads, layer.value_dim), dtype=qkv.dtype, device=device)
    shared = (plans, starts, contexts, cache, cache.stride(0), qkv, qkv.stride(0))
    sizes = {"DRAFTS": cache.shape[1] > layer.state_size, "CHANNELS": channels, "HEADS": layer.heads}
    blocks = triton.cdiv(channels, CHANNELS)
    _convolve[(num_sequences, blocks, triton.cdiv(longest, TOKENS))](
        *shared, layer.conv, mixed, **sizes, STATE=layer.state_size, KERNEL=kernel, BLOCK=CHANNELS, TOKENS=TOKENS
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
        **sizes,
        STATE=layer.state_size,
        INPUTS=(kernel - 1) * channels,
        KEY_HEADS=layer.num_key_heads,
        KEY_DIM=layer.key_dim,
        VALUE_DIM=layer.value_dim,
        ROW=layer.row,
        KEY_BLOCK=triton.next_power_of_2(layer.key_dim),
        COLUMNS=COLUMNS,
    )
    _keep_inputs[(num_sequences, blocks)](
        *shared,
        gates,
        gates.stride(0),
        **sizes,
        STATE=layer.state_size,
        KERNEL=kernel,
        BLOCK=CHANNELS,
        GATES=triton.next_power_of_2(2 * layer.heads),
    )
    return output


@triton.jit
def _load_plan(plans, starts, contexts, sequence, DRAFTS: tl.constexpr):
    """Load a sequence's slot, its first token, its first row in `mixed`, its numbers of accepted drafts, of rows and of
    new drafts, and whether it has earlier tokens. Its rows are its accepted drafts, then its tokens in this step."""
    plan = plans + 4 * sequence
    slot = tl.load(plan)
    first = tl.load(starts + sequence).to(tl.int64)
    count = tl.load(starts + sequence + 1).to(tl.int64) - first
    continues = tl.load(contexts + sequence) > count
    row = first
    accepted = count * 0
    new = count * 0
    if DRAFTS:
        accepted = tl.load(plan + 1)
        new = tl.load(plan + 2)
        row = tl.load(plan + 3)
    return slot, first, row, accepted, count + accepted, new, continues


@triton.jit
def _load_inputs(
    index,
    first,
    accepted,
    continues,
    channel,
    qkv,
    qkv_token,
    past,
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    KERNEL: tl.constexpr,
):
    """Load the convolution's inputs at row `index` of a sequence, as float32. Before its first row, they are those that
    the cache keeps at `past`, or 0 if the sequence is new."""
    token = first + index - accepted
    new = tl.load(qkv + token * qkv_token + channel, mask=channel < tl.where(index >= accepted, CHANNELS, 0), other=0.0)
    num_old = tl.where((index < 0) & continues, CHANNELS, 0)
    inputs = new.to(tl.float32) + tl.load(
        past + (index + KERNEL - 1) * CHANNELS + channel, mask=channel < num_old, other=0.0
    )
    if DRAFTS:
        num_kept = tl.where((index >= 0) & (index < accepted), CHANNELS, 0)
        kept = past + STATE + index * (CHANNELS + 2 * HEADS) + channel
        inputs += tl.load(kept, mask=channel < num_kept, other=0.0)
    return inputs


@triton.jit
def _convolve(
    plans,
    starts,
    contexts,
    cache,
    cache_slot,
    qkv,
    qkv_token,
    conv,
    mixed,
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Convolve some rows of a sequence in some channels."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    slot, first, row, accepted, count, _, continues = _load_plan(plans, starts, contexts, sequence, DRAFTS)
    past = cache + slot * cache_slot
    begin = tl.program_id(2) * TOKENS
    for number in range(tl.minimum(TOKENS, count - begin)):
        index = begin + number
        total = tl.zeros([BLOCK], tl.float32)
        for tap in range(KERNEL):
            numbers = _load_inputs(
                index + tap - (KERNEL - 1),
                first,
                accepted,
                continues,
                channel,
                qkv,
                qkv_token,
                past,
                DRAFTS,
                CHANNELS,
                HEADS,
                STATE,
                KERNEL,
            )
            weight = tl.load(conv + tap * CHANNELS + channel, mask=mask, other=0.0)
            total += numbers * weight.to(tl.float32)
        total = total.to(mixed.dtype.element_ty).to(tl.float32)
        result = total / (1.0 + tl.exp(-total))
        tl.store(mixed + (row + index) * CHANNELS + channel, result.to(mixed.dtype.element_ty), mask=mask)


@triton.jit
def _load_gate(gates, kept, index, accepted, DRAFTS: tl.constexpr):
    """Load a gate of row `index` as float32. gates, kept: where it is in this step, and among the kept drafts."""
    gate = tl.load(gates, mask=index >= accepted, other=0.0).to(tl.float32)
    if DRAFTS:
        gate += tl.load(kept, mask=index < accepted, other=0.0)
    return gate


@triton.jit
def _advance(
    plans,
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
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    INPUTS: tl.constexpr,
    KEY_HEADS: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    ROW: tl.constexpr,
    KEY_BLOCK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Update some columns of a head's state by all rows of a sequence, and store it before the new drafts."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    slot, first, first_row, accepted, count, new, continues = _load_plan(plans, starts, contexts, sequence, DRAFTS)
    num_old = tl.where(continues, VALUE_DIM, 0)  # columns with a state
    element = tl.arange(0, KEY_BLOCK)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_key = element < KEY_DIM
    in_value = column < VALUE_DIM
    inside = in_key[:, None] & in_value[None, :]
    past = cache + slot * cache_slot
    place = past + INPUTS + head * KEY_DIM * ROW
    place += element[:, None] * ROW + column[None, :]
    state = tl.load(place, mask=in_key[:, None] & (column < num_old)[None, :], other=0.0)
    key_head = tl.load(key_heads + head)
    rate = tl.exp(tl.load(decay + head))
    bias = tl.load(decay_bias + head)
    for index in range(count):
        token = first + index - accepted
        row = mixed + (first_row + index) * CHANNELS
        query = tl.load(row + key_head * KEY_DIM + element, mask=in_key, other=0.0).to(tl.float32)
        key = tl.load(row + (KEY_HEADS + key_head) * KEY_DIM + element, mask=in_key, other=0.0).to(tl.float32)
        value_at = row + 2 * KEY_HEADS * KEY_DIM + head * VALUE_DIM + column
        value = tl.load(value_at, mask=in_value, other=0.0).to(tl.float32)
        query *= tl.rsqrt(tl.sum(query * query, 0) + eps) * scale
        key *= tl.rsqrt(tl.sum(key * key, 0) + eps)
        gate = gates + token * gates_token + head
        kept = past + STATE + index * (CHANNELS + 2 * HEADS) + CHANNELS + head
        beta = _load_gate(gate, kept, index, accepted, DRAFTS)
        beta = (1.0 / (1.0 + tl.exp(-beta))).to(mixed.dtype.element_ty).to(tl.float32)
        x = _load_gate(gate + HEADS, kept + HEADS, index, accepted, DRAFTS) + bias
        softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0))))
        state *= tl.exp(-rate * softplus)
        change = (value - tl.sum(state * key[:, None], 0)) * beta
        state += key[:, None] * change[None, :]
        result = tl.sum(state * query[:, None], 0).to(output.dtype.element_ty)
        tl.store(output + (token * HEADS + head) * VALUE_DIM + column, result, mask=in_value & (index >= accepted))
        if DRAFTS:
            tl.store(place, state, mask=inside & (index == count - new - 1))
    if not DRAFTS:
        tl.store(place, state, mask=inside)


@triton.jit
def _keep_inputs(
    plans,
    starts,
    contexts,
    cache,
    cache_slot,
    qkv,
    qkv_token,
    gates,
    gates_token,
    DRAFTS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HEADS: tl.constexpr,
    STATE: tl.constexpr,
    KERNEL: tl.constexpr,
    BLOCK: tl.constexpr,
    GATES: tl.constexpr,
):
    """Store the last inputs of a sequence before its new drafts in some channels, the oldest first, then the drafts."""
    sequence = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = channel < CHANNELS
    slot, first, _, accepted, count, new, continues = _load_plan(plans, starts, contexts, sequence, DRAFTS)
    past = cache + slot * cache_slot
    for number in range(KERNEL - 1):
        numbers = _load_inputs(
            count - new - (KERNEL - 1) + number,
            first,
            accepted,
            continues,
            channel,
            qkv,
            qkv_token,
            past,
            DRAFTS,
            CHANNELS,
            HEADS,
            STATE,
            KERNEL,
        )
        tl.store(past + number * CHANNELS + channel, numbers, mask=mask)
    if DRAFTS:
        gate = tl.arange(0, GATES)
        num_gates = tl.where(tl.program_id(1) == 0, 2 * HEADS, 0)  # stored by the first program of the sequence
        for number in range(new):
            token = first + count - accepted - new + number
            kept = past + STATE + number * (CHANNELS + 2 * HEADS)
            numbers = tl.load(qkv + token * qkv_token + channel, mask=mask, other=0.0)
            tl.store(kept + channel, numbers.to(tl.float32), mask=mask)
            numbers = tl.load(gates + token * gates_token + gate, mask=gate < num_gates, other=0.0)
            tl.store(kept + CHANNELS + gate, numbers.to(tl.float32), mask=gate < num_gates)
