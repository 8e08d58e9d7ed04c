"""ModelBuilder: builds the linear layers and norms of one rank from weights that a loader reads by name.

It reads this rank's share of each weight, packs it in the layout of the kernels, and records what it built in a
`ModelTree`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from serve_llm.engine.model.lora import LoRAExperts, LoRALayers, LoRAPart, Reorder
from serve_llm.engine.model.norm import LayerNorm, Norm, RMSNorm
from serve_llm.engine.model.quantization_spec import FLOAT8, GroupQuantForm, GroupQuantSpec, Int8Spec
from serve_llm.engine.model.shard import Shard
from serve_llm.engine.model.spec import NormSpec
from serve_llm.engine.model.tree import ModelTree
from serve_llm.engine.parallel.groups import ProcessGroups
from serve_llm.engine.quantization import fp8, int4
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.linear_grouped import GroupQuantWeight, merge_rows
from serve_llm.kernels.moe import Experts
from serve_llm.kernels.registry import Kernels

CPU = torch.device("cpu")
Forward = Callable[[Tensor], Tensor]  # (tokens, inputs) -> (tokens, outputs)


class WeightSlice(NamedTuple):
    """A range of rows (dimension 0) or columns (dimension 1) of a parameter; may be empty."""

    dimension: int
    range: range


def is_float32(name: str) -> bool:
    """Whether the parameter is float32 whatever the model's dtype."""
    return name.endswith(("_scale", ".correction", ".sinks", ".decay", ".decay_bias"))


class WeightLoader(Protocol):
    """Reads parameters by name."""

    def __call__(
        self, name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Return a parameter, or only `part` of it, on the model's device.

        shape: of the whole parameter, (outputs, inputs) or (outputs,). dtype: by default the model's, int8 for int8
        weights, and float32 where `is_float32` says so. Do not write to the result, which may be part of a mapped file.
        The file stays mapped as long as the result is in use.
        """


class GroupQuantWeightLoader(Protocol):
    """Reads weights of linear layers that a checkpoint stores as integers."""

    def __call__(self, name: str, shape: tuple[int, int], part: WeightSlice) -> GroupQuantWeight | None:
        """Return `part` of a weight on the model's device, or None if it is not stored as integers or cannot be kept
        so, for instance because groups are not of neighbouring inputs. `WeightLoader` reads such weights."""


def load_no_groups(name: str, shape: tuple[int, int], part: WeightSlice) -> None:
    """A `GroupQuantWeightLoader` for checkpoints without integer weights."""


@dataclass(frozen=True)
class ModelBuilder:
    load: WeightLoader
    kernels: Kernels
    shard: Shard
    groups: ProcessGroups
    int8: Int8Spec | None = None
    fp8: bool = False  # quantise all linear layers to fp8; excludes int8
    grouped: GroupQuantSpec | None = None  # excludes int8 and fp8
    load_grouped: GroupQuantWeightLoader = load_no_groups
    dtype: torch.dtype = torch.float32  # the model's
    device: torch.device = CPU  # the model's
    lora: LoRALayers | None = None  # where linear layers that adapters can change are recorded
    lora_experts: LoRAExperts | None = None  # the experts of a layer, if this is a builder for them
    reorders: tuple[Reorder, ...] = ()  # see `with_row_order`
    prefix: str = ""  # prepended to all parameter names
    experts: list[Experts] = field(default_factory=list)  # the experts of all layers built so far, in order
    tree: ModelTree = field(default_factory=ModelTree)

    def scoped(self, name: str) -> ModelBuilder:
        """A builder for the part `name` inside this builder's part."""
        return replace(self, prefix=f"{self.prefix}{name}.")

    def with_row_order(self, reorder: Reorder) -> ModelBuilder:
        """A builder that passes the name and tensor of every loaded parameter through `reorder`."""

        def load(
            name: str, shape: tuple[int, ...], part: WeightSlice | None = None, dtype: torch.dtype | None = None
        ) -> Tensor:
            return reorder(name, self.load(name, shape, part, dtype))

        def load_grouped(name: str, shape: tuple[int, int], part: WeightSlice) -> GroupQuantWeight | None:
            weight = self.load_grouped(name, shape, part)
            return None if weight is None else weight.map_rows(lambda tensor: reorder(name, tensor))

        return replace(self, load=load, load_grouped=load_grouped, reorders=(*self.reorders, reorder))

    def for_experts(self) -> ModelBuilder:
        """A builder for the experts of a layer. Those in fp8 are weights in groups, which one launch multiplies for
        all experts."""
        lora_experts = None
        if self.lora is not None and self.groups.experts.size == 1:  # others compute rows of other engines
            lora_experts = self.lora.add_experts(is_selected=self._is_selected)
        kernels = replace(self.kernels, pack_stored_fp8=None)
        lora = None if lora_experts is None else self.lora
        builder = replace(self, lora_experts=lora_experts, lora=lora, kernels=kernels)
        if not self.fp8:
            return builder
        return replace(builder, fp8=False, grouped=GroupQuantSpec(in_checkpoint=False, default=FLOAT8))

    def describe(self, description: str) -> None:
        """Record what this builder's part is."""
        self.tree.add(self.prefix.removesuffix("."), description)

    def parameter(self, name: str, *shape: int, part: WeightSlice | None = None) -> Tensor:
        """A parameter that is used unchanged. shape: of the whole."""
        tensor = self._load_copy(name, shape, part)
        self.describe_share(name, tensor, shape)
        return tensor

    def table(self, name: str, *shape: int, part: WeightSlice | None = None) -> Tensor:
        """A parameter of which a step reads single rows: an embedding. shape: of the whole.

        If stored in the model's dtype, it stays in the mapped file, so that only rows that are read take memory.
        """
        tensor = self.load(self.prefix + name, shape, part)
        self.describe_share(name, tensor, shape)
        return tensor

    def replicated_linear(self, name: str, outputs: int, inputs: int) -> Linear:
        """A replicated linear layer: every rank computes all of it."""
        return self.column_parallel_linear({name: outputs}, inputs, {name: range(outputs)})

    def unquantised_linear(
        self, outputs: Mapping[str, int], inputs: int, *, float32: bool = False, bias: bool = False
    ) -> Linear:
        """Linear layers over the same input as one layer that every rank computes whole and that is never quantised.

        outputs: number of outputs of each, by name. float32: weights and input are float32 instead of the model's
        dtype.
        """
        weights = [self.load(f"{self.prefix}{name}.weight", (count, inputs)) for name, count in outputs.items()]
        if float32:
            weights = [weight.float() for weight in weights]
        merged_bias = self._load_merged("bias", outputs) if bias else None
        sizes = f"{inputs} -> {sum(outputs.values())}"
        self._describe_linear("ReplicatedLinear", outputs, sizes, _dtype_name(weights[0].dtype), bias)
        linear = self.kernels.pack(weights[0], merged_bias, weights[1:])
        parts = {name: LoRAPart((size, inputs), range(inputs), range(size)) for name, size in outputs.items()}
        return self._with_adapters(linear, merged_bias, parts, weights[0].dtype)

    def column_parallel_linear(
        self, outputs: Mapping[str, int], inputs: int, shares: Mapping[str, range], *, bias: bool = False
    ) -> Linear:
        """Column-parallel linear layers (Megatron-LM, arXiv:1909.08053) over the same input, merged into one layer.

        outputs: number of outputs of each, by name. shares: this rank's outputs of each. The result concatenates the
        outputs of the layers in this order.
        """
        weights = [
            self._load_weight(name, (count, inputs), WeightSlice(0, shares[name])) for name, count in outputs.items()
        ]
        merged_bias = self._load_merged("bias", outputs, shares) if bias else None
        count = sum(len(shares[name]) for name in outputs)
        sizes = f"{inputs} -> {_share(count, sum(outputs.values()))}"
        self._describe_linear("ColumnParallelLinear", outputs, sizes, self._name_form(outputs, weights), bias)

        def load_scales() -> Tensor:
            return self._load_merged("weight_scale", outputs, shares, 1)

        linear = self._pack_linear(outputs, weights, load_scales, merged_bias)
        parts = {name: LoRAPart((size, inputs), range(inputs), shares[name]) for name, size in outputs.items()}
        return self._with_adapters(linear, merged_bias, parts)

    def row_parallel_linear(self, name: str, outputs: int, inputs: int, share: range, *, bias: bool = False) -> Forward:
        """A row-parallel linear layer (Megatron-LM, arXiv:1909.08053): takes the inputs in `share`, (tokens,
        len(share)), and all-reduces its result over the tensor-parallel group."""
        return self.all_reduced(self.partial_row_parallel_linear(name, outputs, inputs, share, bias=bias))

    def partial_row_parallel_linear(
        self, name: str, outputs: int, inputs: int, share: range, *, bias: bool = False, is_only_share: bool = False
    ) -> Linear:
        """A row-parallel linear layer before the all-reduce.

        The first rank adds the bias, so that it alone computes what a single rank would. is_only_share: no other rank
        has a share of this layer, so this rank adds the bias.
        """
        weight = self._load_weight(name, (outputs, inputs), WeightSlice(1, share))
        adds_bias = is_only_share or self.shard.tp_rank == 0
        rank_bias = None
        if bias:
            rank_bias = self._load_copy(f"{name}.bias", (outputs,), WeightSlice(0, range(outputs if adds_bias else 0)))
        sizes = f"{_share(len(share), inputs)} -> {outputs}"
        form = self._name_form((name,), [weight])
        self._describe_linear("RowParallelLinear", (name,), sizes, form, bias and adds_bias)

        def load_scales() -> Tensor:
            return self._load_copy(f"{name}.weight_scale", (outputs, 1))

        added_bias = rank_bias if adds_bias else None
        linear = self._pack_linear((name,), [weight], load_scales, added_bias)
        return self._with_adapters(linear, added_bias, {name: LoRAPart((outputs, inputs), share, range(outputs))})

    def _with_adapters(
        self, linear: Linear, bias: Tensor | None, parts: Mapping[str, LoRAPart], dtype: torch.dtype | None = None
    ) -> Linear:
        """The layer made of `parts`, with LoRA adapters if the model takes them. dtype: see `LoRALinear`."""
        if self.lora is None:
            return linear
        named = {f"{self.prefix}{name}.weight": part for name, part in parts.items()}
        if self.lora_experts is not None:
            self.lora.add_expert_layer(self.lora_experts, linear, bias, named, is_first="down" not in parts)
            return linear
        return self.lora.wrap(linear, bias, named, self.reorders, is_selected=self._is_selected, dtype=dtype)

    @property
    def _is_selected(self) -> bool:
        """Whether the builder's part computes only the selected rows (see `Decoder.forward`)."""
        return self.shard.is_last and self.prefix.startswith(f"layers.{self.shard.layers.stop - 1}.ffn.")

    def all_reduced(self, forward: Forward) -> Forward:
        """`forward`, with its results summed over the tensor-parallel group."""
        group = self.groups.tensor
        if group.size == 1:
            return forward
        return lambda x: group.all_reduce(forward(x))

    def norm(self, name: str, spec: NormSpec, size: int) -> Norm:
        if spec.kind == "rms":
            return RMSNorm(self.rms_norm_weight(name, spec, size), spec.eps, self.kernels)
        weight = self.parameter(f"{name}.weight", size) if spec.affine else None
        bias = self.parameter(f"{name}.bias", size) if spec.has_bias else None
        self.scoped(name).describe(f"LayerNorm({size})")
        return LayerNorm(weight, bias, spec.eps, self.kernels)

    def rms_norm_weight(self, name: str, spec: NormSpec, size: int) -> Tensor:
        """(size,), in the dtype that decides where `kernels.norm.rms_norm` rounds."""
        dtype = torch.float32 if spec.float32_weight else None  # None: the model's
        if not spec.affine:
            return torch.ones(size, dtype=dtype or self.dtype, device=self.device)
        weight = self.load(f"{self.prefix}{name}.weight", (size,), dtype=dtype).clone()
        self.scoped(name).describe(f"RMSNorm({size}, {_dtype_name(weight.dtype)})")
        return weight

    def _load_merged(
        self, kind: str, outputs: Mapping[str, int], shares: Mapping[str, range] | None = None, *inner: int
    ) -> Tensor:
        """The concatenated biases or scales of several linear layers."""
        parts = [
            self.load(
                f"{self.prefix}{name}.{kind}", (count, *inner), None if shares is None else WeightSlice(0, shares[name])
            )
            for name, count in outputs.items()
        ]
        return torch.cat(parts)

    def _load_weight(self, name: str, shape: tuple[int, int], part: WeightSlice) -> Tensor | GroupQuantWeight:
        """Load a part of a linear layer's weight, as integers if the model keeps those of the checkpoint."""
        full_name = f"{self.prefix}{name}.weight"
        weight = None
        if self.grouped is not None and self.grouped.in_checkpoint:
            weight = self.load_grouped(full_name, shape, part)
        return self.load(full_name, shape, part) if weight is None else weight

    def _pack_linear(
        self,
        names: Iterable[str],
        weights: Sequence[Tensor | GroupQuantWeight],
        load_scales: Callable[[], Tensor],
        bias: Tensor | None,
    ) -> Linear:
        """A linear layer from the concatenated weights of `names`, quantised if the model is.

        load_scales: reads the scales of stored int8 weights, (outputs, 1) float32.
        """
        dense = [weight for weight in weights if isinstance(weight, Tensor)]
        if len(dense) < len(weights):
            return self._pack_integers(weights, bias)
        if self.fp8:
            return self.kernels.pack_fp8(*fp8.quantise(_concatenate(dense)), bias)
        form = self._find_form_at_load(names)
        if form is not None:
            rounded = merge_rows([self.quantise(one, form) for one in dense])
            return self.kernels.pack_grouped(rounded, bias, self.dtype)
        if not self._is_int8(names):
            return self.kernels.pack(dense[0], bias, dense[1:])
        if self.int8 is not None and self.int8.in_checkpoint:
            return self.kernels.pack_int8(torch.cat(dense), load_scales(), bias)
        numbers, scales = zip(*map(self.kernels.quantise_int8, dense), strict=True)
        return self.kernels.pack_int8(_concatenate(numbers), _concatenate(scales), bias)

    def _pack_integers(self, weights: Sequence[Tensor | GroupQuantWeight], bias: Tensor | None) -> Linear:
        """One layer if all weights are integers of the same form, else several whose results are concatenated."""
        grouped = [weight for weight in weights if isinstance(weight, GroupQuantWeight)]
        if len(grouped) == len(weights) and all(grouped[0].is_like(weight) for weight in grouped):
            return self._pack_grouped(merge_rows(grouped), bias)
        sizes = [weight.shape[0] for weight in weights]
        biases = [None] * len(sizes) if bias is None else list(torch.split(bias, sizes))
        layers = [
            self.kernels.pack(weight, own_bias) if isinstance(weight, Tensor) else self._pack_grouped(weight, own_bias)
            for weight, own_bias in zip(weights, biases, strict=True)
        ]
        return lambda x: torch.cat([layer(x) for layer in layers], -1)

    def _pack_grouped(self, weight: GroupQuantWeight, bias: Tensor | None) -> Linear:
        if weight.rounds_inputs and self.kernels.pack_stored_fp8 is not None:
            return self.kernels.pack_stored_fp8(weight, bias, self.dtype)
        return self.kernels.pack_grouped(replace(weight, input_scale=None), bias, self.dtype)

    def quantise(self, weight: Tensor, form: GroupQuantForm) -> GroupQuantWeight:
        """Round a weight as `--quantization` says."""
        if form.is_float8:
            return fp8.quantise_codes(weight)
        return int4.quantise(weight, form.group_size, self.kernels.quantise_int4)

    def _find_form_at_load(self, names: Iterable[str]) -> GroupQuantForm | None:
        """The form in which the merged layer of `names` is quantised while loading."""
        if self.grouped is None or self.grouped.in_checkpoint:
            return None
        return self.grouped.find_form(self.prefix + next(iter(names)))

    def _name_form(self, names: Iterable[str], weights: Sequence[Tensor | GroupQuantWeight]) -> str:
        """Describe how a linear layer holds its weights."""
        first = weights[0]
        if isinstance(first, GroupQuantWeight):
            return f"{'fp8' if first.is_float8 else f'int{first.bits}'} in groups of {first.group_size}"
        if form := self._find_form_at_load(names):
            return "fp8" if form.is_float8 else f"int{form.bits} in groups of {form.group_size}"
        if self.fp8:
            return "fp8"
        return "int8" if self._is_int8(names) else _dtype_name(first.dtype)

    def _is_int8(self, names: Iterable[str]) -> bool:
        """Whether the merged linear layer of `names` runs in int8. They never differ in this, see `registry`."""
        return self.int8 is not None and all(self.int8.is_quantised(self.prefix + name) for name in names)

    def _load_copy(self, name: str, shape: tuple[int, ...], part: WeightSlice | None = None) -> Tensor:
        return self.load(self.prefix + name, shape, part).clone(memory_format=torch.contiguous_format)

    def describe_share(self, name: str, tensor: Tensor, whole: Sequence[int], form: str = "") -> None:
        """Record a parameter whose part on this rank is `tensor`. form: how it is held; "" for the tensor's dtype."""
        sizes = " x ".join(_share(size, of) for size, of in zip(tensor.shape, whole, strict=True))
        self.scoped(name).describe(f"{sizes}, {form or _dtype_name(tensor.dtype)}")

    def _describe_linear(self, kind: str, names: Iterable[str], sizes: str, form: str, bias: bool) -> None:
        self.scoped("+".join(names)).describe(f"{kind}({sizes}, {form}{', bias' if bias else ''})")


def _concatenate(rows: Sequence[Tensor]) -> Tensor:
    """One matrix of all rows; the only one itself."""
    return rows[0] if len(rows) == 1 else torch.cat(list(rows))


def _share(size: int, whole: int) -> str:
    return str(size) if size == whole else f"{size} of {whole}"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
