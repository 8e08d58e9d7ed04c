"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434), over a cache of one row for each token. By `Builder`.

In the absorbed form, for prompts and for single tokens alike, so that a result does not depend on how a prompt was cut:
what would turn a token's latent vector into a head's key is applied to the query instead, and what would turn it into
a value to the mean of latent vectors that the scores give. A rank computes its own query heads; latent vectors, and so
the cache, every rank has in whole.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from serve_llm.engine.model import spec
from serve_llm.engine.model.attention import elements
from serve_llm.engine.model.build import Builder, Load, Part, RowWise
from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.kernels.rope import Angles


class LatentAttention:
    def __init__(self, mixer: spec.MLA, width: int, build: Builder) -> None:
        own = build.shard.attention(mixer).heads
        self.kernels = build.kernels
        self.heads, self.nope_dim, self.rope_dim = len(own), mixer.nope_dim, mixer.rope_dim
        self.value_dim, self.scale, self.norm_eps = mixer.kv_lora_rank, mixer.scale, mixer.norm_eps
        self.latents, self.queries = _projections(mixer, width, own, build)
        self.norm = build.tensor("kv_norm.weight", mixer.kv_lora_rank)
        each = mixer.nope_dim + mixer.value_dim
        part = Part(0, elements(own, each))
        made = build.tensor("kv_up.weight", mixer.heads * each, mixer.kv_lora_rank, part=part)
        keys, values = made.view(self.heads, each, -1).split_with_sizes([mixer.nope_dim, mixer.value_dim], 1)
        self.absorb = build.kernels.pack_heads(keys.transpose(1, 2))
        self.values = build.kernels.pack_heads(values)
        self.output = _output(mixer, width, own, build)

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width). cache: this layer's, new tokens are written to it."""
        mixed = self.kernels.paged_attention(
            self._query(hidden, cache, group.slots, angles),
            cache,
            group.block_table,
            inputs.query_starts,
            inputs.context_lens,
            scale=self.scale,
            value_dim=self.value_dim,
            on_device=inputs.lengths,
        )
        return self.output(self.values(mixed).flatten(1))

    def _query(self, hidden: Tensor, cache: Tensor, slots: Tensor, angles: Angles | None) -> Tensor:
        """What meets the cached rows: (tokens, heads, kv_lora_rank + rope_dim). Writes those of the new tokens."""
        made, latent = self.latents(hidden).tensor_split([-self.norm.shape[0] - self.rope_dim], 1)
        query = self.queries(made).view(len(made), self.heads, self.nope_dim + self.rope_dim)
        plain, turned = query.split_with_sizes([self.nope_dim, self.rope_dim], 2)
        turned = self.kernels.rope_and_latent(turned, latent, self.norm, self.norm_eps, angles, cache, slots)
        return torch.cat((self.absorb(plain), turned), 2)


class HeadlessLatentAttention:
    """On a rank without a head (more ranks than heads): it has nothing to add to the sum but a bias."""

    def __init__(self, mixer: spec.MLA, width: int, build: Builder) -> None:
        self.output = _output(mixer, width, build.shard.attention(mixer).heads, build)

    def forward(
        self, hidden: Tensor, inputs: StepInputs, group: GroupInputs, cache: Tensor, angles: Angles | None
    ) -> Tensor:
        """hidden: (tokens, width) -> (tokens, width)."""
        return self.output(hidden[:, :0])


def latent_attention(mixer: spec.MLA, width: int, build: Builder) -> LatentAttention | HeadlessLatentAttention:
    """The latent attention of this rank."""
    if mixer.rope is not None and mixer.rope.interleaved:
        build = replace(build, load=_halved(build.load, mixer))
    kind = LatentAttention if build.shard.attention(mixer).heads else HeadlessLatentAttention
    return kind(mixer, width, build)


def _projections(mixer: spec.MLA, width: int, own: range, build: Builder) -> tuple[RowWise, RowWise]:
    """From hidden rows to what queries are made of, with the latent row of keys and values behind it; and from the
    former to the queries, heads side by side."""
    each, row = mixer.nope_dim + mixer.rope_dim, mixer.head_dim
    whole, heads, rank = mixer.heads * each, elements(own, each), mixer.q_lora_rank
    if rank is None:
        outputs, shares = {"q": whole, "kv_down": row}, {"q": heads, "kv_down": range(row)}
        return build.columns(outputs, width, shares), lambda made: made
    outputs, shares = {"q_down": rank, "kv_down": row}, {"q_down": range(rank), "kv_down": range(row)}
    latents = build.columns(outputs, width, shares, bias=mixer.bias)
    norm = build.norm("q_norm", spec.Norm("rms", mixer.norm_eps), rank)
    up = build.columns({"q_up": whole}, rank, {"q_up": heads})
    return latents, lambda made: up(norm(made))


def _output(mixer: spec.MLA, width: int, own: range, build: Builder) -> RowWise:
    inputs = elements(own, mixer.value_dim)
    return build.rows("output", width, mixer.heads * mixer.value_dim, inputs, bias=mixer.bias)


def _halved(load: Load, mixer: spec.MLA) -> Load:
    """Reads what is turned of queries and keys in another order: the kernels turn number i with i + rope_dim / 2."""
    each = mixer.nope_dim + mixer.rope_dim
    rows = {"q": each, "q_up": each, "kv_down": mixer.head_dim}

    def halved(name: str, shape: tuple[int, ...], part: Part | None = None, dtype: torch.dtype | None = None) -> Tensor:
        tensor, size = load(name, shape, part, dtype), rows.get(name.split(".")[-2])
        if size is None:
            return tensor
        first = size - mixer.rope_dim
        order = [*range(first), *range(first, size, 2), *range(first + 1, size, 2)]
        return tensor.view(-1, size, *shape[1:])[:, order].flatten(0, 1)

    return halved
