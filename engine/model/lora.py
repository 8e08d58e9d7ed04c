"""LoRA (arXiv:2106.09685): linear layers that add the low-rank products of adapters to the rows that use them.

Each rank holds up to --max-loras adapters in slots. On a CPU, a step's tokens are grouped by slot, and separate kernels
compute the products of all groups of a layer; without these kernels, the model's linear kernels compute one group after
another. On a GPU, a layer's slots have fixed addresses, and kernels read each row's slot on the device, so that a
captured step serves any adapters; the rows of embeddings and experts are grouped there too, and steps whose adapters
change these are not captured. A row has the same bits in any batch, and rows without an adapter are not touched.
Row-parallel layers add their products before the all-reduce.

DoRA (arXiv:2402.09353) also multiplies each output, without the bias, by its magnitude / the length of its row of the
weight with the adapter. That factor is computed when the adapter is loaded, and the product's weight includes it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.lora_mapping import LoRAMapping, SlotRows
from serve_llm.engine.model.lora_targets import count_rows
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.lora import ExpansionWeight, LoRAGroups, LoRAKernels, LoRAProduct, LoRASlots, OutputScale

ADAPTABLE = re.compile(r"layers\.\d+\.(attention|ffn|ffn\.shared)\.\w+\.weight|head\.weight")
Reorder = Callable[[str, Tensor], Tensor]
ReadRows = Callable[[str, tuple[int, int], range], Tensor]  # parameter, its shape, row numbers -> these rows, float32


@dataclass(frozen=True)
class BaseWeights:
    """The base model's weights as the checkpoint stores them: dequantised, and without the effect of --quantization."""

    read_rows: ReadRows
    release: Callable[[], None]  # frees the memory that reading took


@dataclass(frozen=True, eq=False)
class LoRAPart:
    """A rank's part of a weight of a merged linear layer."""

    shape: tuple[int, int]  # the whole weight
    inputs: range  # on this rank
    outputs: range  # on this rank


@dataclass(frozen=True, eq=False)
class Expansion:
    """The second product of an adapter for one part of a linear layer, and the columns that it reads."""

    columns: slice  # columns of the first product's result
    outputs: slice  # columns of the layer's result
    up: Linear
    scale: OutputScale | None = None  # scales the layer's own outputs before the product is added


@dataclass(frozen=True, eq=False)
class LoRALayerWeights:
    """What an adapter adds to a linear layer: up @ down @ x. `up` includes the scale."""

    down: Linear
    expansions: tuple[Expansion, ...]

    def add_to(self, y: Tensor, x: Tensor, rows: Tensor | None) -> None:
        """Add the product for these rows of x (tokens, inputs) to y (tokens, outputs). None: all rows."""
        for chunk in _split_rows(y, rows):
            hidden = self.down(x[chunk])
            for expansion in self.expansions:
                product = expansion.up(hidden[:, expansion.columns].contiguous())
                outputs = y[:, expansion.outputs]
                if expansion.scale is not None:
                    outputs[chunk] = expansion.scale(outputs[chunk])
                _add_rows(outputs, chunk, product)


class UnfusedLoRA:
    """Computes adapters with the model's linear kernels. Contract: `kernels.lora.LoRAKernels`."""

    def __init__(self, pack: Callable[[Tensor], Linear]) -> None:
        self._pack = pack

    def pack(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> LoRALayerWeights:
        packed = [Expansion(one.columns, one.outputs, self._pack(one.up), one.scale) for one in expansions]
        return LoRALayerWeights(self._pack(down), tuple(packed))

    def join(self, products: Sequence[LoRALayerWeights]) -> None:
        """Do nothing: the products are linear layers, each with memory of its own."""

    def prepare(
        self, groups: Sequence[tuple[LoRALayerWeights, Tensor | None]]
    ) -> Sequence[tuple[LoRALayerWeights, Tensor | None]]:
        return groups

    def add(self, y: Tensor, x: Tensor, groups: Sequence[tuple[LoRALayerWeights, Tensor | None]]) -> None:
        for product, rows in groups:
            product.add_to(y, x, rows)


@dataclass(frozen=True, eq=False)
class LoRAEmbeddingWeights:
    """What an adapter adds to an embedding: up @ down[id]. `up` includes the scale."""

    down: Tensor  # (this rank's ids, rank)
    up: Linear
    scale: OutputScale | None = None  # scales the embedding itself before the product is added


@dataclass(eq=False, repr=False)
class LoRAEmbedding:
    """This rank's part of the adapters of an embedding."""

    ids: range  # this rank's part of the vocabulary
    mapping: LoRAMapping
    products: dict[int, LoRAEmbeddingWeights] = field(default_factory=dict)  # by slot

    def add_to(self, y: Tensor, ids: Tensor) -> None:
        """Add the products of this rank's ids, (tokens,), to y, (tokens, embedding size)."""
        for slot, rows in self.mapping.groups:
            product = self.products.get(slot)
            if product is None:
                continue
            for chunk in _split_rows(y, rows):
                own = ids[chunk] - self.ids.start
                is_elsewhere = (own < 0) | (own >= len(self.ids))
                hidden = functional.embedding(own.masked_fill_(is_elsewhere, 0), product.down)
                if product.scale is not None:
                    y[chunk] = product.scale(y[chunk])
                _add_rows(y, chunk, product.up(hidden.masked_fill_(is_elsewhere.unsqueeze(1), 0.0)))


@dataclass(eq=False, repr=False)
class LoRALinear:
    """A linear layer with the products of the loaded adapters."""

    base: Linear
    bias: Tensor | None  # (outputs,), added by `base`
    parts: Mapping[str, LoRAPart]  # by parameter, such as "layers.3.attention.q.weight"; in the order of the outputs
    reorders: tuple[Reorder, ...]  # reorder the rows of a parameter to match the layer's outputs
    mapping: LoRAMapping
    kernels: LoRAKernels
    dtype: torch.dtype | None = None  # dtype of the products; None: the model's
    products: dict[int, LoRAProduct] = field(default_factory=dict)  # by slot
    slots: LoRASlots | None = None  # on a GPU these hold the adapters instead of `products`
    _step_groups: list[SlotRows] | None = None  # for which `_groups` was prepared
    _groups: LoRAGroups | None = None  # None: no product changes the layer

    def pack(self, down: Tensor, expansions: Sequence[ExpansionWeight]) -> LoRAProduct:
        """Pack a product for `put`. See `LoRAKernels.pack`."""
        return (down, expansions) if self.slots is not None else self.kernels.pack(down, expansions)

    def put(self, slot: int, product: LoRAProduct | None) -> None:
        """product: from `pack`; None if the adapter does not change the layer."""
        if self.slots is None:
            self._step_groups = self._groups = None  # which keeps no adapter in memory
            self.products.pop(slot, None)
            if product is not None:
                self.products[slot] = product
        elif product is None:
            self.slots.clear(slot)
        else:
            down, expansions = product
            self.slots.put(slot, down, expansions)

    def __call__(self, x: Tensor, /) -> Tensor:
        y = self.base(x)
        if self.slots is not None:
            if self.mapping.slots is not None:
                self.slots.add(y, x, self.mapping.slots.expand(len(x)))
            return y
        step_groups = self.mapping.groups
        if step_groups:
            if step_groups is not self._step_groups:
                self._prepare(step_groups)
            if self._groups is not None:
                self.kernels.add(y, x, self._groups)
        return y

    def _prepare(self, step_groups: list[SlotRows]) -> None:
        groups = [(self.products[slot], rows) for slot, rows in step_groups if slot in self.products]
        self._groups = self.kernels.prepare(groups) if groups else None
        self._step_groups = step_groups


class LoRAExperts:
    """The layers of a rank's experts with the products of the loaded adapters; see `kernels.moe`. Finds the rows of
    each adapter among those of an expert."""

    def __init__(self, mapping: LoRAMapping) -> None:
        self.mapping = mapping
        self.firsts: list[LoRALinear] = []  # by expert
        self.lasts: list[LoRALinear] = []
        self._slots: set[int] = set()  # slots whose adapters change an expert

    @property
    def is_used(self) -> bool:
        return any(slot in self._slots for slot, _ in self.mapping.groups)

    def update(self, slot: int) -> None:
        """Call this when the products of the slot have changed."""
        self._slots.discard(slot)
        if any(slot in layer.products for layer in (*self.firsts, *self.lasts)):
            self._slots.add(slot)

    def add_to_first(self, expert: int, y: Tensor, x: Tensor, tokens: Tensor) -> None:
        self._add(self.firsts[expert], y, x, tokens)

    def add_to_last(self, expert: int, y: Tensor, x: Tensor, tokens: Tensor) -> None:
        self._add(self.lasts[expert], y, x, tokens)

    def _add(self, layer: LoRALinear, y: Tensor, x: Tensor, tokens: Tensor) -> None:
        slots = None
        groups = []
        for slot, rows in self.mapping.groups:
            product = layer.products.get(slot)
            if product is None or not len(tokens):
                continue
            if rows is not None and slots is None:
                slots = self.mapping.find_slots(tokens.device)[tokens]
            own = None if slots is None or rows is None else (slots == slot).nonzero().flatten()
            if own is None or len(own):
                groups.append((product, own))
        if groups:
            layer.kernels.add(y, x, layer.kernels.prepare(groups))


AllocateSlots = Callable[[LoRALinear], LoRASlots]


class LoRALayers:
    """All layers of a rank that adapters can change, and the rows of the current step."""

    def __init__(self, kernels: LoRAKernels, allocate: AllocateSlots | None = None) -> None:
        """allocate: creates the slots of a layer on a GPU; not used for experts and the embedding."""
        self.kernels = kernels
        self._allocate = allocate
        self._are_allocated = allocate is None
        self.layers: list[LoRALinear] = []  # including those of experts
        self.experts: list[LoRAExperts] = []
        self.embedding: LoRAEmbedding | None = None  # None where the rank has no part of the layer
        self.base_weights: BaseWeights | None = None  # None until the model is loaded
        self._all = LoRAMapping()
        self._selected = LoRAMapping()  # in the last layer, after attention
        self._logits = LoRAMapping()  # rows of the LM head

    def wrap(
        self,
        base: Linear,
        bias: Tensor | None,
        parts: Mapping[str, LoRAPart],
        reorders: tuple[Reorder, ...],
        *,
        is_selected: bool,
        dtype: torch.dtype | None = None,
    ) -> Linear:
        """Return `base` with adapters, if they can change it and this rank has a part of it.

        bias: what `base` adds. is_selected: it computes only the selected rows (see `Decoder.forward`). dtype: see
        `LoRALinear`.
        """
        has_share = any(part.inputs and part.outputs for part in parts.values())
        if not has_share or not all(map(ADAPTABLE.fullmatch, parts)):
            return base
        mapping = self._selected if is_selected else self._all
        return self._add(LoRALinear(base, bias, parts, reorders, mapping, self.kernels, dtype))

    def add_experts(self, *, is_selected: bool) -> LoRAExperts:
        """Return the adapters of a layer's experts. is_selected: as in `wrap`."""
        experts = LoRAExperts(self._selected if is_selected else self._all)
        self.experts.append(experts)
        return experts

    def add_expert_layer(
        self, experts: LoRAExperts, base: Linear, bias: Tensor | None, parts: Mapping[str, LoRAPart], *, is_first: bool
    ) -> None:
        """Record the next expert's layer before the activation, or the one after it."""
        layer = LoRALinear(base, bias, parts, (), experts.mapping, self.kernels)
        (experts.firsts if is_first else experts.lasts).append(layer)
        self._add(layer)

    def wrap_head(self, base: Linear, bias: Tensor | None, part: LoRAPart) -> Linear:
        """Return the LM head with adapters, if this rank has a part of it. bias: what `base` adds."""
        if not part.outputs:
            return base
        return self._add(LoRALinear(base, bias, {"head.weight": part}, (), self._logits, self.kernels))

    def add_embedding(self, ids: range) -> LoRAEmbedding | None:
        """Add adapters to the embedding. ids: those of this rank; None if there are none."""
        self.embedding = LoRAEmbedding(ids, self._all) if ids else None
        return self.embedding

    def _add(self, layer: LoRALinear) -> LoRALinear:
        self.layers.append(layer)
        return layer

    @property
    def has_slots(self) -> bool:
        """Whether layers hold their adapters in their own slots: all except experts and the embedding."""
        return self._allocate is not None

    def allocate_slots(self) -> None:
        """Allocate these slots unless they exist. Call this before any step with adapters is captured."""
        if self._allocate is None or self._are_allocated:
            return
        of_experts = {id(layer) for experts in self.experts for layer in (*experts.firsts, *experts.lasts)}
        for layer in self.layers:
            if id(layer) not in of_experts:
                layer.slots = self._allocate(layer)
        self._are_allocated = True

    def begin_step(
        self,
        slots: Sequence[int | None],
        starts: Sequence[int],
        selected_starts: Sequence[int],
        copier: DeviceCopier,
        is_grouped: bool,
    ) -> None:
        """slots: one per sequence, None without an adapter. starts: where each sequence's tokens begin, and the end.
        selected_starts: the same for the selected tokens. is_grouped: whether an adapter may change a layer without
        slots of its own."""
        self._all.begin_sequences(slots, starts, copier, is_grouped, self.has_slots)
        self._selected.begin_sequences(slots, selected_starts, copier, is_grouped, self.has_slots)

    def begin_logits(self, slots: Sequence[int | None], starts: Sequence[int], copier: DeviceCopier) -> None:
        """Call this before the LM head. starts: where each sequence's rows begin among those of the logits, and the
        end."""
        self._logits.begin_sequences(slots, starts, copier, not self.has_slots, self.has_slots)

    def begin_logits_of(self, slot: int | None, device: torch.device) -> None:
        """Call this before the LM head computes only rows of one sequence."""
        if slot is None:
            self._logits.begin([])
        elif not self.has_slots:
            self._logits.begin([SlotRows(slot, None)])
        else:
            self._logits.begin([], slots=torch.full((1,), slot, device=device))

    def begin_captured_step(self, slots: Tensor | None, rows: Tensor | None) -> None:
        """Begin a captured step. slots: (tokens,) int64, the slot of each token, -1 for none; None: the step computes
        only the base model. rows: (rows,) int64, the tokens that the LM head computes; None: all."""
        if slots is None:
            self.end_step()
            return
        self._all.begin([], slots=slots)
        selected = slots if rows is None else slots[rows]
        self._selected.begin([], slots=selected)
        self._logits.begin([], slots=selected)

    def end_step(self) -> None:
        """Compute only the base model from here on."""
        for mapping in (self._all, self._selected, self._logits):
            mapping.begin([])


def _split_rows(y: Tensor, rows: Tensor | None) -> Iterator[slice | Tensor]:
    """Yield indices of these rows of y, (tokens, outputs), a few at a time. None: all rows."""
    num_rows = len(y) if rows is None else len(rows)
    size = count_rows(y.shape[1])
    for start in range(0, num_rows, size):
        chunk = slice(start, start + size)
        yield chunk if rows is None else rows[chunk]


def _add_rows(y: Tensor, chunk: slice | Tensor, product: Tensor) -> None:
    """chunk: as from `_split_rows`."""
    if isinstance(chunk, slice):
        y[chunk] += product
    else:
        y.index_add_(0, chunk, product)
