"""Count the bytes of a rank's weights, from the model spec alone, as `model.decoder` builds them. No torch.

Tests compare the sums with the tensors of built decoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_llm.cli.plan.parameters import LinearWeight, OtherWeight, TableWeight, find_groups
from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.quantization_spec import FLOAT8, GroupQuantForm
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import (
    AnyAttentionSpec,
    AttentionSpec,
    LayerSpec,
    MLASpec,
    MLPSpec,
    ModelSpec,
    MoESpec,
    NormSpec,
    PoolerSpec,
)


@dataclass(frozen=True)
class WeightBytes:
    loaded: int  # read from the checkpoint
    held: int  # in memory afterwards, in the kernels' layout


@dataclass(frozen=True, order=True)
class LinearShape:
    outputs: int
    inputs: int
    in_layers: bool  # False for the head: only linear layers inside layers can be quantised
    float32: bool  # computed in float32, whatever the model's dtype


def linear_shapes(spec: ModelSpec, shard: Shard) -> set[LinearShape]:
    """The shapes of the rank's linear layers, except those without outputs or inputs."""
    return {
        LinearShape(weight.outputs, weight.inputs, weight.is_8_bit, weight.float32)
        for weights in _list_weights(spec.with_fp8(), shard, "cpu")
        for weight in weights
        if isinstance(weight, LinearWeight) and weight.outputs * weight.inputs
    }


def weight_bytes(spec: ModelSpec, shard: Shard, element_bytes: int, device: str) -> WeightBytes:
    """The weights of the shard's rank. element_bytes: of the model's dtype. device: "cpu" or "cuda"."""
    in_checkpoint = any(form is not None and form.in_checkpoint for form in (spec.int8, spec.grouped))
    sums: dict[int, WeightBytes] = {}  # by identity: layers of the same kind share their list of weights
    loaded = 0
    held = 0
    for weights in _list_weights(spec, shard, device):
        if id(weights) not in sums:
            sums[id(weights)] = WeightBytes(
                sum(weight.loaded_bytes(element_bytes, in_checkpoint) for weight in weights),
                sum(weight.held_bytes(element_bytes, device, spec.fp8) for weight in weights),
            )
        loaded += sums[id(weights)].loaded
        held += sums[id(weights)].held
    return WeightBytes(loaded, held)


def _list_weights(spec: ModelSpec, shard: Shard, device: str) -> list[list[LinearWeight | OtherWeight]]:
    """One list for each of the rank's layers, and one for each end of the model that the rank holds."""
    outer_size = spec.embedding_size or spec.hidden_size
    lists: list[list[LinearWeight | OtherWeight]] = []
    if shard.is_first:
        embedding: list[LinearWeight | OtherWeight] = list(_list_embedding(spec, shard, device))
        if spec.learned_positions is not None:
            embedding.append(OtherWeight(spec.learned_positions.num_embeddings * spec.hidden_size))
        if spec.token_types:
            embedding.append(OtherWeight(spec.token_types * spec.hidden_size))
        if spec.embedding_norm is not None:
            embedding.append(_norm(spec.embedding_norm, spec.hidden_size))
        if spec.embedding_size is not None:
            embedding.append(_outer_linear(spec, "project_in", spec.hidden_size, outer_size, device))
        lists.append(embedding)
    excluded = _excluded_by_layer(spec)
    forms = _forms_by_layer(spec)
    default = None if spec.grouped is None else spec.grouped.default
    begins_anew = spec.grouped is None or not spec.grouped.in_checkpoint
    lists_by_kind: dict[tuple[LayerSpec, frozenset[str], _Forms], list[LinearWeight | OtherWeight]] = {}
    for index in shard.layers:
        layer = spec.layers[index]
        kind = layer, excluded.get(index, frozenset()), forms.get(index, frozenset())
        if kind not in lists_by_kind:
            is_8_bit = spec.fp8 or spec.int8 is not None
            counter = _LayerWeights(
                spec.hidden_size,
                shard,
                device,
                is_8_bit,
                kind[1],
                default,
                dict(kind[2]),
                FLOAT8 if spec.fp8 else default,
                begins_anew,
            )
            lists_by_kind[kind] = list(counter.list_weights(layer))
        lists.append(lists_by_kind[kind])
    if shard.is_last:
        head: list[LinearWeight | OtherWeight] = []
        if spec.lm_head:
            head.append(_head(spec, shard, device))
        if spec.pooler is not None:
            head += _list_pooler(spec.pooler, outer_size)
        if spec.final_norm is not None:
            head.append(_norm(spec.final_norm, spec.hidden_size))
        if spec.embedding_size is not None:
            head.append(_outer_linear(spec, "project_out", outer_size, spec.hidden_size, device))
        lists.append(head)
    return lists


def _is_packed(spec: ModelSpec) -> bool:
    """Whether the embedding is stored in few bits."""
    return spec.int8_embedding or spec.embedding_form is not None


def _list_embedding(spec: ModelSpec, shard: Shard, device: str) -> Iterator[LinearWeight | OtherWeight]:
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    inputs = spec.embedding_size or spec.hidden_size
    if not _is_packed(spec):
        yield OtherWeight(vocabulary * inputs)
    elif not (spec.tie_word_embeddings and spec.lm_head and shard.is_last):  # otherwise rows are looked up in the head
        groups = find_groups(spec.embedding_form, inputs, 0, False, device)
        yield TableWeight(vocabulary, inputs, spec.int8_embedding, groups=groups)


def _head(spec: ModelSpec, shard: Shard, device: str) -> TableWeight:
    inputs = spec.embedding_size or spec.hidden_size
    is_tied = spec.tie_word_embeddings and shard.is_first and not _is_packed(spec)
    return TableWeight(
        len(shard.vocabulary(spec.vocab_size)),
        inputs,
        spec.int8_lm_head,
        bias=spec.lm_head_bias,
        groups=find_groups(spec.head_form, inputs, 0, False, device),
        is_read=not is_tied,
        is_copy=not is_tied or device == "cpu" or spec.int8_lm_head,
    )


def _list_pooler(pooler: PoolerSpec, inputs: int) -> Iterator[LinearWeight | OtherWeight]:
    """inputs: numbers of a hidden state."""
    for layer in pooler.layers:
        yield LinearWeight(layer.outputs, inputs, bias=layer.bias)
        if layer.norm is not None:
            yield _norm(layer.norm, layer.outputs)
        inputs = layer.outputs
    if pooler.token_ids:
        yield LinearWeight(len(pooler.token_ids), inputs)


def _outer_linear(spec: ModelSpec, name: str, outputs: int, inputs: int, device: str) -> LinearWeight:
    """A linear layer outside the layers, which every rank holds whole."""
    is_8_bit = spec.fp8 or (spec.int8 is not None and spec.int8.is_quantised(name))
    form = None if spec.grouped is None else spec.grouped.find_form(name)
    return LinearWeight(outputs, inputs, is_8_bit, groups=find_groups(form, inputs, 0, False, device))


_Forms = frozenset[tuple[str, GroupQuantForm | None]]  # linear layers, such as "ffn.down", that differ from the others


def _forms_by_layer(spec: ModelSpec) -> dict[int, _Forms]:
    """Layer -> its linear layers whose format is not the model's default."""
    forms: dict[int, _Forms] = {}
    for name, form in spec.grouped.others.items() if spec.grouped is not None else ():
        scope, _, rest = name.partition(".")
        if scope == "layers":
            index, _, linear = rest.partition(".")
            forms[int(index)] = forms.get(int(index), frozenset()) | {(linear, form)}
    return forms


def _excluded_by_layer(spec: ModelSpec) -> dict[int, frozenset[str]]:
    """Layer -> its linear layers that are not quantised to int8, such as "ffn.down"."""
    excluded: dict[int, frozenset[str]] = {}
    for name in spec.int8.excluded if spec.int8 is not None else ():
        scope, _, rest = name.partition(".")
        if scope == "layers":
            index, _, linear = rest.partition(".")
            excluded[int(index)] = excluded.get(int(index), frozenset()) | {linear}
    return excluded


@dataclass(frozen=True)
class _LayerWeights:
    """Lists the weights of one layer. A stage's first rank holds the biases of row-parallel linear layers."""

    hidden_size: int
    shard: Shard
    device: str
    quantised: bool
    excluded: frozenset[str]  # linear layers that are not quantised
    default_form: GroupQuantForm | None
    other_forms: Mapping[str, GroupQuantForm | None]  # by linear layer
    expert_form: GroupQuantForm | None  # default for experts
    begins_anew: bool  # whether a rank's share begins at the start of a group

    def list_weights(self, layer: LayerSpec) -> Iterator[LinearWeight | OtherWeight]:
        num_norms = {"parallel": 1, "sandwich": 4}.get(layer.norm_position, 2) - (not layer.has_attention_norm)
        yield _norm(layer.norm, num_norms * self.hidden_size)
        if isinstance(layer.attention, MLASpec):
            yield from self._list_mla(layer.attention)
        elif isinstance(layer.attention, GatedDeltaNetSpec):
            yield from self._list_delta_net(layer.attention)
        else:
            yield from self._list_attention(layer.attention)
        if isinstance(layer.ffn, MLPSpec):
            yield from self._list_mlp("ffn", layer.ffn, self.shard.ffn(layer.ffn), self.shard.tp_rank == 0)
        else:
            yield from self._list_experts(layer.ffn)

    def _list_attention(self, attention: AttentionSpec) -> Iterator[LinearWeight | OtherWeight]:
        head_share = self.shard.attention(attention)
        head_dim = attention.head_dim
        q_size = len(head_share.heads) * head_dim
        kv_size = len(head_share.kv_heads) * head_dim
        sizes = {"attention.q": q_size, "attention.k": kv_size, "attention.v": kv_size}
        yield from self._merged(sizes, self.hidden_size, attention.qkv_bias)
        yield self._output(range(head_share.heads.start * head_dim, head_share.heads.stop * head_dim), attention)
        if attention.output_gate and head_share.heads:
            yield self._linear("attention.gate", q_size, range(self.hidden_size), attention.qkv_bias)
        if attention.qk_norm is not None:
            num_heads = 2 if attention.qk_norm.kind == "rms" else len(head_share.heads) + len(head_share.kv_heads)
            yield _norm(attention.qk_norm, num_heads * head_dim)
            if attention.qk_norm.kind == "rms" and not attention.qk_norm.affine:
                yield OtherWeight(num_heads * head_dim, attention.qk_norm.float32_weight, in_checkpoint=False)
        if attention.qk_projection_norm is not None:
            yield OtherWeight(q_size + kv_size)
        if attention.cache_scales and head_share.heads:
            yield OtherWeight(2 * len(head_share.kv_heads), float32=True)
        if attention.sinks:
            yield OtherWeight(len(head_share.heads), float32=True)
        if attention.alibi_slopes is not None:
            yield OtherWeight(len(head_share.heads), float32=True, in_checkpoint=False)

    def _list_delta_net(self, mixer: GatedDeltaNetSpec) -> Iterator[LinearWeight | OtherWeight]:
        head_share = self.shard.attention(mixer)
        heads = len(head_share.heads)
        key_heads = len(head_share.kv_heads)
        size = mixer.value_dim
        yield self._output(range(head_share.heads.start * size, head_share.heads.stop * size), mixer)
        if heads == 0:
            return
        keys = key_heads * mixer.key_dim
        values = heads * size
        sizes = {"attention.q": keys, "attention.k": keys, "attention.v": values, "attention.z": values}
        yield from self._merged(sizes, self.hidden_size, False)
        yield LinearWeight(2 * mixer.num_heads, self.hidden_size)  # gates
        yield OtherWeight(mixer.conv_kernel * mixer.count_channels(heads, key_heads))
        yield OtherWeight(2 * heads, float32=True)  # decay
        yield OtherWeight(2 * heads, float32=True, in_checkpoint=False)  # numbers of the key heads, of 8 bytes
        yield OtherWeight(size)  # norm

    def _list_mla(self, mla: MLASpec) -> Iterator[LinearWeight | OtherWeight]:
        head_range = self.shard.attention(mla).heads
        heads = len(head_range)
        yield self._output(range(head_range.start * mla.v_head_dim, head_range.stop * mla.v_head_dim), mla)
        if heads == 0:
            return
        q_rank = mla.q_lora_rank
        q_size = heads * (mla.qk_nope_head_dim + mla.rope_dim)
        # The queries, or their latent, and the KV latent with the rotary key.
        down_sizes = {"attention.q": q_size} if q_rank is None else {"attention.q_down": q_rank}
        yield from self._merged({**down_sizes, "attention.kv_down": mla.head_dim}, self.hidden_size, mla.bias)
        yield OtherWeight((q_rank or 0) + mla.kv_lora_rank)  # norms
        if mla.cache_scales:
            yield OtherWeight(1, float32=True)
        if q_rank is not None:
            yield self._linear("attention.q_up", q_size, range(q_rank), False)
        for _ in range(heads):
            yield LinearWeight(mla.kv_lora_rank, mla.qk_nope_head_dim)
            yield LinearWeight(mla.v_head_dim, mla.kv_lora_rank)

    def _list_mlp(
        self, name: str, mlp: MLPSpec, columns: range, has_down_bias: bool
    ) -> Iterator[LinearWeight | OtherWeight]:
        """columns: the rank's part of the intermediate size."""
        size = len(columns)
        names = ("gate", "up") if mlp.gated else ("up",)
        yield from self._merged({f"{name}.{part}": size for part in names}, self.hidden_size, mlp.bias)
        is_part = size < mlp.intermediate_size
        yield self._linear(f"{name}.down", self.hidden_size, columns, mlp.has_down_bias and has_down_bias, is_part)
        if mlp.activation_scales:
            yield OtherWeight(size)

    def _list_experts(self, moe: MoESpec) -> Iterator[LinearWeight | OtherWeight]:
        router = moe.router
        is_first = self.shard.tp_rank == 0
        router_outputs = router.num_experts + moe.shared_expert_gate
        yield LinearWeight(router_outputs, self.hidden_size, bias=router.bias, float32=router.float32)
        if router.correction_bias:
            yield OtherWeight(router.num_experts, float32=True)
        columns = self.shard.expert_columns(moe)
        for number in self.shard.experts(moe):
            has_down_bias = is_first or moe.expert_parallel
            yield from self._list_mlp(f"ffn.experts.{number}", moe.expert, columns, has_down_bias)
        if moe.shared_expert is not None:
            shared_columns = self.shard.ffn(moe.shared_expert)
            yield from self._list_mlp("ffn.shared", moe.shared_expert, shared_columns, is_first)

    def _output(self, inputs: range, attention: AnyAttentionSpec) -> LinearWeight:
        if isinstance(attention, GatedDeltaNetSpec):
            bias = False
            size = attention.value_dim
        elif isinstance(attention, MLASpec):
            bias = attention.bias
            size = attention.v_head_dim
        else:
            bias = attention.output_bias
            size = attention.head_dim
        is_part = len(inputs) < attention.num_heads * size
        return self._linear("attention.output", self.hidden_size, inputs, bias and self.shard.tp_rank == 0, is_part)

    def _merged(self, outputs: Mapping[str, int], inputs: int, bias: bool) -> Iterator[LinearWeight]:
        """Linear layers with the same input: one, or several if their formats differ."""
        forms = {self._find_form(name) for name in outputs}
        if len(forms) == 1:
            outputs = {next(iter(outputs)): sum(outputs.values())}
        for name, count in outputs.items():
            yield self._linear(name, count, range(inputs), bias)

    def _linear(self, name: str, outputs: int, inputs: range, bias: bool, is_part: bool = False) -> LinearWeight:
        """is_part: whether other ranks hold other inputs."""
        first = 0 if self.begins_anew else inputs.start
        groups = find_groups(self._find_form(name), len(inputs), first, is_part, self.device)
        is_8_bit = self.quantised and name not in self.excluded
        return LinearWeight(outputs, len(inputs), is_8_bit, bias, groups=groups)

    def _find_form(self, name: str) -> GroupQuantForm | None:
        default = self.expert_form if name.startswith("ffn.experts.") else self.default_form
        return self.other_forms.get(name, default)


def _norm(norm: NormSpec, size: int) -> OtherWeight:
    """Its weight and bias."""
    return OtherWeight((norm.affine + norm.has_bias) * size, norm.float32_weight)
