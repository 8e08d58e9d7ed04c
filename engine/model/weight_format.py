"""How linear modules of quantised checkpoints store their weights, as data. Torch-free; see `weights.quantised`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from serve_llm.engine.model.quantization_spec import MXFP4, GroupQuantForm

Strategy = Literal["tensor", "channel", "block"]
Inputs = Literal["as they are", "dynamic", "static"]  # how a format's authors rounded the inputs of linear modules
# Tensors with scales for rounding activations, queries, keys or values to 8 bits or less in attention or the KV cache,
# as regular expressions for their names. Attention is not quantised that way; `cache_scales` finds those that an fp8 KV
# cache uses.
ATTENTION_SCALES = (
    r".*\.[qkv]_(scale|zero_point|global_scale)",
    r".*\.[qkv]_proj\.output_(scale|zero_point)",
    r".*\.(kv|prob|prob_output)_scale",
)


@dataclass(frozen=True)
class PackedIntegers:
    """Integers of `bits` bits packed in int32 words, with a scale and a zero point for each group of inputs.

    awq, awq_gemv: AutoAWQ's versions "gemm" and "gemv". gptq, gptq_v2: the checkpoint formats of AutoGPTQ and
    GPTQModel. compressed: the format "pack-quantized" of compressed-tensors.
    """

    layout: Literal["awq", "awq_gemv", "gptq", "gptq_v2", "compressed"]
    bits: int
    group_size: int | None  # None: one group of all inputs
    is_symmetric: bool  # all zero points are 2 ** (bits - 1)
    has_order: bool = False  # groups do not consist of neighbouring inputs
    is_of_tensor: bool = False  # all inputs of all outputs share a scale

    @property
    def marker(self) -> str:
        """The tensor that only quantised modules have."""
        return self.weight

    @property
    def weight(self) -> str:
        """The tensor with the integers."""
        return "weight_packed" if self.layout == "compressed" else "qweight"

    @property
    def required(self) -> tuple[str, ...]:
        """The other tensors that a module must have."""
        if self.layout != "compressed":
            return ("scales", "qzeros")
        return ("weight_scale", "weight_shape") + (() if self.is_symmetric else (self.zero_point,))

    @property
    def zero_point(self) -> str:
        """The tensor with the zero points; symmetric compressed modules usually lack it."""
        return "weight_zero_point" if self.layout == "compressed" else "qzeros"

    @property
    def optional(self) -> tuple[str, ...]:
        known = {"awq": (), "awq_gemv": (), "compressed": ("weight_g_idx", self.zero_point)}
        return known.get(self.layout, ("g_idx",))

    @property
    def form(self) -> GroupQuantForm:
        """The form in which the weight stays in memory."""
        return GroupQuantForm(8 if self.bits == 8 else 4, self.group_size, not self.is_symmetric, self.has_order)


@dataclass(frozen=True)
class ScaledNumbers:
    """8-bit floats (e4m3) or int8, one per byte, with scales for a tensor, for each output or for each block.

    A block of int8 covers inputs of one output.
    """

    kind: Literal["fp8", "int8"]
    strategy: Strategy
    block: tuple[int, int] = (0, 0)  # outputs and inputs that share a scale, with strategy "block"
    scale: str = "weight_scale"
    other_scale: str = ""  # some writers' name for it
    divisor: float = 1.0  # scales are divided by this number
    bits: int = 8  # in int8, which may hold integers of fewer bits
    has_zeros: bool = False  # integers have zero points, stored like the scales
    weight: str = "weight"
    zero_point: str = "weight_zero_point"  # without has_zeros it is all 0, if present
    has_float32_scales: bool = False  # instead of 16 bits, in int8
    inputs: Inputs = "as they are"  # with fp8; static: rounded with a scale from the checkpoint
    has_exponents: bool = False  # scales are powers of two, stored as exponents in bytes (MXFP8), in fp8

    input_scales = ("input_scale", "activation_scale", "act_scale")  # names of that scale

    @property
    def marker(self) -> str:
        return self.scale

    @property
    def optional(self) -> tuple[str, ...]:
        names = (*self.input_scales, "input_zero_point", "activation_scale_ub", "weight_shape", "weight_format")
        return (*names, self.zero_point) if self.kind == "int8" else names

    @property
    def required(self) -> tuple[str, ...]:
        return (self.scale, self.zero_point) if self.has_zeros else (self.scale,)

    @property
    def form(self) -> GroupQuantForm:
        size = self.block[1] if self.strategy == "block" else None
        if self.kind == "int8":
            scale_bytes = 2 if self.divisor == 1 and not self.has_float32_scales else 4  # quotients fill 32 bits
            return GroupQuantForm(4 if self.bits <= 4 else 8, size, self.has_zeros, scale_bytes=scale_bytes)
        return GroupQuantForm(
            8,
            size,
            has_zeros=False,
            scale_bytes=4,
            is_float8=True,
            block_outputs=self.block[0] if self.strategy == "block" else 1,
            rounds_inputs=self.inputs != "as they are",
        )


# 8-bit floats with a power of two per 32 inputs
MXFP8 = ScaledNumbers("fp8", "block", (1, 32), has_exponents=True)


@dataclass(frozen=True)
class NvFp4:
    """4-bit floats (e2m1), two per byte, with an e4m3 scale per 16 inputs and one scale for the whole tensor.

    compressed: the format "nvfp4-pack-quantized" of compressed-tensors, which divides by the scale of the tensor.
    modelopt: the format of NVIDIA's Model Optimizer, which multiplies by it.
    """

    layout: Literal["compressed", "modelopt"] = "compressed"

    @property
    def weight(self) -> str:
        return "weight_packed" if self.layout == "compressed" else "weight"

    @property
    def marker(self) -> str:
        return "weight_global_scale" if self.layout == "compressed" else "weight_scale_2"

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight_scale", self.marker)

    optional = ("input_global_scale", "input_scale")

    @property
    def form(self) -> GroupQuantForm:
        return GroupQuantForm(4, 16, has_zeros=False, scale_bytes=1, has_divisors=True, has_table=True)


@dataclass(frozen=True)
class MxFp4:
    """4-bit floats (e2m1), two per byte, with a power of two per 32 inputs: compressed-tensors'
    "mxfp4-pack-quantized", and Quark's fp4, whose tensor is named `weight`."""

    weight: str = "weight_packed"
    marker: str = "weight_packed"
    required = ("weight_scale",)
    optional = ()
    form = MXFP4


@dataclass(frozen=True)
class TorchaoInt4:
    """torchao's `Int4Tensor`: integers from -8 to 7, two per byte, with a scale and a floating-point offset for each
    group of inputs."""

    group_size: int

    weight = "_weight_qdata"
    marker = "_weight_qdata"
    required = ("_weight_scale", "_weight_zero_point")
    optional = ()

    @property
    def form(self) -> GroupQuantForm:
        return GroupQuantForm(4, self.group_size, has_zeros=True, scale_bytes=4)


@dataclass(frozen=True)
class QuarkInt4:
    """Quark's int4 and uint4 per group: integers of 4 bits packed in int32 words along the outputs, with a scale and a
    zero point for each group of inputs."""

    group_size: int
    is_symmetric: bool
    is_signed: bool  # int4, from -8 to 7
    is_reordered: bool  # the numbers of a word are in AutoAWQ's order

    weight = "weight"
    marker = "weight_scale"

    @property
    def required(self) -> tuple[str, ...]:
        return ("weight_scale",) if self.is_symmetric else ("weight_scale", "weight_zero_point")

    optional = ("weight_zero_point", "input_scale", "input_zero_point", "output_scale", "output_zero_point")

    @property
    def form(self) -> GroupQuantForm:
        return GroupQuantForm(4, self.group_size, not self.is_symmetric)


@dataclass(frozen=True)
class BitsAndBytes4:
    """bitsandbytes' 4 bits: indices into a table, two per byte, with a scale per block that may be quantised too."""

    quant_type: Literal["nf4", "fp4"]
    is_nested: bool  # scales are quantised
    item_bytes: int = 1  # bytes are stored as elements of this size, of any type

    weight = "weight"
    optional = ()

    @property
    def marker(self) -> str:
        return f"weight.quant_state.bitsandbytes__{self.quant_type}"

    @property
    def required(self) -> tuple[str, ...]:
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if self.is_nested else ()
        return (self.marker, "weight.absmax", "weight.quant_map", *nested)

    @property
    def form(self) -> GroupQuantForm:
        return GroupQuantForm(4, 64, has_zeros=False, scale_bytes=4, has_table=True)


WeightFormat = PackedIntegers | ScaledNumbers | NvFp4 | MxFp4 | TorchaoInt4 | QuarkInt4 | BitsAndBytes4


class QuantizedModules(Protocol):
    """Which modules of a checkpoint are quantised.

    spellings: the names that one module may have, such as "model.layers.0.mlp.up_proj"; see
    `WeightMap.list_spellings`. Settings in config.json under any of these names count.
    """

    def find_format(self, *spellings: str) -> WeightFormat | None:
        """Return how the module stores its weight; None: in floating point."""

    def find_embedding_format(self, *spellings: str) -> WeightFormat | None:
        """Return how the embedding stores its weight; None: in floating point."""
        return self.find_format(*spellings)

    def find_form(self, *spellings: str) -> GroupQuantForm | None:
        """Return the form in which its weight stays in memory, if config.json says so; None: the model's dtype."""
        found = self.find_format(*spellings)
        return None if found is None else found.form

    def find_head_form(self, *spellings: str) -> GroupQuantForm | None:
        """Return the form in which the LM head stays in memory; None: the model's dtype."""
        return None


@dataclass(frozen=True)
class FormatGroup:
    """All modules that match `targets` share a format."""

    # Module names, `re:` and a regular expression, "Linear" for all linear modules, or "Embedding".
    targets: tuple[str, ...]
    format: WeightFormat | None


@dataclass(frozen=True)
class TargetedModules(QuantizedModules):
    """Modules chosen as in compressed-tensors: by name, else by regular expression, else all linear modules."""

    groups: tuple[FormatGroup, ...]
    ignore: tuple[str, ...] = ()

    def find_format(self, *spellings: str) -> WeightFormat | None:
        return self._find_format(spellings, "Linear")

    def find_embedding_format(self, *spellings: str) -> WeightFormat | None:
        return self._find_format(spellings, "Embedding")

    def _find_format(self, spellings: tuple[str, ...], kind: str) -> WeightFormat | None:
        """kind: the module's class."""
        if any(_matches(entry, *spellings) for entry in self.ignore):
            return None
        named = [group for group in self.groups if any(_matches(target, *spellings) for target in group.targets)]
        of_class = [group for group in self.groups if kind in group.targets]
        return next((group.format for group in (*named, *of_class)), None)

    def find_head_form(self, *spellings: str) -> GroupQuantForm | None:
        return self.find_form(*spellings)


def _matches(target: str, *spellings: str) -> bool:
    """Whether the target names the module, or is `re:` and a regular expression that matches the start of its name."""
    if target.startswith("re:"):
        return any(re.match(target[3:], name) for name in spellings)
    return target in spellings


@dataclass(frozen=True)
class MarkedModules(QuantizedModules):
    """All modules whose `WeightFormat.marker` is in the checkpoint, as for fp8 and bitsandbytes."""

    format: WeightFormat
    unconverted: tuple[str, ...]  # dotted parts of module names, or `re:` and a regular expression

    def find_format(self, *spellings: str) -> WeightFormat:
        return self.format

    def find_form(self, *spellings: str) -> GroupQuantForm | None:
        left_out = any(
            _matches(entry, name) or f".{entry}." in f".{name}." for entry in self.unconverted for name in spellings
        )
        return None if left_out else self.format.form


@dataclass(frozen=True)
class NamedModules(QuantizedModules):
    """The modules that config.json names, each with its format."""

    formats: Mapping[str, WeightFormat] = field(hash=False)

    def find_format(self, *spellings: str) -> WeightFormat | None:
        return next((self.formats[name] for name in spellings if name in self.formats), None)

    def find_head_form(self, *spellings: str) -> GroupQuantForm | None:
        return self.find_form(*spellings)


@dataclass(frozen=True)
class DynamicModules(QuantizedModules):
    """All modules, with rules for some, as in GPTQModel's `dynamic`: the first rule whose pattern matches applies."""

    format: PackedIntegers
    rules: tuple[tuple[str, WeightFormat | None], ...] = ()  # regular expression for the start of a name -> its format
    unconverted: tuple[str, ...] = ()  # parts of names of modules that lack the format's tensors
    packs_head: bool = False

    def find_format(self, *spellings: str) -> WeightFormat | None:
        for pattern, own_format in self.rules:
            if any(re.match(pattern, name) for name in spellings):
                return own_format
        return self.format

    def find_form(self, *spellings: str) -> GroupQuantForm | None:
        left_out = any(part in name for part in self.unconverted for name in spellings)
        return None if left_out else super().find_form(*spellings)

    def find_head_form(self, *spellings: str) -> GroupQuantForm | None:
        return self.find_form(*spellings) if self.packs_head else None
