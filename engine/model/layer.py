"""One layer: its halves, attention and feed-forward, and the norms around them. Where a norm stands is the placement.

Two tensors pass from half to half, both (tokens, width): the hidden rows, and what the next half reads of them. So the
sum after a half and the norm before the next are one operation, also from layer to layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from serve_llm.engine.model import spec
from serve_llm.engine.model.attention import Attention, attention
from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.ffn import dense
from serve_llm.engine.model.inputs import GroupInputs, StepInputs
from serve_llm.engine.model.mla import HeadlessLatentAttention, LatentAttention, latent_attention
from serve_llm.engine.model.moe import moe
from serve_llm.engine.model.norm import Norm
from serve_llm.kernels.rope import Angles

Join = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Between = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # hidden, made of attention, what it read


class Norms(NamedTuple):
    """Around one half f of a layer: after(x + inside(f(before(x))))."""

    before: Norm | None = None
    inside: Norm | None = None
    after: Norm | None = None


NORMS = {  # of a placement: where around its half each norm stands, and what follows the half in its name
    "pre": {"before": "norm"},
    "post": {"after": "norm"},
    "inside": {"inside": "norm"},
    "sandwich": {"before": "norm", "inside": "post_norm"},
    "parallel": {"before": "norm"},
    "parallel_norms": {"before": "norm"},
}


class Layer:
    def __init__(self, layer: spec.Layer, width: int, build: Builder) -> None:
        self.mixer = _mixer(layer.mixer, width, build.within("attention"))
        self.ffn = _ffn(layer.ffn, width, build.within("ffn"))
        self.first, self.last = _norms(layer, width, build)
        self._between = _between(layer.placement, self.first, self.last)

    def forward(
        self,
        hidden: Tensor,
        read: Tensor,
        inputs: StepInputs,
        group: GroupInputs,
        cache: Tensor,
        angles: Angles | None,
        rows: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """hidden, and what attention reads of it -> hidden, and what is to be added to it: `join` does it.

        Writes the new tokens' KV to this layer's cache. rows: (rows,) int64, the tokens that go on; None: all.
        """
        made = self.mixer.forward(read, inputs, group, cache, angles)
        if rows is not None:
            hidden, made, read = hidden[rows], made[rows], read[rows]
        hidden, made = self._between(hidden, made, read)  # the same name: nothing holds what was added any longer
        return hidden, self.ffn(made)


def _mixer(mixer: spec.Mixer, width: int, build: Builder) -> Attention | LatentAttention | HeadlessLatentAttention:
    if isinstance(mixer, spec.MLA):
        return latent_attention(mixer, width, build)
    return attention(mixer, width, build)


def _ffn(ffn: spec.Dense | spec.MoE, width: int, build: Builder) -> RowWise:
    return dense(ffn, width, build) if isinstance(ffn, spec.Dense) else moe(ffn, width, build)


def _norms(layer: spec.Layer, width: int, build: Builder) -> tuple[Norms, Norms]:
    """Around attention, and around the feed-forward part."""

    def around(half: str) -> Norms:
        names = NORMS[layer.placement]
        return Norms(**{place: build.norm(f"{half}_{name}", layer.norm, width) for place, name in names.items()})

    return around("attention"), Norms() if layer.placement == "parallel" else around("ffn")


def enter(first: Norms | None) -> Callable[[Tensor], Tensor]:
    """From hidden rows to what the half within these norms reads of them."""
    if first is None or first.before is None:
        return _as_it_is
    return first.before


def join(done: Norms, following: Norms | None) -> Join:
    """From hidden rows and what one half made of them to hidden rows and what the following half, if any, reads."""
    inside = done.inside or _as_it_is
    if done.after is None and following is not None and following.before is not None:
        of_sum = following.before.of_sum
        return of_sum if done.inside is None else lambda hidden, delta: of_sum(hidden, inside(delta))
    add, read = _added if done.after is None else done.after.of_sum, enter(following)

    def joined(hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
        _, hidden = add(hidden, inside(delta))
        return hidden, read(hidden)

    return joined


def _between(placement: spec.Placement, first: Norms, last: Norms) -> Between:
    """What the feed-forward part reads: of the hidden rows that attention has changed, or what attention read, or
    another norm of the same hidden rows."""
    if placement == "parallel":
        return lambda hidden, made, read: (hidden + made, read)
    if placement == "parallel_norms":
        of_same = enter(last)
        return lambda hidden, made, read: (hidden + made, of_same(hidden))
    joined = join(first, last)
    return lambda hidden, made, read: joined(hidden, made)


def _as_it_is(hidden: Tensor) -> Tensor:
    return hidden


def _added(hidden: Tensor, delta: Tensor) -> tuple[Tensor, Tensor]:
    total = hidden + delta
    return total, total
