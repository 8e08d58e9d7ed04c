"""What a model is, as data: one frozen value per part, one entry per layer. A leaf: no torch, no config.json.

Families (`families/*`) write these, the parts beside this file are built from them, `plan` and `execute.memory` count
with them. A difference in a number is a field; in algorithm, another class; in wiring, a placement.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2", "swigluoai"]
Placement = Literal["pre", "post", "inside", "sandwich", "parallel", "parallel_norms"]


@dataclass(frozen=True)
class LinearScaling:
    """Positions divided by `factor`."""

    factor: float


@dataclass(frozen=True)
class DynamicScaling:
    """NTK-aware: a base that grows with the position, past `original_length`."""

    factor: float
    original_length: int


@dataclass(frozen=True)
class Llama3Scaling:
    """Low frequencies divided by `factor`, high ones kept, a smooth passage between."""

    factor: float
    low_frequency_factor: float
    high_frequency_factor: float
    original_length: int


@dataclass(frozen=True)
class YarnScaling:
    """arXiv:2309.00071: interpolation by parts, and cos and sin multiplied by `attention_factor`."""

    factor: float
    attention_factor: float
    beta_fast: float
    beta_slow: float
    original_length: int
    truncate: bool  # borders of the ramp rounded outwards to whole dimensions


@dataclass(frozen=True)
class LongScaling:
    """LongRoPE (arXiv:2402.13753): each frequency divided by its own factor, cos and sin times `attention_factor`.

    All tokens of a sequence have the same factors, the long ones if it is longer than original_length; see
    `inputs.TURNED`.
    """

    long_factors: tuple[float, ...]
    short_factors: tuple[float, ...]
    attention_factor: float
    original_length: int


@dataclass(frozen=True)
class Rope:
    base: float
    scaling: LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongScaling | None = None
    dims: int | None = None  # only so many, the first, of each head are turned; None: all
    interleaved: bool = False  # neighbours are turned together, not the halves of what is turned


@dataclass(frozen=True)
class Norm:
    kind: Literal["rms", "layer"]
    eps: float
    affine: bool = True  # a layer norm with a weight; an rms norm always has one
    bias: bool = True  # of an affine layer norm
    wide: bool = False  # of an rms norm: its weight is in float32, whatever the model's dtype

    @property
    def has_bias(self) -> bool:
        return self.kind == "layer" and self.affine and self.bias


@dataclass(frozen=True)
class Attention:
    heads: int
    kv_heads: int
    head_dim: int
    scale: float  # of the scores
    rope: Rope | None = None  # None: positions come from elsewhere
    window: int | None = None  # tokens that a query sees, itself included; None: all before it
    softcap: float | None = None  # the scaled scores s become softcap * tanh(s / softcap)
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: Norm | None = None  # of every query and key head, before rope; if a layer norm, each with its own weight
    projection_norm_eps: float | None = None  # of rms norms of all query heads as one, and of all key heads
    sinks: bool = False  # one more score for each head, which takes its share of the softmax and adds no value

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that the rope's angles are for."""
        return self.head_dim


@dataclass(frozen=True)
class MLA:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): of a token one row is cached for all heads, a latent
    vector, from which each head's key and value would be made, and a key of rope_dim numbers that all heads share.

    So there is one KV head, whose keys are these rows and whose values are their first kv_lora_rank numbers.
    """

    heads: int
    q_lora_rank: int | None  # of the queries' latent vector; None: they are made of the hidden row at once
    kv_lora_rank: int
    nope_dim: int  # numbers of a query head that meet the key made of the latent vector
    rope_dim: int  # and those that meet the shared key
    value_dim: int  # numbers of a head's value
    scale: float  # of the scores
    norm_eps: float  # of the rms norms of the latent vectors
    rope: Rope | None = None
    bias: bool = False  # of the two products that make latent vectors, and of the output

    kv_heads: ClassVar[int] = 1
    window: ClassVar[None] = None

    @property
    def head_dim(self) -> int:
        """Numbers of a cached row."""
        return self.kv_lora_rank + self.rope_dim


Mixer = Attention | MLA


@dataclass(frozen=True)
class Dense:
    """down(activation(up(x))), or gated: down(activation(gate(x)) * up(x))."""

    width: int
    activation: Activation
    gated: bool = False
    bias: bool = False


@dataclass(frozen=True)
class ExpertGroups:
    """Only experts of the `top_k` best groups are chosen (DeepSeek-V2, arXiv:2405.04434); a group is consecutive."""

    count: int
    top_k: int
    best: int  # so many of its highest scores, added up, are a group's


@dataclass(frozen=True)
class Router:
    """Which `top_k` of the experts a token goes through, by a score of each, and with what weights they are summed."""

    num_experts: int
    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"  # over all experts, or of each for itself
    normalise: bool = True  # the weights of the chosen are their scores, made to add up to 1; else their scores
    factor: float = 1.0  # of the weights
    groups: ExpertGroups | None = None
    correction: bool = False  # a number of each expert is added to its score, for the choice only (arXiv:2408.15664)
    wide: bool = False  # computed in float32, whatever the model's dtype
    bias: bool = False


@dataclass(frozen=True)
class MoE:
    """Mixture of experts: the weighted sum of the chosen experts, and of a shared one that every token goes through."""

    router: Router
    expert: Dense  # each of them
    shared: Dense | None = None
    shared_gate: bool = False  # what the shared one makes is multiplied by the sigmoid of a product of one output
    whole: bool = False  # a rank holds some experts in whole, else a part of each (--enable-expert-parallel)


@dataclass(frozen=True)
class Layer:
    mixer: Mixer
    ffn: Dense | MoE
    norm: Norm  # of each half, or of both where they are parallel
    # x + f(norm(x)), norm(x + f(x)), x + norm(f(x)), x + norm(f(norm(x))) with two norms for each half, or both halves
    # read the same x: x + f(norm(x)) + g(norm(x)), by one norm or (parallel_norms) by one each
    placement: Placement = "pre"

    @property
    def attention(self) -> Attention:
        """The mixer, in a family whose layers have no other."""
        assert isinstance(self.mixer, Attention)
        return self.mixer


@dataclass(frozen=True)
class LearnedPositions:
    count: int  # rows of the table
    offset: int = 0  # row of position 0


@dataclass(frozen=True)
class KVGroup:
    """Layers whose KV has the same shape and lifetime: they share one block table per sequence."""

    layers: tuple[int, ...]
    kv_heads: int
    head_dim: int
    window: int | None
    is_latent: bool = False  # one row of a token for keys and values, of `MLA`; else a row for each


PRODUCTS = frozenset(
    {"q", "k", "v", "output", "gate", "up", "down", "project_in", "project_out", "q_down", "q_up", "kv_down"}
)


def product_of(parameter: str) -> str | None:
    """The product whose weight a parameter is, such as "layers.3.ffn.down"; None for all else, and for the head."""
    product, _, kind = parameter.rpartition(".")
    return product if kind == "weight" and product.rpartition(".")[2] in PRODUCTS else None


@dataclass(frozen=True)
class Int8:
    """Which products are computed in int8 (W8A8): all but those in `kept`. Embedding and head never are."""

    stored: bool  # whether the checkpoint holds int8 weights; otherwise they are made while loading
    kept: frozenset[str] = frozenset()  # such as "layers.3.ffn.down"

    def takes(self, product: str) -> bool:
        """product: such as "layers.3.attention.q"."""
        return product not in self.kept


@dataclass(frozen=True)
class ModelSpec:
    architecture: str
    vocab_size: int
    width: int
    max_position: int  # longest context in tokens that the model is made for, rope scaling included
    layers: tuple[Layer, ...]
    final_norm: Norm | None
    tied_head: bool
    head_bias: bool = False
    positions: LearnedPositions | None = None
    embedding_width: int | None = None  # None: width; else projections stand after the embedding and before the head
    embedding_multiplier: float = 1.0
    rounds_multiplier: bool = False  # embedding_multiplier, to the model's dtype
    logits_multiplier: float = 1.0
    logits_softcap: float | None = None  # as of attention; after the multiplier
    int8: Int8 | None = None  # None: everything is computed in the model's dtype
    fp8: bool = False  # products of the layers in 8-bit floats (W8A8), made while loading; embedding and head never are

    def with_int8(self) -> ModelSpec:
        """The same model with its products in int8, made while loading unless the checkpoint holds them."""
        return self if self.int8 is not None else replace(self, int8=Int8(stored=False))

    @property
    def has_experts(self) -> bool:
        return any(isinstance(layer.ffn, MoE) for layer in self.layers)

    def with_whole_experts(self) -> ModelSpec:
        """The same model for ranks that hold whole experts."""

        def of(ffn: Dense | MoE) -> Dense | MoE:
            return replace(ffn, whole=True) if isinstance(ffn, MoE) else ffn

        return replace(self, layers=tuple(replace(layer, ffn=of(layer.ffn)) for layer in self.layers))

    def with_fp8(self) -> ModelSpec:
        """The same model with its products in 8-bit floats, made while loading."""
        return replace(self, fp8=True)

    def with_max_length(self, max_model_len: int) -> ModelSpec:
        """The same model where no sequence is longer than `max_model_len`: windows that never close are none.

        Build the decoder and count KV groups from one and the same spec, this one.
        """

        def of(mixer: Mixer) -> Mixer:
            if isinstance(mixer, Attention) and mixer.window is not None and mixer.window >= max_model_len:
                return replace(mixer, window=None)
            return mixer

        return replace(self, layers=tuple(replace(layer, mixer=of(layer.mixer)) for layer in self.layers))

    @cached_property
    def long_lengths(self) -> frozenset[int | None]:
        """Of the layers' ropes: the original length of a longrope, None of any other."""
        scalings = {layer.mixer.rope.scaling for layer in self.layers if layer.mixer.rope is not None}
        return frozenset(one.original_length if isinstance(one, LongScaling) else None for one in scalings)

    @property
    def rope_turns_at(self) -> int | None:
        """The longest sequence that longrope's short factors are for; a longer one is computed anew. None without."""
        return next(iter(self.long_lengths), None)

    @cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """In the order of each group's first layer. `StepInputs.groups` and the block tables have the same order."""
        members: dict[tuple[int, int, int, int | None, bool], list[int]] = {}
        for index, layer in enumerate(self.layers):
            mixer = layer.mixer  # the number of query heads decides which KV heads a rank holds
            shape = mixer.kv_heads, mixer.head_dim, mixer.window, isinstance(mixer, MLA)
            members.setdefault((mixer.heads, *shape), []).append(index)
        return tuple(KVGroup(tuple(layers), *key[1:]) for key, layers in members.items())


@dataclass(frozen=True)
class PretrainedSpec:
    """A model in transformers' own code: what is known of it before it is loaded."""

    architecture: str
    vocab_size: int
    max_position: int
    layers: range
