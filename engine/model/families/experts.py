"""What families with experts share: the router's keys, and replacing dense feed-forward networks with experts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from serve_llm.common.errors import ModelError
from serve_llm.engine.model.config import ConfigReader
from serve_llm.engine.model.spec import LayerSpec, MLPSpec, ModelSpec, MoESpec, RouterSpec
from serve_llm.engine.model.weight_map import WeightRule

IN_TRAINING = (
    "output_router_logits",
    "router_aux_loss_coef",
    "router_jitter_noise",
)  # keys without effect on inference


def read_router(config: ConfigReader, num_experts: int, default_top_k: int, normalise: bool = True) -> RouterSpec:
    """normalise: `RouterSpec.renormalise`."""
    top_k = config.integer("num_experts_per_tok", default_top_k)
    if top_k > num_experts:
        raise ModelError(f"config.json: num_experts_per_tok is {top_k}, but there are {num_experts} experts")
    return RouterSpec(num_experts, top_k, renormalise=normalise)


def transposed_stacks(spec: ModelSpec, module: str) -> list[WeightRule]:
    """Rules for layers whose experts are in one tensor, (experts, inputs, outputs). module: the name of its module."""
    counts = {}
    for index, layer in enumerate(spec.layers):
        if isinstance(layer.ffn, MoESpec):
            counts[index] = layer.ffn.router.num_experts
    return [
        WeightRule(
            f"{module}.{source}",
            tuple(f"layers.{{layer}}.ffn.experts.{{member}}.{name}.weight" for name in names),
            "transpose",
            layers=tuple(counts),
            members=max(counts.values()),
        )
        for source, names in (("gate_up_proj", ("gate", "up")), ("down_proj", ("down",)))
        if counts
    ]


def holds_stacks(config: ConfigReader) -> bool:
    """Whether experts are stored in stacks: quantised ones are separate modules, except for 8-bit floats."""
    quantized = config.inner("quantization_config")
    return quantized is None or quantized.text("quant_method") in ("fbgemm_fp8", "fp8")


def with_experts(
    spec: ModelSpec,
    router: RouterSpec,
    width: int | None = None,  # intermediate size of each expert; None: that of the dense network
    shared: int = 0,  # intermediate size of the shared expert; 0: none
    shared_gate: bool = False,
    where: Callable[[int], bool] = lambda index: True,  # in which layers
) -> ModelSpec:
    """The model with experts in place of dense feed-forward networks, with the same activation and biases."""

    def replace_layer(index: int, layer: LayerSpec) -> LayerSpec:
        if not where(index):
            return layer
        assert isinstance(layer.ffn, MLPSpec)
        common = replace(layer.ffn, intermediate_size=shared) if shared else None
        return replace(
            layer,
            ffn=MoESpec(
                router, replace(layer.ffn, intermediate_size=width or layer.ffn.intermediate_size), common, shared_gate
            ),
        )

    return replace(spec, layers=tuple(replace_layer(index, layer) for index, layer in enumerate(spec.layers)))
