"""The attention part of a layer: projections, optional norms of them or of heads, rope, cache, scores. By `Builder`.

A rank computes its own query heads over the KV heads that they read; the output projection sums over the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model import spec
from serve_llm.engine.model.build import Builder, Load, Part, RowWise
from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.engine.parallel.layout import HeadShare
from serve_llm.kernels.rope import Angles, HeadNorms

Attend = Callable[..., Tensor]  # `kernels.attention.paged_attention`


class Attention:
    def __init__(self, mixer: spec.Attention, width: int, build: Builder) -> None:
        own = build.shard.attention(mixer)
        self.kernels = build.kernels
        self.heads, self.scale, self.window, self.softcap = len(own.heads), mixer.scale, mixer.window, mixer.softcap
        queries, keys = elements(own.heads, mixer.head_dim), elements(own.kv_heads, mixer.head_dim)
        whole_queries, whole_keys = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
        project: RowWise = build.columns(
            {"q": whole_queries, "k": whole_keys, "v": whole_keys},
            width,
            {"q": queries, "k": keys, "v": keys},
            bias=mixer.qkv_bias,
        )
        if mixer.projection_norm_eps is not None:
            project = _normed(project, mixer, mixer.projection_norm_eps, own, build)
        head_norm = mixer.head_norm
        if head_norm is not None and head_norm.kind == "layer" and own.heads:
            project = _heads_normed(project, mixer, head_norm.eps, own, build)
        self.qkv = project
        self.output = build.rows("output", width, whole_queries, queries, bias=mixer.output_bias)
        self.norms: HeadNorms | None = None
        if head_norm is not None and head_norm.kind == "rms":
            query, key = (build.rms_weight(f"{name}_norm", head_norm, mixer.head_dim) for name in ("q", "k"))
            self.norms = HeadNorms(query, key, head_norm.eps)
        self.sinks = build.tensor("sinks", mixer.heads, part=Part(0, own.heads)) if mixer.sinks else None
        self.attend = _attend(own, mixer.heads // mixer.kv_heads, build.kernels.paged_attention)

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width). cache: this layer's, new tokens are written to it."""
        query = self.kernels.rope_and_cache(self.qkv(hidden), self.heads, self.norms, angles, cache, group.slots)
        mixed = self.attend(
            query,
            cache,
            group.block_table,
            inputs.query_starts,
            inputs.context_lens,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            sinks=self.sinks,
            on_device=inputs.lengths,
        )
        return self.output(mixed.flatten(1))


class HeadlessAttention(Attention):
    """On a rank without a head (more ranks than heads): it takes part in the sums and has nothing to add but a bias."""

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width)."""
        return self.output(self.qkv(hidden))


def attention(mixer: spec.Attention, width: int, build: Builder) -> Attention:
    """The attention of this rank."""
    rope = mixer.rope
    if rope is not None and (rope.dims is not None or rope.interleaved):
        dims = mixer.head_dim if rope.dims is None else rope.dims
        build = replace(build, load=_reordered(build.load, mixer.head_dim, dims, rope.interleaved))
    kind = Attention if build.shard.attention(mixer).heads else HeadlessAttention
    return kind(mixer, width, build)


def _reordered(load: Load, head_dim: int, dims: int, interleaved: bool) -> Load:
    """`load` for heads of which only the first `dims` numbers are turned, i together with i + dims / 2, or interleaved:
    2 i together with 2 i + 1.

    Kernels turn i together with i + head_dim / 2. So the numbers of every query and key head change places, which no
    score depends on: both halves of what is turned come to the front of the head's halves, what stays behind them.
    """
    turned, still = list(range(dims)), list(range(dims, head_dim))
    if interleaved:
        turned = turned[::2] + turned[1::2]
    half, middle = dims // 2, (head_dim - dims) // 2
    order = [*turned[:half], *still[:middle], *turned[half:], *still[middle:]]

    def reordered(
        name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        tensor = load(name, shape, part, dtype)
        of = name.split(".")[3]  # layers.0.attention.q.weight
        if of not in ("q", "k", "q_norm", "k_norm"):
            return tensor
        inputs = shape[1:] if of in ("q", "k") else ()
        return tensor.view(-1, head_dim, *inputs)[:, order].view(tensor.shape)

    return reordered


def elements(heads: range, head_dim: int) -> range:
    """The numbers of these heads, which stand side by side."""
    return range(heads.start * head_dim, heads.stop * head_dim)


def _normed(project: RowWise, mixer: spec.Attention, eps: float, own: HeadShare, build: Builder) -> RowWise:
    """The joint projection with an rms norm over the queries of all ranks, and one over their keys.

    Ranks add up their squares; a KV head that several ranks hold is counted by the first of them. In float32, rounded
    once.
    """
    queries, keys = elements(own.heads, mixer.head_dim), elements(own.kv_heads, mixer.head_dim)
    weight = torch.cat(
        [
            build.tensor("q_norm.weight", mixer.heads * mixer.head_dim, part=Part(0, queries)),
            build.tensor("k_norm.weight", mixer.kv_heads * mixer.head_dim, part=Part(0, keys)),
        ]
    )
    shared = mixer.head_dim if own.before else 0  # keys that a rank before counts
    group, ends = build.neighbours.tensor, (len(queries), len(queries) + len(keys))
    counts = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim

    def forward(x: Tensor) -> Tensor:
        qkv = project(x)
        wide = qkv[:, : ends[1]].float()
        squares = wide.square()
        parts = (squares[:, : ends[0]], squares[:, ends[0] + shared :])
        sums = group.all_reduce(torch.stack([part.sum(-1) for part in parts], 1))
        wide[:, : ends[0]] *= torch.rsqrt(sums[:, :1] / counts[0] + eps)
        wide[:, ends[0] :] *= torch.rsqrt(sums[:, 1:] / counts[1] + eps)
        qkv[:, : ends[1]] = wide.mul_(weight)
        return qkv

    return forward


def _heads_normed(project: RowWise, mixer: spec.Attention, eps: float, own: HeadShare, build: Builder) -> RowWise:
    """The joint projection with a layer norm of each query and key head. In float32, rounded once."""
    names = [f"{kind}_norm.{head}" for kind, heads in (("q", own.heads), ("k", own.kv_heads)) for head in heads]
    weight = torch.stack([build.tensor(f"{name}.weight", mixer.head_dim) for name in names])
    end = weight.numel()

    def forward(x: Tensor) -> Tensor:
        qkv = project(x)
        heads = qkv[:, :end].view(len(qkv), *weight.shape).float()
        qkv[:, :end] = build.kernels.layer_norm(heads, None, None, eps).mul_(weight).flatten(1)
        return qkv

    return forward


def _attend(own: HeadShare, group: int, attend: Attend) -> Attend:
    """`attend` for a rank whose KV heads are read by different numbers of its query heads.

    The kernel wants as many query heads for each KV head. Only the first and the last KV head can have fewer than the
    others, so zeros in front of the query heads and behind them make all equal:

        group 7, heads 10 .. 18 of KV heads 1, 2:   0 10 11 12 13 | 14 15 16 17 18
    """
    counts = [0] * len(own.kv_heads)
    for head in own.heads:
        counts[head // group - own.kv_heads.start] += 1
    if len(set(counts)) <= 1:
        return attend
    front, behind, heads = max(counts) - counts[0], max(counts) - counts[-1], len(own.heads)

    def padded(query: Tensor, *args: object, sinks: Tensor | None, **kwargs: object) -> Tensor:
        query = functional.pad(query, (0, 0, front, behind))
        sinks = None if sinks is None else functional.pad(sinks, (front, behind))
        return attend(query, *args, sinks=sinks, **kwargs)[:, front : front + heads]

    return padded
