"""Which linear layers of a model are quantised, and how, as data. Torch-free; part of `engine.model.spec`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

LINEAR_LAYERS = frozenset(
    {"q", "k", "v", "z", "output", "gate", "up", "down", "project_in", "project_out", "q_down", "q_up", "kv_down"}
)
ATTENTION_INPUTS = ("q", "k", "v", "z", "q_down", "kv_down")  # layers computed as one in a layer's attention
MLP_INPUTS = ("gate", "up")


def find_linear_layer(parameter: str) -> str | None:
    """Return the linear layer to which a parameter belongs, such as "layers.3.ffn.down"; None for other parameters and
    for the LM head."""
    layer, _, kind = parameter.rpartition(".")
    return layer if kind == "weight" and layer.rpartition(".")[2] in LINEAR_LAYERS else None


def find_merged_layer(linear_layer: str) -> str:
    """Return the same name for linear layers that are computed as one, such as queries, keys and values of a layer."""
    parent, _, name = linear_layer.rpartition(".")
    merged = ATTENTION_INPUTS if parent.endswith(".attention") else MLP_INPUTS
    return parent if name in merged else linear_layer


@dataclass(frozen=True)
class Int8Spec:
    """Which linear layers run in int8 (W8A8): all those inside layers, except `excluded`."""

    in_checkpoint: bool  # the checkpoint stores int8 weights; otherwise they are quantised while loading
    excluded: frozenset[str] = frozenset()  # such as "layers.3.ffn.down"

    def is_quantised(self, linear_layer: str) -> bool:
        """linear_layer: such as "layers.3.attention.q"."""
        return linear_layer not in self.excluded


@dataclass(frozen=True)
class GroupQuantForm:
    """Weights as codes of few bits with a scale per group of inputs; activations stay in floating point."""

    bits: int  # 4 or 8
    group_size: int | None  # None: all inputs
    has_zeros: bool  # groups also have zero points or minimums
    has_order: bool = False  # groups do not consist of neighbouring inputs
    scale_bytes: int = 2  # bytes of each scale, zero point and minimum
    has_divisors: bool = False  # each output divides its scales by one number
    has_table: bool = False  # codes are indices of a table of 16 numbers
    is_float8: bool = False  # codes are 8-bit floats (e4m3); otherwise, without a table, they are integers
    block_outputs: int = 1  # outputs that share scales
    rounds_inputs: bool = False  # as in `kernels.linear_grouped.GroupQuantWeight`


MXFP4 = GroupQuantForm(4, 32, has_zeros=False, scale_bytes=1, has_table=True)
FLOAT8 = GroupQuantForm(8, None, has_zeros=False, scale_bytes=4, is_float8=True)  # form made by `--quantization fp8`


@dataclass(frozen=True)
class GroupQuantSpec:
    """Which linear layers have weights in a `GroupQuantForm`."""

    in_checkpoint: bool  # the checkpoint stores them so; otherwise they are quantised while loading
    default: GroupQuantForm | None
    others: Mapping[str, GroupQuantForm | None] = field(default_factory=dict, hash=False)  # by linear layer
    embedding: GroupQuantForm | None = None  # None: its weight does not consist of integers
    head: GroupQuantForm | None = None  # for the LM head, if it is not tied to the embedding

    @property
    def is_float8(self) -> bool:
        """Whether all quantised layers have 8-bit floats."""
        return all(form.is_float8 for form in self.layer_forms)

    @property
    def rounds_to_int4(self) -> bool:
        """Whether weights are rounded to 4 bits while loading."""
        return not self.in_checkpoint and not self.is_float8

    def with_tables(self, is_tied: bool) -> GroupQuantSpec:
        """The same with the LM head, and an embedding that is tied to it, in the form of the layers."""
        return replace(self, head=self.default, embedding=self.default if is_tied else None)

    @property
    def layer_forms(self) -> list[GroupQuantForm]:
        """The forms of the quantised layers."""
        return [form for form in (self.default, *self.others.values()) if form is not None]

    @property
    def rounds_inputs(self) -> bool:
        """Whether a layer's inputs may be rounded to 8-bit floats, as the checkpoint's authors did."""
        return any(form.rounds_inputs for form in self.layer_forms)

    def find_form(self, linear_layer: str) -> GroupQuantForm | None:
        """Return None for the model's dtype. linear_layer: such as "layers.3.attention.q"."""
        return self.others.get(linear_layer, self.default)
