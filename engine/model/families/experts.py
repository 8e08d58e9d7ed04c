"""What families with experts share: config.json's keys of the router, and experts in the place of a dense part."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serve_llm.engine.errors import ModelError
from serve_llm.engine.model.config import Config
from serve_llm.engine.model.spec import Dense, Layer, ModelSpec, MoE, Router

IN_TRAINING = ("output_router_logits", "router_aux_loss_coef", "router_jitter_noise")  # keys of no effect on inference


def read_router(config: Config, num_experts: int, default_top_k: int, normalise: bool = True) -> Router:
    """normalise: as of `Router`."""
    top_k = config.integer("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    return Router(num_experts, top_k, normalise=normalise)


def with_experts(
    spec: ModelSpec,
    router: Router,
    width: int | None = None,  # of each expert; None: as that of the dense part
    shared: int = 0,  # width of an expert that all tokens go through; 0: none
    shared_gate: bool = False,
    where: Callable[[int], bool] = lambda index: True,  # in which layers
) -> ModelSpec:
    """The model of dense layers with experts in their place, otherwise like the dense parts that there were."""

    def of(index: int, layer: Layer) -> Layer:
        if not where(index):
            return layer
        assert isinstance(layer.ffn, Dense)
        common = replace(layer.ffn, width=shared) if shared else None
        return replace(layer, ffn=MoE(router, replace(layer.ffn, width=width or layer.ffn.width), common, shared_gate))

    return replace(spec, layers=tuple(of(index, layer) for index, layer in enumerate(spec.layers)))
