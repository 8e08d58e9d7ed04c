"""The linear layers that LoRA adapters can change, and the memory that adapters take. No torch; `cli.plan` uses it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from serve_llm.common.errors import OptionError
from serve_llm.common.types import LoRATarget
from serve_llm.engine.config import Config
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.lora_expert_stacks import count_members, list_spellings, list_stacked_weights
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import AnyAttentionSpec, MLASpec, MLPSpec, ModelSpec, MoESpec
from serve_llm.engine.model.transformers_spec import TransformersSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule
from serve_llm.engine.parallel.layout import ParallelLayout

MAX_ROWS = 1024  # rows whose products with an adapter are computed at a time, to bound memory
MAX_PRODUCT_ELEMENTS = 1 << 24  # maximum numbers in these products: fewer rows at a time for large outputs
MAX_READ_ELEMENTS = 1 << 22  # numbers of a base weight read at a time while an adapter is loaded
FLOAT32_BYTES = 4


class _LinearLayer(NamedTuple):
    name: str  # such as "layers.3.attention.q"
    outputs: int
    inputs: int
    num_own_outputs: int  # on this rank
    num_own_inputs: int


def _list_linear_layers(spec: ModelSpec, shard: Shard) -> Iterator[_LinearLayer]:
    """List the linear layers of the rank's attention and feed-forward networks, including routers and experts."""
    for index in shard.layers:
        layer = spec.layers[index]
        yield from _list_attention(f"layers.{index}.attention", layer.attention, spec.hidden_size, shard)
        if isinstance(layer.ffn, MLPSpec):
            columns = len(shard.ffn(layer.ffn))
            yield from _list_mlp(f"layers.{index}.ffn", layer.ffn, spec.hidden_size, columns)
            continue
        yield from _list_experts(f"layers.{index}.ffn", layer.ffn, spec.hidden_size, shard)
        if layer.ffn.shared_expert is not None:
            columns = len(shard.ffn(layer.ffn.shared_expert))
            yield from _list_mlp(f"layers.{index}.ffn.shared", layer.ffn.shared_expert, spec.hidden_size, columns)


def _list_experts(prefix: str, ffn: MoESpec, hidden_size: int, shard: Shard) -> Iterator[_LinearLayer]:
    """List the router, and the experts of which the rank has a part unless other engines compute some of them."""
    yield _LinearLayer(f"{prefix}.router", ffn.router.num_experts, hidden_size, ffn.router.num_experts, hidden_size)
    if ffn.shared_expert_gate:
        yield _LinearLayer(f"{prefix}.shared_gate", 1, hidden_size, 1, hidden_size)
    if shard.engines == 1:
        for number in shard.experts(ffn):
            columns = len(shard.expert_columns(ffn))
            yield from _list_mlp(f"{prefix}.experts.{number}", ffn.expert, hidden_size, columns)


def _list_mlp(prefix: str, mlp: MLPSpec, hidden_size: int, columns: int) -> Iterator[_LinearLayer]:
    """columns: the rank's part of the intermediate size."""
    size = mlp.intermediate_size
    for name in ("gate", "up") if mlp.gated else ("up",):
        yield _LinearLayer(f"{prefix}.{name}", size, hidden_size, columns, hidden_size)
    yield _LinearLayer(f"{prefix}.down", hidden_size, size, hidden_size, columns)


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
    elif isinstance(attention, GatedDeltaNetSpec):
        value_size = attention.value_dim
        sizes = {"q": attention.key_dim, "k": attention.key_dim, "v": value_size, "z": value_size}
        for name, size in sizes.items():
            count, own = (attention.num_kv_heads, len(share.kv_heads)) if name in "qk" else (attention.num_heads, heads)
            yield _LinearLayer(f"{prefix}.{name}", count * size, hidden_size, own * size, hidden_size)
        for name in ("beta", "alpha"):
            yield _LinearLayer(f"{prefix}.{name}", attention.num_heads, hidden_size, attention.num_heads, hidden_size)
    else:
        value_size = attention.head_dim
        if attention.output_gate:
            size = attention.num_heads * value_size
            yield _LinearLayer(f"{prefix}.gate", size, hidden_size, heads * value_size, hidden_size)
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


def _list_outer_layers(spec: ModelSpec, shard: Shard) -> Iterator[_LinearLayer]:
    """List the rank's parts of the embedding, whose inputs are the vocabulary, and of the LM head."""
    size = spec.embedding_size or spec.hidden_size
    num_own = len(shard.vocabulary(spec.vocab_size))
    if shard.is_first:
        yield _LinearLayer("embedding", size, spec.vocab_size, size, num_own)
    if shard.is_last and spec.lm_head:
        yield _LinearLayer("head", spec.vocab_size, size, num_own, size)


def count_rows(outputs: int) -> int:
    """Return how many rows of the products with an adapter are computed at a time."""
    return min(MAX_ROWS, max(1, MAX_PRODUCT_ELEMENTS // max(outputs, 1)))


def _count_product(layer: _LinearLayer, max_rank: int) -> int:
    """Count the numbers in memory while a product is computed: some rows of its input and its output."""
    inputs = max_rank if layer.name == "embedding" else layer.num_own_inputs
    return count_rows(layer.num_own_outputs) * (layer.num_own_outputs + inputs)


def find_served_targets(
    config: Config, spec: ModelSpec | TransformersSpec, weights: WeightMap | None
) -> dict[str, LoRATarget]:
    """Return the layers that adapters can change. Raises OptionError if the model does not support adapters."""
    targets: dict[str, LoRATarget] = {}
    if weights is not None and not isinstance(spec, TransformersSpec):
        targets = find_lora_targets(spec, weights, engines=config.expert_engines)
    if not config.generates:
        raise OptionError(
            f"--enable-lora: {spec.architecture} generates no text, and only models that do take adapters"
        )
    if not targets or (weights is not None and weights.is_gguf):
        raise OptionError("--enable-lora: adapters do not apply to GGUF files, whose tensors have other names")
    return targets


def find_lora_targets(spec: ModelSpec, weight_map: WeightMap, *, engines: int = 1) -> dict[str, LoRATarget]:
    """Return the modules that adapters can change, by each name that PEFT may give them. engines: number that share
    experts."""
    layers = {f"{layer.name}.weight": layer for layer in _list_linear_layers(spec, _whole(spec, engines))}
    rules = weight_map.expand(len(spec.layers))
    targets = {}
    for rule in rules.values():
        is_stack = rule.members > 0
        if rule.parameters and not is_stack and all(parameter in layers for parameter in rule.parameters):
            module = rule.source.removesuffix(".weight")
            outputs = sum(layers[parameter].outputs for parameter in rule.parameters)
            target = LoRATarget(module, outputs, layers[rule.parameters[0]].inputs, _find_kind(rule.parameters[0]))
            targets.update(dict.fromkeys(_list_names(weight_map, module), target))
    stacked = {name: one for name, one in list_stacked_weights(rules.values()).items() if name in layers}
    counts = count_members(stacked)
    for name, weight in stacked.items():
        if weight.member == 0 and weight.rule.parameters[0] == name:
            outputs = sum(layers[parameter].outputs for parameter in weight.rule.parameters)
            target = LoRATarget(
                weight.parameter, outputs, layers[name].inputs, "experts", members=counts[weight.parameter]
            )
            targets.update(dict.fromkeys(_list_names(weight_map, weight.parameter), target))
    for layer in _list_outer_layers(spec, _whole(spec)):
        is_head = layer.name == "head"
        names = [weight_map.head, weight_map.embedding] if is_head else [weight_map.embedding, weight_map.head]
        used = names if spec.tie_word_embeddings else names[:1]
        spellings = [spelling for name in used for spelling in weight_map.list_spellings(name)]
        stored = tuple(dict.fromkeys([*spellings, *(name.removeprefix(weight_map.prefix) for name in spellings)]))
        module = names[0].removesuffix(".weight")
        target = LoRATarget(module, layer.outputs, layer.inputs, "head" if is_head else "embedding", stored)
        targets.update(dict.fromkeys(weight_map.list_spellings(module), target))
        if is_head:
            targets["lm_head"] = target  # the name of any head in newer versions of transformers
    return targets


def _find_kind(parameter: str) -> Literal["linear", "router", "expert"]:
    if ".ffn.experts." in parameter:
        return "expert"
    return "router" if parameter.endswith((".ffn.router.weight", ".ffn.shared_gate.weight")) else "linear"


def _list_names(weight_map: WeightMap, module: str) -> list[str]:
    """List the names of a module in the whole model, and in the model without its LM head (transformers' AutoModel)."""
    names = [name for spelling in weight_map.list_spellings(module) for name in list_spellings(spelling)]
    return [*names, *(name.removeprefix(weight_map.prefix) for name in names)]


def map_parameters(spec: ModelSpec, weight_map: WeightMap) -> dict[str, WeightRule]:
    """Map each parameter, such as "layers.3.attention.q.weight", to the rule of its tensor."""
    outer = [
        WeightRule(weight_map.embedding, ("embedding.weight",)),
        WeightRule(weight_map.head, ("head.weight",)),
    ]
    rules = [*weight_map.expand(len(spec.layers)).values(), *outer]
    return {parameter: rule for rule in rules for parameter in rule.parameters}


def count_adapter_bytes(spec: ModelSpec, shard: Shard, config: Config) -> int:
    """Return the maximum bytes that adapters take on this rank: all slots, and on a CPU the adapters kept beside them,
    full of adapters of the highest rank with DoRA's two numbers per output; a step's products; an adapter being loaded
    into a slot of a GPU; and a part of a weight that is read for that."""
    if config.max_loras == 0:
        return 0
    layers = [*_list_linear_layers(spec, shard), *_list_outer_layers(spec, shard)]
    sizes = [_fill_up(layer.num_own_outputs) + layer.num_own_inputs for layer in layers]
    products = [_count_product(layer, config.max_lora_rank) for layer in layers]
    num_held = max(config.max_loras, config.max_cpu_loras) if config.device == "cpu" else config.max_loras + 1
    slots = num_held * config.max_lora_rank * sum(sizes)
    scales = num_held * 2 * sum(layer.num_own_outputs for layer in layers)
    read = 3 * min(MAX_READ_ELEMENTS, max((layer.outputs * layer.inputs for layer in layers), default=0))
    return (slots + max(products, default=0)) * config.element_bytes + (scales + read) * FLOAT32_BYTES


def _fill_up(outputs: int) -> int:
    """A CPU's kernels hold a multiple of 32 outputs (`kernels.cpu.lora`)."""
    return -(-outputs // 32) * 32


def _whole(spec: ModelSpec, engines: int = 1) -> Shard:
    return Shard(ParallelLayout(), 0, range(len(spec.layers)), engines=engines)
