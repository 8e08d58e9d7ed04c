"""Attention of a layer: projections, optional norms of them or of heads, rope, KV cache, scores.

Each rank computes some of the query heads and the KV heads that they read; the output projection is all-reduced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.build import Forward, ModelBuilder, WeightSlice
from serve_llm.engine.model.inputs import AttentionInputs
from serve_llm.engine.model.rope_spec import RopeSpec
from serve_llm.engine.model.spec import AttentionSpec, NormSpec
from serve_llm.engine.parallel.layout import HeadShare
from serve_llm.kernels.activation import sigmoid
from serve_llm.kernels.registry import Kernels
from serve_llm.kernels.rope import HeadNorms

PagedAttention = Callable[..., Tensor]  # see `kernels.attention.paged_attention`


@dataclass(eq=False, repr=False)
class Attention:
    kernels: Kernels
    paged_attention: PagedAttention
    num_heads: int  # query heads of this rank
    scale: float
    sliding_window: int | None
    softcap: float | None
    qkv_proj: Forward
    output_proj: Forward
    qk_norm: HeadNorms | None = None
    sinks: Tensor | None = None  # (num_heads,) float32
    alibi_slopes: Tensor | None = None  # (num_heads,) float32

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size). Writes the new tokens' KV to the layer's cache."""
        step = inputs.step
        group = inputs.group
        output = self.paged_attention(
            self._compute_query(x, inputs),
            inputs.cache,
            group.block_table,
            step.query_starts,
            step.context_lens,
            scale=self.scale,
            window=self.sliding_window,
            softcap=self.softcap,
            sinks=self.sinks,
            alibi_slopes=self.alibi_slopes,
            on_device=step.lengths,
        )
        return self._finish(output.flatten(1), x)

    def _finish(self, output: Tensor, x: Tensor) -> Tensor:
        """output: (tokens, num_heads * head_dim); may be overwritten. x: what `forward` takes."""
        return self.output_proj(output)

    def _compute_query(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """(tokens, num_heads, head_dim). Writes keys and values to the cache."""
        _, group, cache, angles, _ = inputs
        return self.kernels.rope_and_cache(self.qkv_proj(x), self.num_heads, self.qk_norm, angles, cache, group.slots)


class TemperedAttention(Attention):
    """Attention whose queries are scaled by a factor that grows with the position (`QueryTemperature`)."""

    def _compute_query(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        assert inputs.query_scale is not None
        return super()._compute_query(x, inputs).mul_(inputs.query_scale[:, None, None])


@dataclass(eq=False, repr=False)
class GatedAttention(Attention):
    """Attention whose output is gated: multiplied by the sigmoid of a projection of its input."""

    gate_proj: Forward | None = None

    def _finish(self, output: Tensor, x: Tensor) -> Tensor:
        assert self.gate_proj is not None
        gate = sigmoid(self.gate_proj(x).float())
        return self.output_proj(output.mul_(gate.to(x.dtype)))


@dataclass(eq=False, repr=False)
class EncoderAttention(Attention):
    """Bidirectional attention within the step. Caches no KV."""

    num_kv_heads: int = 1  # that this rank holds
    padding: tuple[int, int] = (0, 0)  # zero heads before and after the query heads; see `_count_padding`

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) of whole prompts -> (tokens, hidden_size)."""
        qkv = self.qkv_proj(x)
        num_heads = self.num_heads
        head_dim = qkv.shape[1] // (num_heads + 2 * self.num_kv_heads)
        front, back = (count * head_dim for count in self.padding)
        if front or back:
            query, key_value = qkv.tensor_split([num_heads * head_dim], 1)
            qkv = torch.cat((functional.pad(query, (front, back)), key_value), 1)
        output = self.kernels.encoder_attention(
            qkv,
            num_heads + sum(self.padding),
            self.num_kv_heads,
            self.qk_norm,
            inputs.angles,
            inputs.step.query_starts,
            scale=self.scale,
            window=self.sliding_window,
            alibi_slopes=self.alibi_slopes,
        )
        if front or back:
            output = output[:, front : front + num_heads * head_dim]
        return self.output_proj(output)


class AttentionWithoutHeads(Attention):
    """For a rank without heads (more ranks than heads): takes part in the all-reduces and adds at most a bias."""

    def forward(self, x: Tensor, inputs: AttentionInputs) -> Tensor:
        """x: (tokens, hidden_size) -> (tokens, hidden_size)."""
        return self.output_proj(self.qkv_proj(x))


def build_attention(
    spec: AttentionSpec, hidden_size: int, builder: ModelBuilder, input_size: int | None = None
) -> Attention:
    """input_size: input size of the query, key and value projections, if it is not hidden_size."""
    if spec.rope is not None and (spec.rope.rotary_dim is not None or spec.rope.interleaved):
        builder = builder.with_row_order(_rotary_order(spec.head_dim, spec.rope))
    share = builder.shard.attention(spec)
    builder.describe(
        f"Attention({len(share.heads)} of {spec.num_heads} heads, "
        f"{len(share.kv_heads)} of {spec.num_kv_heads} KV heads, head_dim {spec.head_dim})"
    )
    qkv_proj = _build_qkv_projection(spec, input_size or hidden_size, share, builder)
    output_proj = builder.row_parallel_linear(
        "output",
        hidden_size,
        spec.num_heads * spec.head_dim,
        elements(share.heads, spec.head_dim),
        bias=spec.output_bias,
    )
    qk_norm = None
    if spec.qk_norm is not None and spec.qk_norm.kind == "rms":
        query_weight = builder.rms_norm_weight("q_norm", spec.qk_norm, spec.head_dim)
        key_weight = builder.rms_norm_weight("k_norm", spec.qk_norm, spec.head_dim)
        qk_norm = HeadNorms(query_weight, key_weight, spec.qk_norm.eps)
    sinks = builder.parameter("sinks", spec.num_heads, part=WeightSlice(0, share.heads)) if spec.sinks else None
    alibi_slopes = None
    if spec.alibi_slopes is not None:
        own_slopes = spec.alibi_slopes[share.heads.start : share.heads.stop]
        alibi_slopes = torch.tensor(own_slopes, dtype=torch.float32, device=builder.device)
    padding = _count_padding(share, spec.num_heads // spec.num_kv_heads)
    kind: type[Attention] = Attention
    more: dict[str, Any] = {}
    if not share.heads:
        kind = AttentionWithoutHeads
    elif spec.output_gate:
        kind = GatedAttention
        more["gate_proj"] = builder.column_parallel_linear(
            {"gate": spec.num_heads * spec.head_dim},
            input_size or hidden_size,
            {"gate": elements(share.heads, spec.head_dim)},
            bias=spec.qkv_bias,
        )
    elif spec.query_temperature is not None:
        kind = TemperedAttention
    elif not spec.causal:
        kind = EncoderAttention
        if spec.softcap is not None or spec.sinks:
            raise ModelError("config.json: encoders with capped scores or attention sinks are not served")
        if alibi_slopes is not None:
            alibi_slopes = functional.pad(alibi_slopes, padding)
        more = {"num_kv_heads": len(share.kv_heads), "padding": padding}
    kernels = builder.kernels
    if spec.cache_scales and share.heads:
        kernels = kernels.with_cache_scales(build_cache_scales("kv", spec.num_kv_heads, share.kv_heads, builder))
    return kind(
        kernels=kernels,
        paged_attention=_with_padding(kernels.paged_attention, len(share.heads), padding),
        num_heads=len(share.heads),
        scale=spec.scale,
        sliding_window=None if spec.chunked else spec.sliding_window,
        softcap=spec.softcap,
        qkv_proj=qkv_proj,
        output_proj=output_proj,
        qk_norm=qk_norm,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        **more,
    )


def build_cache_scales(kinds: str, num_kv_heads: int, kv_heads: range, builder: ModelBuilder) -> Tensor:
    """(kinds, own KV heads): see `kernels.attention.write_cache`. kinds: "k" and, unless they are a part of the keys,
    "v"."""
    scales = [builder.parameter(f"{kind}_cache_scale", num_kv_heads, part=WeightSlice(0, kv_heads)) for kind in kinds]
    return torch.stack(scales)


def elements(heads: range, head_dim: int) -> range:
    """The range of a projection's outputs that belongs to these heads."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _build_qkv_projection(spec: AttentionSpec, input_size: int, share: HeadShare, builder: ModelBuilder) -> Forward:
    """(tokens, input_size) -> (tokens, query heads, key heads, value heads, flattened)."""
    query_size = spec.num_heads * spec.head_dim
    kv_size = spec.num_kv_heads * spec.head_dim
    queries = elements(share.heads, spec.head_dim)
    keys = elements(share.kv_heads, spec.head_dim)
    qkv_proj = builder.column_parallel_linear(
        {"q": query_size, "k": kv_size, "v": kv_size},
        input_size,
        {"q": queries, "k": keys, "v": keys},
        bias=spec.qkv_bias,
    )
    if spec.qkv_clip is not None:
        qkv_proj = _with_clip(qkv_proj, spec.qkv_clip)
    if spec.qk_projection_norm is not None:
        return _with_projection_norms(qkv_proj, spec, spec.qk_projection_norm, share, builder)
    if spec.qk_norm is not None and spec.qk_norm.kind == "layer" and share.heads:
        return _with_head_layer_norms(qkv_proj, spec, spec.qk_norm.eps, share, builder)
    return qkv_proj


def _with_clip(qkv_proj: Forward, limit: float) -> Forward:
    return lambda x: qkv_proj(x).clamp_(-limit, limit)


def _with_projection_norms(
    qkv_proj: Forward, spec: AttentionSpec, norm: NormSpec, share: HeadShare, builder: ModelBuilder
) -> Forward:
    """`qkv_proj` with a norm over the queries of all ranks, and one over their keys.

    Sums are all-reduced; a KV head that several ranks hold is counted by the first of them. Computed in
    float32, rounded once.
    """
    query_size = spec.num_heads * spec.head_dim
    key_size = spec.num_kv_heads * spec.head_dim
    queries = elements(share.heads, spec.head_dim)
    keys = elements(share.kv_heads, spec.head_dim)

    def build_parameter(kind: str) -> Tensor:
        """Load the weights of the norms of queries and keys together."""
        query_part = builder.parameter(f"q_norm.{kind}", query_size, part=WeightSlice(0, queries))
        return torch.cat([query_part, builder.parameter(f"k_norm.{kind}", key_size, part=WeightSlice(0, keys))])

    weight = build_parameter("weight")
    bias = build_parameter("bias") if norm.has_bias else None
    group = builder.groups.tensor
    queries_end = len(queries)
    keys_end = len(queries) + len(keys)
    own_keys_start = queries_end + (spec.head_dim if share.before else 0)  # an earlier rank counts the first KV head

    def compute_means(wide: Tensor) -> Tensor:
        """wide: (tokens, own queries and keys) -> (tokens, 2): of the queries and of the keys of all ranks."""
        own_sums = [wide[:, :queries_end].sum(-1), wide[:, own_keys_start:].sum(-1)]
        sums = group.all_reduce(torch.stack(own_sums, 1))
        return torch.stack([sums[:, 0] / query_size, sums[:, 1] / key_size], 1)

    def forward(x: Tensor) -> Tensor:
        qkv = qkv_proj(x)
        wide = qkv[:, :keys_end].float()
        if norm.kind == "layer":
            means = compute_means(wide)
            wide[:, :queries_end] -= means[:, :1]
            wide[:, queries_end:] -= means[:, 1:]
        scales = torch.rsqrt(compute_means(wide.square()) + norm.eps)
        wide[:, :queries_end] *= scales[:, :1]
        wide[:, queries_end:] *= scales[:, 1:]
        wide.mul_(weight)
        qkv[:, :keys_end] = wide if bias is None else wide.add_(bias)
        return qkv

    return forward


def _with_head_layer_norms(
    qkv_proj: Forward, spec: AttentionSpec, eps: float, share: HeadShare, builder: ModelBuilder
) -> Forward:
    """`qkv_proj` with a layer norm of each query and key head. Computed in float32, rounded once."""
    names = [f"q_norm.{head}" for head in share.heads] + [f"k_norm.{head}" for head in share.kv_heads]
    weight = torch.stack([builder.parameter(f"{name}.weight", spec.head_dim) for name in names])
    keys_end = weight.numel()
    layer_norm = builder.kernels.layer_norm

    def forward(x: Tensor) -> Tensor:
        qkv = qkv_proj(x)
        heads = qkv[:, :keys_end].view(len(qkv), *weight.shape).float()
        qkv[:, :keys_end] = layer_norm(heads, None, None, eps).mul_(weight).flatten(1)
        return qkv

    return forward


def _rotary_order(head_dim: int, rope: RopeSpec) -> Callable[[str, Tensor], Tensor]:
    """Build the function that reorders the dimensions of query and key heads as the rope kernels expect.

    The kernels rotate dimension i together with i + head_dim / 2. The model rotates only the first `rotary_dim`
    dimensions, i with i + rotary_dim / 2, or interleaved 2 i with 2 i + 1. So the two halves of the rotated dimensions
    become the first dimensions of each half of the head. Scores do not depend on the order.
    """
    rotary_dim = head_dim if rope.rotary_dim is None else rope.rotary_dim
    rotated = list(range(rotary_dim))
    if rope.interleaved:
        rotated = rotated[::2] + rotated[1::2]
    rest = list(range(rotary_dim, head_dim))
    half = rotary_dim // 2
    middle = len(rest) // 2
    order = [*rotated[:half], *rest[:middle], *rotated[half:], *rest[middle:]]

    def reorder(name: str, tensor: Tensor) -> Tensor:
        layer = name.split(".")[3]  # layers.0.attention.q.weight
        if layer in ("q", "k"):
            return tensor.view(-1, head_dim, *tensor.shape[1:])[:, order].reshape(tensor.shape)
        if layer in ("q_norm", "k_norm"):
            return tensor.view(-1, head_dim)[:, order].view(tensor.shape)
        return tensor

    return reorder


def _count_padding(share: HeadShare, group_size: int) -> tuple[int, int]:
    """Count the zero heads to add before and after the query heads of a rank.

    The kernels need the same number of query heads for each KV head. Only the first and the last KV head of a rank can
    have fewer than the others:

        7 query heads per KV head, heads 10 .. 18 read KV heads 1 and 2:   0 10 11 12 13 | 14 15 16 17 18
    """
    counts = [0] * len(share.kv_heads)
    for head in share.heads:
        counts[head // group_size - share.kv_heads.start] += 1
    if not counts:
        return 0, 0
    return max(counts) - counts[0], max(counts) - counts[-1]


def _with_padding(paged_attention: PagedAttention, num_heads: int, padding: tuple[int, int]) -> PagedAttention:
    """Wrap `paged_attention` for a rank whose KV heads are read by different numbers of its query heads."""
    front, back = padding
    if not front and not back:
        return paged_attention

    def pad(of_heads: Tensor | None) -> Tensor | None:
        return None if of_heads is None else functional.pad(of_heads, (front, back))

    def padded(
        query: Tensor, *args: object, sinks: Tensor | None, alibi_slopes: Tensor | None, **kwargs: object
    ) -> Tensor:
        query = functional.pad(query, (0, 0, front, back))
        mixed = paged_attention(query, *args, sinks=pad(sinks), alibi_slopes=pad(alibi_slopes), **kwargs)
        return mixed[:, front : front + num_heads]

    return padded
