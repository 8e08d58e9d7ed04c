"""Model specifications: frozen dataclasses that describe a decoder, one entry per layer. No torch, no config.json.

Families (`families/*`) write them; the modules in this package are built from them, and memory planning counts with
them. Differences between models are expressed as follows: a number is a field, an algorithm is a class, the wiring is a
`NormPosition`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

from serve_llm.engine.model.delta_net_spec import GatedDeltaNetSpec
from serve_llm.engine.model.quantization_spec import FLOAT8, GroupQuantForm, GroupQuantSpec, Int8Spec
from serve_llm.engine.model.rope_spec import LongScaling, RopeSpec

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai"]
PoolingType = Literal["cls", "max", "mean", "mean_sqrt_len", "weighted_mean", "last"]
NormPosition = Literal["pre", "post", "post_twice", "output", "sandwich", "parallel", "parallel_two_norms"]


@dataclass(frozen=True)
class NormSpec:
    kind: Literal["rms", "layer"]
    eps: float
    affine: bool = True  # has a weight
    bias: bool = True  # layer norm: has a bias, if affine
    float32_weight: bool = False  # RMS norm: the weight is float32 whatever the model's dtype

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.affine and self.bias


@dataclass(frozen=True)
class QueryTemperature:
    """Multiply the queries at position p by 1 + scale * ln(1 + floor((p + first) / interval)) (arXiv:2501.19399)."""

    scale: float
    interval: int  # tokens
    first: int = 1  # number of the first position


@dataclass(frozen=True)
class AttentionSpec:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float  # multiplies the scores before the softmax
    rope: RopeSpec | None = None  # None: this layer has no rotary embedding
    sliding_window: int | None = None  # tokens that a query attends to on each side, itself included; None: all
    chunked: bool = False  # positions are divided into chunks of `sliding_window`; a query attends to its own chunk
    query_temperature: QueryTemperature | None = None
    softcap: float | None = None  # scaled scores s become softcap * tanh(s / softcap)
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None  # norm of every query and key head, before rope; a layer norm has weights per head
    qk_projection_norm: NormSpec | None = None  # over all query heads together and all key heads together, before rope
    alibi_slopes: tuple[float, ...] | None = None  # ALiBi, one per head: see `kernels.attention.paged_attention`
    qkv_clip: float | None = None  # queries, keys and values are limited to -qkv_clip .. qkv_clip
    sinks: bool = False  # a learned score per head takes part in the softmax and adds no value
    output_gate: bool = False  # each head's output is multiplied by the sigmoid of a projection
    causal: bool = True  # False, in encoders: a query attends to the tokens after it as well; no KV is cached
    cache_scales: bool = False  # an fp8 KV cache holds keys and values divided by scales, which are parameters

    @property
    def cached_head_dim(self) -> int:
        """Size of a cached row."""
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions per head for which rope angles are computed."""
        return self.head_dim


@dataclass(frozen=True)
class MLASpec:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434).

    The cache holds one row per token for all heads: the latent vector, from which keys and values are projected, and a
    rotated key of `qk_rope_head_dim` numbers that all heads share. So there is one KV head, whose keys are these rows
    and whose values are their first `kv_lora_rank` numbers.
    """

    num_heads: int
    q_lora_rank: int | None  # size of the latent query vector; None: one projection from hidden states to queries
    kv_lora_rank: int
    qk_nope_head_dim: int  # dimensions of a query head that meet the key projected from the latent vector
    qk_rope_head_dim: int  # dimensions of a query head that meet the shared key
    v_head_dim: int
    scale: float  # multiplies the scores before the softmax
    norm_eps: float  # RMS norms of the latent vectors
    rope: RopeSpec | None = None
    bias: bool = False  # the down-projections to latent vectors and the output projection have biases
    cache_scales: bool = False  # an fp8 KV cache holds rows divided by a scale, which is a parameter

    num_kv_heads: ClassVar[int] = 1
    sliding_window: ClassVar[None] = None
    chunked: ClassVar[bool] = False
    causal: ClassVar[bool] = True

    @property
    def head_dim(self) -> int:
        """Size of a cached row."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def cached_head_dim(self) -> int:
        return self.head_dim

    @property
    def rope_dim(self) -> int:
        """Dimensions per head for which rope angles are computed."""
        return self.qk_rope_head_dim


AnyAttentionSpec = AttentionSpec | MLASpec | GatedDeltaNetSpec


@dataclass(frozen=True)
class MLPSpec:
    """down(activation(up(x)) / activation_scales), or if gated down(activation(gate(x)) * up(x))."""

    intermediate_size: int
    activation: Activation
    gated: bool = False
    bias: bool = False
    down_bias: bool | None = None  # None: as `bias`, which is then for gate and up
    activation_scales: bool = False  # a vector of the intermediate size; without, 1; never if gated

    @property
    def has_down_bias(self) -> bool:
        return self.bias if self.down_bias is None else self.down_bias


@dataclass(frozen=True)
class GroupedTopK:
    """Group-limited routing (DeepSeek-V2, arXiv:2405.04434): choose experts from the `top_k` best groups only.

    Groups are equal ranges of consecutive experts.
    """

    num_groups: int
    top_k: int
    scores_per_group: int  # a group's score is the sum of its highest scores, this many


@dataclass(frozen=True)
class RouterSpec:
    """Choose `top_k` experts per token by their scores, and the weights of their sum."""

    num_experts: int
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    renormalise: bool = True  # divide the scores of the chosen experts by their sum
    scaling_factor: float = 1.0  # multiplies the weights
    groups: GroupedTopK | None = None
    correction_bias: bool = False  # a bias per expert added to its score for the choice only (arXiv:2408.15664)
    float32: bool = False  # compute the scores in float32 whatever the model's dtype
    bias: bool = False
    scales_inputs: bool = False  # the weights multiply the experts' inputs instead of their outputs; for top_k 1 only


@dataclass(frozen=True)
class MoESpec:
    """Mixture of experts: the weighted sum of the chosen experts, plus a shared expert that every token uses."""

    router: RouterSpec
    expert: MLPSpec
    shared_expert: MLPSpec | None = None
    shared_expert_gate: bool = False  # multiply the shared expert's output by a sigmoid gate
    expert_parallel: bool = False  # a rank holds some experts whole, otherwise a slice of each expert


@dataclass(frozen=True)
class LayerSpec:
    """norm_position, with f and g for attention and feed-forward:

    pre                 x + f(norm(x)), then the same with g
    post                norm(x + f(x)), then the same with g
    post_twice          norm(x + norm(x + f(x))), then norm(x + g(x))
    output              x + norm(f(x)), then the same with g
    sandwich            x + norm(f(norm(x))), then the same with g
    parallel            x + f(norm(x)) + g(norm(x)), with one norm
    parallel_two_norms  x + f(norm(x)) + g(norm(x)), with two norms
    """

    attention: AnyAttentionSpec
    ffn: MLPSpec | MoESpec
    norm: NormSpec  # every norm of the layer
    norm_position: NormPosition = "pre"
    has_attention_norm: bool = True  # False, with "pre": attention reads the residual stream as it is


@dataclass(frozen=True)
class LearnedPositions:
    num_embeddings: int  # rows of the table
    offset: int = 0  # row of position 0


@dataclass(frozen=True)
class PoolerLayer:
    """A linear layer on the pooled vector, with an activation and a norm after it."""

    name: str  # its parameters are "pooler.NAME.weight" and so on
    outputs: int
    bias: bool = True
    activation: str = "none"  # "none" | "tanh" | an `Activation`
    norm: NormSpec | None = None
    folder: str = ""  # where its weights are if not in the checkpoint: a module of sentence-transformers


@dataclass(frozen=True)
class PoolerSpec:
    """How the hidden states of a prompt become one vector."""

    pooling_types: tuple[PoolingType, ...]  # their vectors follow each other
    layers: tuple[PoolerLayer, ...] = ()
    token_ids: tuple[int, ...] = ()  # the last layer is these rows of the LM head
    normalize: bool = False  # scale the vector to length 1
    is_classifier: bool = False  # the vector holds one logit per class; otherwise it is an embedding
    classifies_tokens: bool = False  # every token of a prompt has its own vector

    def vector_size(self, hidden_size: int) -> int:
        own_size = self.layers[-1].outputs if self.layers else hidden_size * len(self.pooling_types)
        return len(self.token_ids) or own_size


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV has the same shape and lifetime: they share one block table per sequence."""

    layers: tuple[int, ...]
    num_kv_heads: int
    head_dim: int
    sliding_window: int | None
    chunked: bool = False  # see `AttentionSpec`
    is_latent: bool = False  # one row per token serves as key and value (`MLASpec`); otherwise one row for each


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    hidden_size: int
    max_position: int  # longest context in tokens that the model supports, rope scaling included
    layers: tuple[LayerSpec, ...]
    final_norm: NormSpec | None
    tie_word_embeddings: bool
    lm_head_bias: bool = False
    learned_positions: LearnedPositions | None = None
    embedding_size: int | None = None  # None: hidden_size; otherwise linear layers project from and to it
    embedding_multiplier: float = 1.0
    rounds_embedding_multiplier: bool = False  # to the model's dtype
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None  # as in `AttentionSpec`; applied after the multiplier
    int8: Int8Spec | None = None  # None: no linear layer of the layers runs in int8
    int8_lm_head: bool = False  # the weights of the LM head are int8, quantised while loading
    int8_embedding: bool = False  # the embedding is the LM head's int8 numbers, to which it is tied
    fp8: bool = False  # quantise the layers' linear layers to 8-bit floats (W8A8) while loading
    grouped: GroupQuantSpec | None = None  # excludes int8 and fp8
    lm_head: bool = True  # False: the model only returns vectors
    pooler: PoolerSpec | None = None  # None: the model returns no vectors
    token_types: int = 0  # rows of the table of token types: which text of a pair a token belongs to
    embedding_norm: NormSpec | None = None  # norm of the embedding, positions and token types added
    calibrated_cache: bool = False  # the checkpoint may have scales for a KV cache in fp8

    @property
    def is_encoder(self) -> bool:
        """Whether queries attend to later tokens, so that a prompt is computed in one step."""
        return not all(layer.attention.causal for layer in self.layers)

    @property
    def has_states(self) -> bool:
        """Whether sequences have states besides their KV, which summarise all tokens and cannot be rolled back."""
        return any(isinstance(layer.attention, GatedDeltaNetSpec) for layer in self.layers)

    @property
    def reads_lm_head(self) -> bool:
        """Whether any row of the LM head is used."""
        return self.lm_head or (self.pooler is not None and bool(self.pooler.token_ids))

    def with_int8(self) -> ModelSpec:
        """Run linear layers and the LM head in int8, quantised while loading. A checkpoint that stores int8 weights
        decides itself which layers they are."""
        if self.int8 is not None:
            return self
        return replace(self, int8=Int8Spec(in_checkpoint=False), int8_lm_head=self.lm_head, grouped=None)

    def with_fp8(self) -> ModelSpec:
        """Run linear layers in 8-bit floats, quantised while loading, and quantise activations too."""
        return replace(self, fp8=True, int8_lm_head=False, grouped=None)

    def with_fp8_weights(self) -> ModelSpec:
        """Run linear layers with 8-bit float weights, quantised while loading unless stored that way."""
        grouped = self.grouped
        if grouped is not None and grouped.in_checkpoint and grouped.layer_forms and grouped.is_float8:
            return self
        return replace(self, grouped=GroupQuantSpec(in_checkpoint=False, default=FLOAT8))

    @property
    def stores_integers(self) -> bool:
        """Whether the checkpoint's layers are codes of few bits that cannot be quantised again."""
        return self.grouped is not None and self.grouped.in_checkpoint and not self.grouped.is_float8

    def with_int4(self, group_size: int) -> ModelSpec:
        """Run linear layers with 4-bit weights and the LM head in int8, unless the checkpoint stores integers."""
        if self.stores_integers:
            return self
        form = GroupQuantForm(4, group_size, has_zeros=True)
        return replace(self, grouped=GroupQuantSpec(in_checkpoint=False, default=form), int8_lm_head=self.lm_head)

    def with_packed_tables(self, rounds: bool) -> ModelSpec:
        """Hold the LM head, and an embedding tied to it, in few bits if the layers are quantised: as the checkpoint
        stores them, or else, if `rounds`, in 4 bits like layers that are rounded to 4 bits, or in int8."""
        if rounds and self.lm_head and self.grouped is not None and self.grouped.rounds_to_int4:
            return replace(self, grouped=self.grouped.with_tables(self.tie_word_embeddings), int8_lm_head=False)
        is_quantised = self.int8 is not None or self.fp8 or self.grouped is not None
        is_int8 = self.int8_lm_head or (rounds and is_quantised and self.lm_head and self.head_form is None)
        return replace(self, int8_lm_head=is_int8, int8_embedding=is_int8 and rounds and self.tie_word_embeddings)

    @property
    def embedding_form(self) -> GroupQuantForm | None:
        """The form in which the embedding is held; None if it is in floating point."""
        return None if self.grouped is None else self.grouped.embedding

    @property
    def head_form(self) -> GroupQuantForm | None:
        """The form in which the LM head is held; None if it is in floating point or int8 without groups."""
        if self.grouped is None or self.tie_word_embeddings:
            return self.embedding_form
        return self.grouped.head

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, MoESpec) for layer in self.layers)

    def with_expert_parallel(self) -> ModelSpec:
        """Distribute whole experts over the ranks."""
        layers = (
            replace(layer, ffn=replace(layer.ffn, expert_parallel=True)) if isinstance(layer.ffn, MoESpec) else layer
            for layer in self.layers
        )
        return replace(self, layers=tuple(layers))

    def with_max_length(self, max_model_len: int) -> ModelSpec:
        """Drop sliding windows, chunks and query temperatures that sequences of up to `max_model_len` tokens never
        reach.

        Build the decoder and count KV groups from this same spec.
        """

        def drop_unreached(attention: AnyAttentionSpec) -> AnyAttentionSpec:
            if not isinstance(attention, AttentionSpec):
                return attention
            if attention.sliding_window is not None and attention.sliding_window >= max_model_len:
                attention = replace(attention, sliding_window=None, chunked=False)
            temperature = attention.query_temperature
            if temperature is not None and temperature.interval > max_model_len:
                attention = replace(attention, query_temperature=None)
            return attention

        return replace(
            self, layers=tuple(replace(layer, attention=drop_unreached(layer.attention)) for layer in self.layers)
        )

    @cached_property
    def longrope_lengths(self) -> frozenset[int | None]:
        """One entry per kind of rope in the layers: the original length of a longrope, None for any other."""
        scalings = {layer.attention.rope.scaling for layer in self.layers if layer.attention.rope is not None}
        return frozenset(scaling.original_length if isinstance(scaling, LongScaling) else None for scaling in scalings)

    @property
    def long_rope_threshold(self) -> int | None:
        """Longest sequence in tokens that uses longrope's short factors; a longer one is recomputed with the long
        ones. None without longrope."""
        return next(iter(self.longrope_lengths), None)

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Ordered by each group's first layer; `StepInputs.groups` and the block tables have the same order. None in
        encoders."""
        members: dict[tuple[int, KVGroup], list[int]] = {}
        for index, layer in enumerate(self.layers):
            attention = layer.attention
            if isinstance(attention, GatedDeltaNetSpec) or not attention.causal:
                continue
            group = KVGroup(
                layers=(),
                num_kv_heads=attention.num_kv_heads,
                head_dim=attention.cached_head_dim,
                sliding_window=attention.sliding_window,
                chunked=attention.chunked,
                is_latent=isinstance(attention, MLASpec),
            )
            # The number of query heads decides which KV heads a rank holds.
            members.setdefault((attention.num_heads, group), []).append(index)
        return tuple(replace(group, layers=tuple(layers)) for (_, group), layers in members.items())
