"""Count the bytes of weights that a rank holds, from the model spec alone, as `model.decoder` builds them. No torch.

Tests compare the sums with the tensors of built decoders.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from serve_llm.engine.model.quantization_spec import FLOAT8, GroupedForm
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

FLOAT32_BYTES = 4
# `kernels.cpu.linear` packs weights for AVX-512 in panels of 16 outputs and 4-byte units of inputs, beside a float32
# bias, and for int8 a scale and a sum of 4 bytes per output. Other processors pad less; only tiny models notice.
PANEL_OUTPUTS = 16
UNIT_BYTES = 4
SCALE_BYTES = 4
INDEX_BYTES = 8  # the order of inputs
TABLE_BYTES = 64  # 16 float32
WORD_BITS = 32
SLAB_INPUTS = 64  # `kernels.triton.grouped` fills rows up to whole slabs; two of them share bytes with 4 bits
FP8_MULTIPLE = 16  # `kernels.linear_fp8` pads outputs and inputs to multiples of it


@dataclass(frozen=True)
class WeightBytes:
    loaded: int  # read from the checkpoint
    held: int  # in memory afterwards, in the layout of the kernels


@dataclass(frozen=True)
class _Groups:
    """How a linear layer's weight is held in groups."""

    count: int  # groups of a row
    form: GroupedForm
    offset: int  # inputs of the first group that the rank lacks

    def row_bytes(self, inputs: int, device: str) -> int:
        scales = self.count * self.form.scale_bytes * (1 + self.form.has_zeros)
        more = scales + FLOAT32_BYTES * self.form.has_divisors
        if device == "cpu":
            return _round_up(inputs * self.form.bits, WORD_BITS) // 8 + more
        return _round_up((self.offset + inputs) * self.form.bits, SLAB_INPUTS * 8) // 8 + more


def _find_groups(form: GroupedForm | None, inputs: int, first: int, is_part: bool, device: str) -> _Groups | None:
    """None if a rank holds its inputs, from `first` on, in the model's dtype: see `kernels.cpu.linear_grouped`.

    is_part: whether other ranks hold other inputs."""
    if form is None or inputs == 0 or (form.has_order and is_part):
        return None
    size = form.group_size or first + inputs
    offset = first % size
    count = -(-(offset + inputs) // size)
    per_word = WORD_BITS // form.bits
    if device == "cpu" and count > 1 and (size % per_word or offset % per_word):
        return None
    return _Groups(count, form, offset)


@dataclass(frozen=True)
class _LinearWeight:
    """The weight of a linear layer, with its bias."""

    outputs: int
    inputs: int
    is_8_bit: bool = False
    bias: bool = False
    float32: bool = False  # computed in float32, whatever the model's dtype
    groups: _Groups | None = None

    def loaded_bytes(self, element_bytes: int, in_checkpoint: bool) -> int:
        """in_checkpoint: whether the checkpoint is quantised."""
        bias = self.outputs * element_bytes if self.bias else 0
        if self.groups is not None and in_checkpoint:
            return self.outputs * self.groups.row_bytes(self.inputs, "cpu") + bias
        if self.is_8_bit and in_checkpoint:
            return self.outputs * (self.inputs + SCALE_BYTES) + bias
        return self.outputs * self.inputs * element_bytes + bias

    def held_bytes(self, element_bytes: int, device: str, fp8: bool) -> int:
        """fp8: what is in 8 bits without groups is so by `kernels.linear_fp8`."""
        if self.float32:
            element_bytes = FLOAT32_BYTES
        if self.outputs * self.inputs == 0:
            return self.outputs * element_bytes if self.bias else 0
        if device == "cpu":
            return self._held_bytes_on_cpu(element_bytes)
        if self.groups is not None:
            order = self.inputs * INDEX_BYTES if self.groups.form.has_order else 0
            return self.outputs * (self.groups.row_bytes(self.inputs, device) + element_bytes * self.bias) + order
        if not self.is_8_bit:
            return self.outputs * (self.inputs + self.bias) * element_bytes
        if not fp8:
            row_bytes = _round_up(self.inputs, SLAB_INPUTS) + SCALE_BYTES
            return self.outputs * (row_bytes + element_bytes * self.bias)
        row_bytes = _round_up(self.inputs, FP8_MULTIPLE) + SCALE_BYTES + element_bytes * self.bias
        return _round_up(self.outputs, FP8_MULTIPLE) * row_bytes

    def _held_bytes_on_cpu(self, element_bytes: int) -> int:
        outputs = _round_up(self.outputs, PANEL_OUTPUTS)
        if self.groups is not None:
            order = self.inputs * INDEX_BYTES if self.groups.form.has_order else 0
            table = TABLE_BYTES if self.groups.form.has_table else 0
            return outputs * (self.groups.row_bytes(self.inputs, "cpu") + FLOAT32_BYTES * self.bias) + order + table
        row_bytes = _round_up(self.inputs * (1 if self.is_8_bit else element_bytes), UNIT_BYTES)
        return outputs * (row_bytes + 2 * SCALE_BYTES * self.is_8_bit + FLOAT32_BYTES * self.bias)


@dataclass(frozen=True)
class _OtherWeight:
    elements: int
    float32: bool = False  # whatever the model's dtype
    in_checkpoint: bool = True  # False: made while loading

    def loaded_bytes(self, element_bytes: int, in_checkpoint: bool) -> int:
        return self.held_bytes(element_bytes, "", False) if self.in_checkpoint else 0

    def held_bytes(self, element_bytes: int, device: str, fp8: bool) -> int:
        return self.elements * (FLOAT32_BYTES if self.float32 else element_bytes)


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
        if isinstance(weight, _LinearWeight) and weight.outputs * weight.inputs
    }


def weight_bytes(spec: ModelSpec, shard: Shard, element_bytes: int, device: str) -> WeightBytes:
    """The weights of the shard's rank. element_bytes: of the model's dtype. device: "cpu" or "cuda"."""
    in_checkpoint = any(form is not None and form.in_checkpoint for form in (spec.int8, spec.grouped))
    sums: dict[int, WeightBytes] = {}  # by identity: layers of one kind share their list of weights
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
    is_tied = spec.lm_head and spec.tie_word_embeddings
    if is_tied and shard.is_first and shard.is_last:  # counted as embedding and as head
        tied = len(shard.vocabulary(spec.vocab_size)) * (spec.embedding_size or spec.hidden_size) * element_bytes
        loaded -= tied
        if device != "cpu" and not spec.int8_lm_head:  # otherwise the head has a copy in another layout
            held -= tied
    return WeightBytes(loaded, held)


def _list_weights(spec: ModelSpec, shard: Shard, device: str) -> list[list[_LinearWeight | _OtherWeight]]:
    """One list for each layer of the rank, and one for each end of the model that the rank has."""
    outer_size = spec.embedding_size or spec.hidden_size
    vocabulary = len(shard.vocabulary(spec.vocab_size))
    lists: list[list[_LinearWeight | _OtherWeight]] = []
    if shard.is_first:
        embedding: list[_LinearWeight | _OtherWeight] = [_OtherWeight(vocabulary * outer_size)]
        if spec.learned_positions is not None:
            embedding.append(_OtherWeight(spec.learned_positions.num_embeddings * spec.hidden_size))
        if spec.token_types:
            embedding.append(_OtherWeight(spec.token_types * spec.hidden_size))
        if spec.embedding_norm is not None:
            embedding.append(_norm(spec.embedding_norm, spec.hidden_size))
        if spec.embedding_size is not None:
            embedding.append(_outer_linear(spec, "project_in", spec.hidden_size, outer_size, device))
        lists.append(embedding)
    excluded = _excluded_by_layer(spec)
    forms = _forms_by_layer(spec)
    default = None if spec.grouped is None else spec.grouped.default
    begins_anew = spec.grouped is None or not spec.grouped.in_checkpoint
    lists_by_kind: dict[tuple[LayerSpec, frozenset[str], _Forms], list[_LinearWeight | _OtherWeight]] = {}
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
        head: list[_LinearWeight | _OtherWeight] = []
        if spec.lm_head:
            head.append(_LinearWeight(vocabulary, outer_size, spec.int8_lm_head, bias=spec.lm_head_bias))
        if spec.pooler is not None:
            head += _list_pooler(spec.pooler, outer_size)
        if spec.final_norm is not None:
            head.append(_norm(spec.final_norm, spec.hidden_size))
        if spec.embedding_size is not None:
            head.append(_outer_linear(spec, "project_out", outer_size, spec.hidden_size, device))
        lists.append(head)
    return lists


def _list_pooler(pooler: PoolerSpec, inputs: int) -> Iterator[_LinearWeight | _OtherWeight]:
    """inputs: numbers of a hidden state."""
    for layer in pooler.layers:
        yield _LinearWeight(layer.outputs, inputs, bias=layer.bias)
        if layer.norm is not None:
            yield _norm(layer.norm, layer.outputs)
        inputs = layer.outputs
    if pooler.token_ids:
        yield _LinearWeight(len(pooler.token_ids), inputs)


def _outer_linear(spec: ModelSpec, name: str, outputs: int, inputs: int, device: str) -> _LinearWeight:
    """A linear layer outside the layers, which every rank holds whole."""
    is_8_bit = spec.fp8 or (spec.int8 is not None and spec.int8.is_quantised(name))
    form = None if spec.grouped is None else spec.grouped.find_form(name)
    return _LinearWeight(outputs, inputs, is_8_bit, groups=_find_groups(form, inputs, 0, False, device))


_Forms = frozenset[
    tuple[str, GroupedForm | None]
]  # linear layers of a layer, such as "ffn.down", that differ from others


def _forms_by_layer(spec: ModelSpec) -> dict[int, _Forms]:
    """Layer -> its linear layers whose form is not the model's default."""
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
    """Lists the weights of one layer. The first rank of a stage holds the bias of its row-parallel linear layers."""

    hidden_size: int
    shard: Shard
    device: str
    quantised: bool
    excluded: frozenset[str]  # linear layers that are not quantised
    default_form: GroupedForm | None
    other_forms: Mapping[str, GroupedForm | None]  # by linear layer
    expert_form: GroupedForm | None  # the default of experts
    begins_anew: bool  # whether the first group of a rank's share begins with the share

    def list_weights(self, layer: LayerSpec) -> Iterator[_LinearWeight | _OtherWeight]:
        num_norms = {"parallel": 1, "sandwich": 4}.get(layer.norm_position, 2) - (not layer.has_attention_norm)
        yield _norm(layer.norm, num_norms * self.hidden_size)
        if isinstance(layer.attention, MLASpec):
            yield from self._list_mla(layer.attention)
        else:
            yield from self._list_attention(layer.attention)
        if isinstance(layer.ffn, MLPSpec):
            yield from self._list_mlp("ffn", layer.ffn, self.shard.ffn(layer.ffn), self.shard.tp_rank == 0)
        else:
            yield from self._list_experts(layer.ffn)

    def _list_attention(self, attention: AttentionSpec) -> Iterator[_LinearWeight | _OtherWeight]:
        head_share = self.shard.attention(attention)
        head_dim = attention.head_dim
        q_size = len(head_share.heads) * head_dim
        kv_size = len(head_share.kv_heads) * head_dim
        sizes = {"attention.q": q_size, "attention.k": kv_size, "attention.v": kv_size}
        yield from self._merged(sizes, self.hidden_size, attention.qkv_bias)
        yield self._output(range(head_share.heads.start * head_dim, head_share.heads.stop * head_dim), attention)
        if attention.qk_norm is not None:
            num_heads = 2 if attention.qk_norm.kind == "rms" else len(head_share.heads) + len(head_share.kv_heads)
            yield _norm(attention.qk_norm, num_heads * head_dim)
            if attention.qk_norm.kind == "rms" and not attention.qk_norm.affine:
                yield _OtherWeight(num_heads * head_dim, attention.qk_norm.float32_weight, in_checkpoint=False)
        if attention.qk_projection_norm_eps is not None:
            yield _OtherWeight(q_size + kv_size)
        if attention.sinks:
            yield _OtherWeight(len(head_share.heads), float32=True)
        if attention.alibi_slopes is not None:
            yield _OtherWeight(len(head_share.heads), float32=True, in_checkpoint=False)

    def _list_mla(self, mla: MLASpec) -> Iterator[_LinearWeight | _OtherWeight]:
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
        yield _OtherWeight((q_rank or 0) + mla.kv_lora_rank)  # norms
        if q_rank is not None:
            yield self._linear("attention.q_up", q_size, range(q_rank), False)
        for _ in range(heads):
            yield _LinearWeight(mla.kv_lora_rank, mla.qk_nope_head_dim)
            yield _LinearWeight(mla.v_head_dim, mla.kv_lora_rank)

    def _list_mlp(
        self, name: str, mlp: MLPSpec, columns: range, has_down_bias: bool
    ) -> Iterator[_LinearWeight | _OtherWeight]:
        """columns: the rank's part of the intermediate size."""
        size = len(columns)
        names = ("gate", "up") if mlp.gated else ("up",)
        yield from self._merged({f"{name}.{part}": size for part in names}, self.hidden_size, mlp.bias)
        is_part = size < mlp.intermediate_size
        yield self._linear(f"{name}.down", self.hidden_size, columns, mlp.has_down_bias and has_down_bias, is_part)
        if mlp.activation_scales:
            yield _OtherWeight(size)

    def _list_experts(self, moe: MoESpec) -> Iterator[_LinearWeight | _OtherWeight]:
        router = moe.router
        is_first = self.shard.tp_rank == 0
        router_outputs = router.num_experts + moe.shared_expert_gate
        yield _LinearWeight(router_outputs, self.hidden_size, bias=router.bias, float32=router.float32)
        if router.correction_bias:
            yield _OtherWeight(router.num_experts, float32=True)
        columns = self.shard.expert_columns(moe)
        for number in self.shard.experts(moe):
            has_down_bias = is_first or moe.expert_parallel
            yield from self._list_mlp(f"ffn.experts.{number}", moe.expert, columns, has_down_bias)
        if moe.shared_expert is not None:
            shared_columns = self.shard.ffn(moe.shared_expert)
            yield from self._list_mlp("ffn.shared", moe.shared_expert, shared_columns, is_first)

    def _output(self, inputs: range, attention: AnyAttentionSpec) -> _LinearWeight:
        bias = attention.bias if isinstance(attention, MLASpec) else attention.output_bias
        size = attention.v_head_dim if isinstance(attention, MLASpec) else attention.head_dim
        is_part = len(inputs) < attention.num_heads * size
        return self._linear("attention.output", self.hidden_size, inputs, bias and self.shard.tp_rank == 0, is_part)

    def _merged(self, outputs: Mapping[str, int], inputs: int, bias: bool) -> Iterator[_LinearWeight]:
        """Linear layers of the same input: one, or several if their forms differ."""
        forms = {self._find_form(name) for name in outputs}
        if len(forms) == 1:
            outputs = {next(iter(outputs)): sum(outputs.values())}
        for name, count in outputs.items():
            yield self._linear(name, count, range(inputs), bias)

    def _linear(self, name: str, outputs: int, inputs: range, bias: bool, is_part: bool = False) -> _LinearWeight:
        """is_part: whether other ranks hold other inputs."""
        first = 0 if self.begins_anew else inputs.start
        groups = _find_groups(self._find_form(name), len(inputs), first, is_part, self.device)
        is_8_bit = self.quantised and name not in self.excluded
        return _LinearWeight(outputs, len(inputs), is_8_bit, bias, groups=groups)

    def _find_form(self, name: str) -> GroupedForm | None:
        default = self.expert_form if name.startswith("ffn.experts.") else self.default_form
        return self.other_forms.get(name, default)


def _norm(norm: NormSpec, size: int) -> _OtherWeight:
    """Its weight and bias."""
    return _OtherWeight((norm.affine + norm.has_bias) * size, norm.float32_weight)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
