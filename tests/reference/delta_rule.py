"""Oracle for `kernels.delta_rule`: one head and one token after the other in float64, rounded at the end."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.kernels.attention import Lengths
from serve_llm.kernels.delta_rule import NORM_EPS, DeltaRule


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
    drafts: None = None,
) -> Tensor:
    """Same contract as `kernels.delta_rule.gated_delta_rule` without drafts; states are float32 between calls."""
    past, states = layer.split_cache(cache)
    parts = []
    for index, slot in enumerate(slots):
        tokens = slice(query_starts[index], query_starts[index + 1])
        is_new = context_lens[index] == tokens.stop - tokens.start
        before = torch.zeros_like(past[slot]) if is_new else past[slot]
        inputs = torch.cat((before.double(), qkv[tokens].double()))
        past[slot] = inputs[-len(before) :].float()
        mixed = functional.conv1d(inputs.T, layer.conv.double().T.unsqueeze(1), groups=inputs.shape[1]).T
        mixed = functional.silu(mixed)
        size = layer.key_dim * layer.num_key_heads
        query, key = mixed[:, :size], mixed[:, size : 2 * size]
        values = mixed[:, 2 * size :]
        outputs = []
        for head, key_head in enumerate(layer.key_heads.tolist()):
            own = slice(key_head * layer.key_dim, (key_head + 1) * layer.key_dim)
            state = states[slot, head, :, : layer.value_dim].double()
            if is_new:
                state = torch.zeros_like(state)
            rows = []
            for token in range(tokens.stop - tokens.start):
                beta, alpha = gates[tokens][token, [head, layer.heads + head]].double()
                step = functional.softplus(alpha + layer.decay_bias[head].double())
                k = _normalise(key[token, own])
                value = values[token, head * layer.value_dim : (head + 1) * layer.value_dim]
                state = state * torch.exp(-layer.decay[head].double().exp() * step)
                state = state + torch.outer(k, value - k @ state) * torch.sigmoid(beta)
                rows.append(_normalise(query[token, own]) @ state * layer.key_dim**-0.5)
            states[slot, head] = 0.0
            states[slot, head, :, : layer.value_dim] = state.float()
            outputs.append(torch.stack(rows))
        parts.append(torch.stack(outputs, 1))
    return torch.cat(parts).to(qkv.dtype)


def _normalise(x: Tensor) -> Tensor:
    return x / torch.sqrt(x.square().sum() + NORM_EPS)
