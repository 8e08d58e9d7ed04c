"""Gated DeltaNet (arXiv:2412.06464) between its projections: the convolution and the gated delta rule.

Computes token by token from a state, never in chunks, so that results depend neither on how a prompt is divided into
steps nor on other sequences.

Drafts are tokens that may be rejected. The state does not include them: the cache keeps their inputs, and the next call
first advances the state by those that were accepted. An input is 64 times smaller than a state of Qwen3-Next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from serve_llm.kernels.activation import sigmoid, silu
from serve_llm.kernels.attention import Lengths

STATE_UNIT = 16  # a row of a head's state is padded to a multiple of this
NORM_EPS = 1e-6  # added to the squared lengths of queries and keys


@dataclass(frozen=True)
class DraftCounts:
    """How many drafts each sequence has."""

    accepted: Sequence[int]  # the first of those that the cache keeps, which belong to the sequence now
    new: Sequence[int]  # the last tokens of the sequence in this call, after at least one other

    @classmethod
    def none(cls, num_sequences: int) -> DraftCounts:
        return cls([0] * num_sequences, [0] * num_sequences)


@dataclass(frozen=True)
class DeltaRule:
    """The weights of one layer on one rank, and its sizes."""

    conv: Tensor  # (conv_kernel, channels) in the model's dtype; channels: queries, keys, values
    decay: Tensor  # (heads,) float32: the logarithm of a head's factor
    decay_bias: Tensor  # (heads,) float32
    key_heads: Tensor  # (heads,) int64: for each head, the one that has its key and query
    key_dim: int
    value_dim: int

    @property
    def heads(self) -> int:
        return len(self.key_heads)

    @property
    def row(self) -> int:
        """The numbers in a row of a head's state."""
        return -(-self.value_dim // STATE_UNIT) * STATE_UNIT

    @property
    def state_size(self) -> int:
        """The numbers of a sequence's state."""
        kernel, channels = self.conv.shape
        return (kernel - 1) * channels + self.heads * self.key_dim * self.row

    @cached_property
    def num_key_heads(self) -> int:
        return (self.conv.shape[1] - self.heads * self.value_dim) // (2 * self.key_dim)

    def split_cache(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the states of all slots: the last inputs of the convolution, (slots, conv_kernel - 1,
        channels), and the heads' states, (slots, heads, key_dim, row). cache: (slots, numbers) float32."""
        kernel, channels = self.conv.shape
        inputs, states = cache[:, : self.state_size].split_with_sizes(
            [(kernel - 1) * channels, self.heads * self.key_dim * self.row], dim=1
        )
        count = len(cache)
        return inputs.view(count, kernel - 1, channels), states.view(count, self.heads, self.key_dim, self.row)

    def split_drafts(self, cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return views of the drafts that all slots keep: qkv, (slots, drafts, channels), and gates, (slots, drafts,
        2 * heads). They lie behind the state; the size of the cache says how many fit."""
        sizes = [self.conv.shape[1], 2 * self.heads]
        rows = cache[:, self.state_size :]
        drafts = rows.view(len(cache), rows.shape[1] // sum(sizes), sum(sizes))
        qkv, gates = drafts.split_with_sizes(sizes, dim=2)
        return qkv, gates


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
    """Compute the tokens of several sequences, one after the other, and take their states further.

    For each token of a head with the state S, (key_dim, value_dim), which is 0 before a sequence's first token:

        q, k, v = silu(convolution of the last conv_kernel inputs); q, k scaled to length 1, q by key_dim ** -0.5 more
        S = S * exp(-exp(decay) * softplus(alpha + decay_bias))
        S = S + k (outer) (v - k S) * sigmoid(beta)
        output = q S

    qkv: (tokens, channels) in the model's dtype, inputs of the convolution. gates: (tokens, 2 * heads), beta and alpha
    of each head. cache: (slots, numbers) float32, see `DeltaRule.split_cache`; written in place. slots: one for each
    sequence. query_starts: sequences + 1 offsets into tokens. context_lens: tokens of each sequence, these included; a
    sequence that begins here does not read its state. on_device: query_starts and context_lens on a GPU.

    drafts: None if there are none. Accepted drafts are computed before the tokens. The state that is stored is the one
    before the new drafts, whose qkv and gates replace those that the cache keeps.

    The results of the convolution, of silu and of sigmoid are rounded to the model's dtype, as in transformers;
    everything else is float32. Returns (tokens, heads, value_dim) in the model's dtype.
    """
    if drafts is None:
        drafts = DraftCounts.none(len(slots))
    inputs, states = layer.split_cache(cache)
    kept_qkv, kept_gates = layer.split_drafts(cache)
    output = torch.empty((len(qkv), layer.heads, layer.value_dim), dtype=qkv.dtype, device=qkv.device)
    for number, slot in enumerate(slots):
        first = query_starts[number]
        end = query_starts[number + 1]
        if context_lens[number] == end - first:
            inputs[slot] = 0.0
            states[slot] = 0.0
        num_accepted = drafts.accepted[number]
        own_qkv = torch.cat((kept_qkv[slot, :num_accepted], qkv[first:end].float()))
        own_gates = torch.cat((kept_gates[slot, :num_accepted], gates[first:end].float()))
        num_stored = len(own_qkv) - drafts.new[number]
        kept_qkv[slot, : drafts.new[number]] = own_qkv[num_stored:]
        kept_gates[slot, : drafts.new[number]] = own_gates[num_stored:]
        window = torch.cat((inputs[slot], own_qkv))
        inputs[slot] = window[num_stored : num_stored + len(inputs[slot])]
        query, key, value = _split_heads(_convolve(window, layer.conv), layer)
        beta, alpha = own_gates.split_with_sizes([layer.heads, layer.heads], 1)
        beta = sigmoid(beta).to(qkv.dtype).float()
        decay = torch.exp(-layer.decay.exp() * softplus(alpha + layer.decay_bias))
        state = states[slot, :, :, : layer.value_dim]
        for token in range(len(own_qkv)):
            if token == num_stored:
                state = state.clone()
            state *= decay[token, :, None, None]
            known = (state * key[token, :, :, None]).sum(1)
            change = (value[token] - known) * beta[token, :, None]
            state += key[token, :, :, None] * change[:, None]
            if token >= num_accepted:
                output[first + token - num_accepted] = (state * query[token, :, :, None]).sum(1)
    return output


def softplus(x: Tensor) -> Tensor:
    """Compute log(1 + e^x). x: float32."""
    return torch.where(x > 20.0, x, torch.log(torch.exp(x) + 1.0))


def _convolve(window: Tensor, weight: Tensor) -> Tensor:
    """Convolve window, (conv_kernel - 1 + tokens, channels) float32, and apply silu: (tokens, channels) float32."""
    kernel = len(weight)
    count = len(window) - kernel + 1
    total = torch.zeros_like(window[:count])
    for tap in range(kernel):
        total += window[tap : tap + count] * weight[tap].float()
    return silu(total.to(weight.dtype).float()).to(weight.dtype).float()


def _split_heads(mixed: Tensor, layer: DeltaRule) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries and keys, (tokens, heads, key_dim) float32, and values, (tokens, heads, value_dim)."""
    size = layer.num_key_heads * layer.key_dim
    query, key, value = mixed.split_with_sizes([size, size, layer.heads * layer.value_dim], 1)
    tokens = len(mixed)
    query, key = (
        (part * torch.rsqrt((part * part).sum(-1, keepdim=True) + NORM_EPS))[:, layer.key_heads]
        for part in (one.view(tokens, -1, layer.key_dim) for one in (query, key))
    )
    return query * layer.key_dim**-0.5, key, value.view(tokens, -1, layer.value_dim)
