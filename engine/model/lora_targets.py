"""The linear layers that LoRA adapters can change, and the memory that adapters take. No torch; `cli.plan` uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from serve_llm.common.types import LoRATarget
from serve_llm.engine.config import Config
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AnyAttentionSpec, MLASpec, MLPSpec, ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule
from serve_llm.engine.parallel.layout import ParallelLayout

MAX_ROWS = 1024  # rows of which the products with an adapter are computed at a time, which bounds their memory


class _LinearLayer(NamedTuple):
    name: str  # such as "layers.3.attention.q"
    outputs: int
    inputs: int
    num_own_outputs: int  # those of the rank
    num_own_inputs: int


def _list_linear_layers(spec: ModelSpec, shard: Shard) -> Iterator[_LinearLayer]:
    """The linear layers of the rank's attention and dense feed-forward networks, except those of experts."""
    for index in shard.layers:
        layer = spec.layers[index]
        yield from _list_attention(f"layers.{index}.attention", layer.attention, spec.hidden_size, shard)
        if isinstance(layer.ffn, MLPSpec):
            size = layer.ffn.intermediate_size
            columns = len(shard.ffn(layer.ffn))
            for name in ("gate", "up") if layer.ffn.gated else ("up",):
                yield _LinearLayer(f"layers.{index}.ffn.{name}", size, spec.hidden_size, columns, spec.hidden_size)
            yield _LinearLayer(f"layers.{index}.ffn.down", spec.hidden_size, size, spec.hidden_size, columns)


def _list_attention(prefix: str, attention: AnyAttentionSpec, hidden_size: int, shard: Shard) -> Iterator[_LinearLayer]:
    share = shard.attention(attention)
    heads = len(share.heads)
    if isinstance(attention, MLASpec):
        head_size = attention.qk_nope_head_dim + attention.qk_rope_head_dim
        query_size = attention.num_heads * head_size
        rank = attention.q_lora_rank
        if rank is None:
            yield _LinearLayer(f"{prefix}.q", query_size, hidden_size, heads * head_size, hidden_size)
        else:
            yield _LinearLayer(f"{prefix}.q_down", rank, hidden_size, rank, hidden_size)
            yield _LinearLayer(f"{prefix}.q_up", query_size, rank, heads * head_size, rank)
        yield _LinearLayer(f"{prefix}.kv_down", attention.head_dim, hidden_size, attention.head_dim, hidden_size)
        value_size = attention.v_head_dim
    else:
        value_size = attention.head_dim
        kv_heads = len(share.kv_heads)
        yield _LinearLayer(
            f"{prefix}.q", attention.num_heads * value_size, hidden_size, heads * value_size, hidden_size
        )
        for name in ("k", "v"):
            yield _LinearLayer(
                f"{prefix}.{name}", attention.num_kv_heads * value_size, hidden_size, kv_heads * value_size, hidden_size
            )
    yield _LinearLayer(
        f"{prefix}.output", hidden_size, attention.num_heads * value_size, hidden_size, heads * value_size
    )


def find_lora_targets(spec: ModelSpec, weight_map: WeightMap) -> dict[str, LoRATarget]:
    """The modules that adapters can change, by each name that PEFT may give them."""
    layers = {f"{layer.name}.weight": layer for layer in _list_linear_layers(spec, _whole(spec))}
    targets = {}
    for rule in weight_map.expand(len(spec.layers)).values():
        if rule.parameters and all(parameter in layers for parameter in rule.parameters):
            module = rule.source.removesuffix(".weight")
            outputs = sum(layers[parameter].outputs for parameter in rule.parameters)
            target = LoRATarget(module, outputs, layers[rule.parameters[0]].inputs)
            targets.update(dict.fromkeys(weight_map.list_spellings(module), target))
    return targets


def map_parameters(spec: ModelSpec, weight_map: WeightMap) -> dict[str, WeightRule]:
    """Parameter, such as "layers.3.attention.q.weight" -> the rule of its tensor."""
    rules = weight_map.expand(len(spec.layers)).values()
    return {parameter: rule for rule in rules for parameter in rule.parameters}


def count_adapter_bytes(spec: ModelSpec, shard: Shard, config: Config) -> int:
    """Most bytes that adapters take on this rank: slots full of adapters of the highest rank, and a step's products."""
    if config.max_loras == 0:
        return 0
    sizes = [layer.num_own_outputs + layer.num_own_inputs for layer in _list_linear_layers(spec, shard)]
    slots = config.max_loras * config.max_lora_rank * sum(sizes)
    return (slots + MAX_ROWS * max(sizes, default=0)) * config.element_bytes


def _whole(spec: ModelSpec) -> Shard:
    return Shard(ParallelLayout(), 0, range(len(spec.layers)))
