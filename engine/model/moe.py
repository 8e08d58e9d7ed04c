"""The feed-forward part of a layer as a mixture of experts: a router, its experts, and what all tokens share.

Every rank routes all tokens, which gives the same choice everywhere, as the rows are the same to the last bit. It then
computes what it holds: its columns of every expert, or its own experts in whole. One sum over the ranks ends both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.ffn import activation_of, dense_addend, products
from serve_llm.engine.model.spec import MoE, Router

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]


def moe(ffn: MoE, width: int, build: Builder) -> RowWise:
    """(tokens, width) -> (tokens, width), summed over the ranks. The router and the shared gate are one product."""
    count, own, columns = ffn.router.num_experts, build.shard.experts(ffn), build.shard.expert_columns(ffn)
    scores = build.plain({"router": count, **({"shared_gate": 1} if ffn.shared_gate else {})}, width)
    experts = build.kernels.pack_experts(
        (products(ffn.expert, width, columns, build.within(f"experts.{number}")) for number in own),
        activation_of(ffn.expert, build),
        own,
    )
    choose = chooser(ffn.router)
    shared = None if ffn.shared is None else dense_addend(ffn.shared, width, build.within("shared"))

    def routed(x: Tensor) -> Tensor:
        return experts(x, *choose(scores(x)))

    def with_shared(x: Tensor) -> Tensor:
        assert shared is not None
        return experts(x, *choose(scores(x))) + shared(x)

    def with_gated(x: Tensor) -> Tensor:
        assert shared is not None
        found = scores(x)
        gate = torch.exp(-found[:, count:].float()).add_(1.0).reciprocal_()  # sigmoid: see kernels.activation
        return experts(x, *choose(found[:, :count])) + (shared(x) * gate).to(x.dtype)

    return build.summed(routed if shared is None else with_gated if ffn.shared_gate else with_shared)


def chooser(router: Router) -> Choose:
    """From scores, (tokens, experts) of any dtype, to the weights and the numbers of the chosen experts, the likeliest
    first: (tokens, top_k) float32 and int64."""
    top_k = router.top_k

    def normalised(scores: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen ones' part of a softmax is the softmax of theirs."""
        best, experts = scores.float().topk(top_k)
        return best.softmax(-1), experts

    def plain(scores: Tensor) -> tuple[Tensor, Tensor]:
        best, experts = scores.float().softmax(-1).topk(top_k)
        return best, experts

    return normalised if router.normalise else plain
