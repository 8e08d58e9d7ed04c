"""The feed-forward network of a layer as a mixture of experts: a router, experts, and a shared expert.

Every rank routes all tokens, with the same result to the last bit, and computes its share: some columns of every
expert, or some experts whole. One all-reduce sums the shares. If whole experts are distributed over several engines,
`ExpertDispatch` exchanges tokens between them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.dispatch import ExpertDispatch
from serve_llm.engine.model.mlp import build_partial_mlp, build_projections, describe_mlp, find_activation
from serve_llm.engine.model.spec import GroupedTopK, MoESpec, RouterSpec
from serve_llm.kernels.activation import sigmoid
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.moe import Experts

ChooseExperts = Callable[[Tensor], tuple[Tensor, Tensor]]  # see `build_choice`
SMALLEST = 1e-20  # added to a sum of weights before dividing by it


def build_moe(spec: MoESpec, hidden_size: int, builder: ModelBuilder) -> Forward:
    """(tokens, hidden_size) -> (tokens, hidden_size), all-reduced."""
    num_experts = spec.router.num_experts
    held = builder.shard.experts(spec)
    spans = builder.shard.expert_spans(spec)
    span = range(spans[0].start, spans[-1].stop)
    is_spread = builder.groups.experts.size > 1
    columns = builder.shard.expert_columns(spec)
    builder.describe(f"MoE({len(held)} of {num_experts} experts, top {spec.router.top_k})")
    compute_scores = _build_scores(spec, hidden_size, builder)
    expert_builder = builder.for_experts()
    packed = builder.kernels.pack_experts(
        (_build_expert(spec, hidden_size, columns, expert_builder.scoped(f"experts.{number}")) for number in held),
        find_activation(spec.expert, builder),
        range(len(held)) if is_spread else span,
        expert_builder.lora_experts,
    )
    experts: Experts = packed
    if is_spread:
        experts = ExpertDispatch(packed, span, builder.shard.place_experts(spec), builder.groups.experts)
    builder.experts.append(experts)
    apply = _scale_inputs(experts) if spec.router.scales_inputs else experts
    correction_bias = builder.parameter("router.correction", num_experts) if spec.router.correction_bias else None
    choose = build_choice(spec.router, correction_bias)

    def routed(x: Tensor) -> Tensor:
        return apply(x, *choose(compute_scores(x)))

    if spec.shared_expert is None:
        return builder.all_reduced(routed)
    shared_expert = build_partial_mlp(spec.shared_expert, hidden_size, builder.scoped("shared"))

    def with_shared_expert(x: Tensor) -> Tensor:
        return apply(x, *choose(compute_scores(x))) + shared_expert(x)

    def with_gated_shared_expert(x: Tensor) -> Tensor:
        scores = compute_scores(x)
        gate = sigmoid(scores[:, num_experts:].float())
        return apply(x, *choose(scores[:, :num_experts])) + (shared_expert(x) * gate).to(x.dtype)

    return builder.all_reduced(with_gated_shared_expert if spec.shared_expert_gate else with_shared_expert)


def _scale_inputs(experts: Experts) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """The experts, with the weight of a token's only expert applied to its input instead of its output."""
    return lambda x, weights, numbers: experts(x * weights.to(x.dtype), torch.ones_like(weights), numbers)


def _build_expert(spec: MoESpec, hidden_size: int, columns: range, builder: ModelBuilder) -> tuple[Linear, Linear]:
    projections = build_projections(spec.expert, hidden_size, columns, builder, spec.expert_parallel)
    builder.describe(f"MLP({describe_mlp(spec.expert)})")
    return projections


def _build_scores(spec: MoESpec, hidden_size: int, builder: ModelBuilder) -> Forward:
    """The router's linear layer. If there is a gate of the shared expert, it is the last output."""
    outputs = {"router": spec.router.num_experts}
    if spec.shared_expert_gate:
        outputs["shared_gate"] = 1
    linear = builder.unquantised_linear(outputs, hidden_size, float32=spec.router.float32, bias=spec.router.bias)
    if spec.router.float32:
        return lambda x: linear(x.float())
    return linear


def build_choice(router: RouterSpec, correction_bias: Tensor | None = None) -> ChooseExperts:
    """Build the function from scores, (tokens, experts) of any dtype, to the weights and numbers of the chosen experts,
    best first: (tokens, top_k), float32 and int64.

    correction_bias: (experts,) float32, see `RouterSpec`.
    """
    if router.groups is not None or router.correction_bias:
        return _group_limited_choice(router, correction_bias)
    if router.scoring == "sigmoid":
        return _sigmoid_choice(router)

    def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
        best, experts = scores.float().softmax(-1).topk(router.top_k)
        return best.mul_(router.scaling_factor), experts

    def choose_renormalised(scores: Tensor) -> tuple[Tensor, Tensor]:
        """Renormalised weights are the softmax of the chosen scores."""
        best, experts = scores.float().topk(router.top_k)
        return best.softmax(-1).mul_(router.scaling_factor), experts

    return choose_renormalised if router.renormalise else choose


def _sigmoid_choice(router: RouterSpec) -> ChooseExperts:
    """Chooses by the scores before the sigmoid, because high ones saturate at 1."""

    def choose(scores: Tensor) -> tuple[Tensor, Tensor]:
        best, experts = scores.float().topk(router.top_k)
        weights = sigmoid(best)
        if router.renormalise:
            weights /= sum_in_order(weights).unsqueeze(-1) + SMALLEST
        return weights.mul_(router.scaling_factor), experts

    return choose


def _group_limited_choice(router: RouterSpec, correction_bias: Tensor | None) -> ChooseExperts:
    """The routing of DeepSeek-V2 and DeepSeek-V3 (arXiv:2405.04434, arXiv:2412.19437)."""
    groups = router.groups or GroupedTopK(num_groups=1, top_k=1, scores_per_group=1)

    def choose(logits: Tensor) -> tuple[Tensor, Tensor]:
        wide = logits.float()
        scores = wide.softmax(-1) if router.scoring == "softmax" else sigmoid(wide)
        ranking = scores if correction_bias is None else scores + correction_bias
        if groups.top_k < groups.num_groups:
            by_group = ranking.view(len(ranking), groups.num_groups, -1)
            group_scores = sum_in_order(by_group.topk(groups.scores_per_group).values)
            best_groups = group_scores.topk(groups.top_k).indices
            is_allowed = torch.zeros_like(group_scores, dtype=torch.bool).scatter_(-1, best_groups, True)
            ranking = by_group.masked_fill(~is_allowed.unsqueeze(-1), -torch.inf).flatten(-2)
        experts = ranking.topk(router.top_k).indices
        weights = scores.gather(-1, experts)
        if router.renormalise:
            weights /= sum_in_order(weights).unsqueeze(-1) + SMALLEST
        return weights.mul_(router.scaling_factor), experts

    return choose


def sum_in_order(x: Tensor) -> Tensor:
    """The sum over the last dimension, added in order: the same bits for any number of rows."""
    total = x[..., 0].clone()
    for index in range(1, x.shape[-1]):
        total += x[..., index]
    return total
