"""Gated DeltaNet (arXiv:2412.06464): projections, the gated delta rule over a state per sequence, and a gated norm.

Each rank computes some of the value heads and their key heads; the output projection is all-reduced.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from serve_llm.engine.model.attention import elements
from serve_llm.engine.model.build import Forward, ModelBuilder, WeightSlice
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.inputs import AttentionInputs, StateCall
from serve_llm.engine.model.spec import NormSpec
from serve_llm.engine.parallel.layout import HeadShare
from serve_llm.kernels.activation import silu
from serve_llm.kernels.delta_rule import DeltaRule
from serve_llm.kernels.registry import Kernels


@dataclass(eq=False, repr=False)
class GatedDeltaNet:
    kernels: Kernels
    layer: DeltaRule
    gates_proj: Forward  # hidden states -> beta and alpha of this rank's heads
    input_proj: Forward  # hidden states -> queries, keys, values and the output gate
    norm: Tensor  # (value_dim,)
    norm_eps: float
    output_proj: Forward

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size). Updates the sequences' states."""
        calls = inputs.step.state_calls
        assert calls, "a step without slots for states"
        channels = self.layer.conv.shape[1]
        projected = self.input_proj(x)
        gates = self.gates_proj(x)
        qkv = projected[:, :channels]
        if len(calls) == 1:
            mixed = self._advance(qkv, gates, inputs.cache, calls[0])
        else:
            mixed = torch.cat([self._advance(qkv, gates, inputs.cache, call) for call in calls])
        normed = self.kernels.rms_norm(mixed, self.norm, self.norm_eps).flatten(1).float()
        gate = projected[:, channels:].float()
        return self.output_proj((normed * silu(gate)).to(x.dtype))

    def _advance(self, qkv: Tensor, gates: Tensor, cache: Tensor, call: StateCall) -> Tensor:
        """Compute a part of a step, and store a snapshot of the state at its end."""
        first, end = call.tokens.start, call.tokens.stop
        mixed = self.kernels.gated_delta_rule(
            qkv[first:end],
            gates[first:end],
            self.layer,
            cache,
            call.slots,
            call.query_starts,
            call.context_lens,
            drafts=call.drafts,
            on_device=call.lengths,
        )
        if call.snapshot is not None:
            cache[call.snapshot].copy_(cache[call.slots[-1]])
        return mixed


@dataclass(eq=False, repr=False)
class GatedDeltaNetWithoutHeads:
    """For a rank without heads (more ranks than heads): takes part in the all-reduce."""

    output_proj: Forward

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size)."""
        return self.output_proj(x[:, :0])


def build_gated_delta_net(
    spec: GatedDeltaNetSpec, hidden_size: int, builder: ModelBuilder
) -> GatedDeltaNet | GatedDeltaNetWithoutHeads:
    share = builder.shard.attention(spec)
    heads = share.heads
    builder.describe(
        f"GatedDeltaNet({len(heads)} of {spec.num_heads} heads, "
        f"{len(share.kv_heads)} of {spec.num_kv_heads} key heads, "
        f"{spec.key_dim} x {spec.value_dim})"
    )
    values = elements(heads, spec.value_dim)
    value_size = spec.num_heads * spec.value_dim
    output_proj = builder.row_parallel_linear("output", hidden_size, value_size, values)
    if not heads:
        return GatedDeltaNetWithoutHeads(output_proj)
    key_size = spec.num_kv_heads * spec.key_dim
    keys = elements(share.kv_heads, spec.key_dim)
    input_proj = builder.column_parallel_linear(
        {"q": key_size, "k": key_size, "v": value_size, "z": value_size},
        hidden_size,
        {"q": keys, "k": keys, "v": values, "z": values},
    )
    return GatedDeltaNet(
        kernels=builder.kernels,
        layer=_build_layer(spec, share, builder),
        gates_proj=_build_gates(spec, heads, hidden_size, builder),
        input_proj=input_proj,
        norm=builder.rms_norm_weight("norm", NormSpec("rms", spec.norm_eps), spec.value_dim),
        norm_eps=spec.norm_eps,
        output_proj=output_proj,
    )


def _build_layer(spec: GatedDeltaNetSpec, share: HeadShare, builder: ModelBuilder) -> DeltaRule:
    key_size = spec.num_kv_heads * spec.key_dim
    keys = elements(share.kv_heads, spec.key_dim)
    values = elements(share.heads, spec.value_dim)
    parts = [
        builder.parameter(f"conv.{name}", size, 1, spec.conv_kernel, part=WeightSlice(0, own))
        for name, size, own in (
            ("q", key_size, keys),
            ("k", key_size, keys),
            ("v", spec.num_heads * spec.value_dim, values),
        )
    ]
    own_heads = WeightSlice(0, share.heads)
    return DeltaRule(
        conv=torch.cat(parts).squeeze(1).T.contiguous(),
        decay=builder.parameter("decay", spec.num_heads, part=own_heads),
        decay_bias=builder.parameter("decay_bias", spec.num_heads, part=own_heads),
        key_heads=torch.tensor(
            [spec.find_key_head(head) - share.kv_heads.start for head in share.heads], device=builder.device
        ),
        key_dim=spec.key_dim,
        value_dim=spec.value_dim,
    )


def _build_gates(spec: GatedDeltaNetSpec, heads: range, hidden_size: int, builder: ModelBuilder) -> Forward:
    """(tokens, hidden_size) -> beta of this rank's heads, then alpha. Every rank computes all, never quantised."""
    count = spec.num_heads
    linear = builder.unquantised_linear({"beta": count, "alpha": count}, hidden_size)
    if len(heads) == count:
        return linear

    def own(x: Tensor) -> Tensor:
        beta, alpha = (gates[:, heads.start : heads.stop] for gates in linear(x).chunk(2, 1))
        return torch.cat((beta, alpha), 1)

    return own
