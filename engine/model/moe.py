"""The feed-forward part of a layer as a mixture of experts: a router, its experts, and what all tokens share.

Every rank routes all tokens, which gives the same choice everywhere, as the rows are the same to the last bit. It then
computes what it holds: its columns of every expert, or its own experts in whole. One sum over the ranks ends both.
Where whole experts are shared out among engines as well, `dispatch` asks the others.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_llm.engine.model.build import Builder, RowWise
from serve_llm.engine.model.dispatch import Dispatch
from serve_llm.engine.model.ffn import activation_of, dense_addend, products
from serve_llm.engine.model.spec import ExpertGroups, MoE, Router

Choose = Callable[[Tensor], tuple[Tensor, Tensor]]
SMALLEST = 1e-20  # beside a sum of weights, so that nothing is divided by 0


def moe(ffn: MoE, width: int, build: Builder) -> RowWise:
    """(tokens, width) -> (tokens, width), summed over the ranks. The router and the shared gate are one product."""
    count, own, columns = ffn.router.num_experts, build.shard.experts(ffn), build.shard.expert_columns(ffn)
    scores = _scores(ffn, width, build)
    experts = build.kernels.pack_experts(
        (products(ffn.expert, width, columns, build.within(f"experts.{number}"), ffn.whole) for number in own),
        activation_of(ffn.expert, build),
        own,
    )
    if build.neighbours.experts.size > 1:
        experts = build.spread(Dispatch(experts, build.shard.expert_spans(ffn), build.neighbours.experts))
    correction = build.tensor("router.correction", count) if ffn.router.correction else None
    choose = chooser(ffn.router, correction)
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


def _scores(ffn: MoE, width: int, build: Builder) -> RowWise:
    """The product of the router, with that of the shared gate, if there is one, in its last column."""
    outputs = {"router": ffn.router.num_experts} | ({"shared_gate": 1} if ffn.shared_gate else {})
    product = build.plain(outputs, width, wide=ffn.router.wide, bias=ffn.router.bias)
    return (lambda x: product(x.float())) if ffn.router.wide else product


def chooser(router: Router, correction: Tensor | None = None) -> Choose:
    """From scores, (tokens, experts) of any dtype, to the weights and the numbers of the chosen experts, the likeliest
    first: (tokens, top_k) float32 and int64. correction: (experts,) float32, see `Router`."""
    if router.groups is not None or router.correction or router.scores == "sigmoid":
        return _by_groups(router, correction)
    top_k, factor = router.top_k, router.factor

    def normalised(scores: Tensor) -> tuple[Tensor, Tensor]:
        """The chosen ones' part of a softmax is the softmax of theirs."""
        best, experts = scores.float().topk(top_k)
        return best.softmax(-1).mul_(factor), experts

    def plain(scores: Tensor) -> tuple[Tensor, Tensor]:
        best, experts = scores.float().softmax(-1).topk(top_k)
        return best.mul_(factor), experts

    return normalised if router.normalise else plain


def _by_groups(router: Router, correction: Tensor | None) -> Choose:
    """The choice of DeepSeek-V2 and DeepSeek-V3 (arXiv:2405.04434, arXiv:2412.19437)."""
    groups = router.groups or ExpertGroups(1, 1, 1)

    def choose(products: Tensor) -> tuple[Tensor, Tensor]:
        wide = products.float()
        scores = wide.softmax(-1) if router.scores == "softmax" else torch.exp(-wide).add_(1.0).reciprocal_()
        ranking = scores if correction is None else scores + correction
        if groups.top_k < groups.count:
            by_group = ranking.view(len(ranking), groups.count, -1)
            worth = added(by_group.topk(groups.best).values)
            chosen = torch.zeros_like(worth, dtype=torch.bool).scatter_(-1, worth.topk(groups.top_k).indices, True)
            ranking = by_group.masked_fill(~chosen.unsqueeze(-1), -torch.inf).flatten(-2)
        experts = ranking.topk(router.top_k).indices
        weights = scores.gather(-1, experts)
        if router.normalise:
            weights /= added(weights).unsqueeze(-1) + SMALLEST
        return weights.mul_(router.factor), experts

    return choose


def added(x: Tensor) -> Tensor:
    """The sum over the last dimension in its order, whatever the number of rows."""
    total = x[..., 0].clone()
    for index in range(1, x.shape[-1]):
        total += x[..., index]
    return total
