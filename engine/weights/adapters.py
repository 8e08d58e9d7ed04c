"""Load adapters into the slots of a rank: its part of each product, packed for the model's linear kernels."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from serve_llm.common.adapter_files import AdapterFiles
from serve_llm.common.errors import AdapterError, EngineError
from serve_llm.common.types import Adapter
from serve_llm.engine.lora.adapter_memory import AdapterMemory
from serve_llm.engine.lora.files import AdapterModule, KnownAdapter, parse_known_adapter, start_reading
from serve_llm.engine.lora.hashed_files import HashedFiles
from serve_llm.engine.lora.tensors import AdapterTensor
from serve_llm.engine.model.build import WeightSlice
from serve_llm.engine.model.lora import (
    LoRAEmbedding,
    LoRAEmbeddingWeights,
    LoRALayers,
    LoRALinear,
    LoRAPart,
)
from serve_llm.engine.model.lora_expert_stacks import list_stacked_weights
from serve_llm.engine.model.lora_targets import MAX_READ_ELEMENTS, find_lora_targets, map_parameters
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap, WeightRule
from serve_llm.engine.scheduler.output import NewRequestData
from serve_llm.engine.transfer import DeviceCopier
from serve_llm.engine.weights.parameters import locate
from serve_llm.kernels.lora import ExpansionWeight, LoRAProduct, OutputScale
from serve_llm.kernels.registry import Kernels

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
READS_AT_ONCE = 2  # adapters
Modules: TypeAlias = Mapping[str, AdapterModule]  # by `LoRATarget.module`


class AdapterLoad(NamedTuple):
    """An adapter to load into a slot."""

    slot: int
    adapter: Adapter
    files: AdapterFiles | None = None  # None: read its directory


def list_loads(new_requests: Iterable[NewRequestData]) -> list[AdapterLoad]:
    """List the adapters that a step needs for its new requests."""
    return [
        AdapterLoad(new.adapter_slot, new.adapter, new.adapter_files)
        for new in new_requests
        if new.adapter is not None and new.adapter_slot is not None
    ]


class _BuiltAdapter(NamedTuple):
    """An adapter's products on this rank."""

    products: list[LoRAProduct | None]  # in the order of `LoRALayers.layers`; None where the adapter changes nothing
    embedding: LoRAEmbeddingWeights | None
    needs_groups: bool  # it changes the embedding or experts, whose layers have no slots


class AdapterLoader:
    """Loads adapters into the slots of one rank's device. Keeps more adapters in host memory, so that a slot can be
    filled again without reading files: as built products on a CPU, as the contents of the files on a GPU."""

    def __init__(
        self,
        spec: ModelSpec,
        weight_map: WeightMap,
        layers: LoRALayers,
        kernels: Kernels,
        *,
        max_rank: int,
        dtype: torch.dtype,
        device: torch.device,
        max_kept: int = 0,
        engines: int = 1,
    ) -> None:
        """dtype: the model's. max_kept: limit on adapters in host memory, including those in slots. engines: number
        that share experts."""
        self.layers = layers
        self._targets = find_lora_targets(spec, weight_map, engines=engines)
        self._rules = map_parameters(spec, weight_map)
        self._stacked = list_stacked_weights(weight_map.expand(len(spec.layers)).values())
        self._kernels = kernels
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._slots_with_groups: set[int] = set()  # slots whose adapters need groups, see `_BuiltAdapter`
        self._memory: AdapterMemory[_BuiltAdapter | KnownAdapter] = AdapterMemory(max_kept)
        self._readers = ThreadPoolExecutor(READS_AT_ONCE, "adapter-reader")

    def load(self, loads: Sequence[AdapterLoad]) -> None:
        """Load adapters into their slots unless they are there; threads read the files of several at the same time.
        Raises EngineError, which names the adapter, if its files have changed."""
        reads: dict[str, HashedFiles] = {}
        for load in loads:
            digest = load.adapter.digest
            if not self._memory.is_in_slot(digest, load.slot) and self._memory.find(digest) is None:
                reads[digest] = reads.get(digest) or self._start_reading(load)
        for load in loads:
            self._load(load, reads)

    def _load(self, load: AdapterLoad, reads: Mapping[str, HashedFiles]) -> None:
        slot, adapter, _ = load
        if self._memory.is_in_slot(adapter.digest, slot):
            return
        self._memory.clear(slot)
        kept = self._memory.find(adapter.digest)
        if kept is None:
            kept = self._parse(adapter, reads.get(adapter.digest) or self._start_reading(load))
        built = kept if isinstance(kept, _BuiltAdapter) else self._build_known(kept, adapter)
        for layer, product in zip(self.layers.layers, built.products, strict=True):
            layer.put(slot, product)
        for experts in self.layers.experts:
            experts.update(slot)
        if self.layers.embedding is not None:
            if built.embedding is None:
                self.layers.embedding.products.pop(slot, None)
            else:
                self.layers.embedding.products[slot] = built.embedding
        self._slots_with_groups.discard(slot)
        if built.needs_groups:
            self._slots_with_groups.add(slot)
        self._memory.put(adapter.digest, slot, built if self._device.type == "cpu" else kept)

    def needs_groups(self, slots: Iterable[int | None]) -> bool:
        """Whether an adapter in one of the slots changes a layer that needs rows in groups. All ranks agree."""
        if self.layers.has_slots:
            return not self._slots_with_groups.isdisjoint(slots)
        return any(slot is not None for slot in slots)

    def begin_step(
        self, slots: Sequence[int | None], starts: Sequence[int], selected_starts: Sequence[int], copier: DeviceCopier
    ) -> None:
        """See `LoRALayers.begin_step`."""
        self.layers.begin_step(slots, starts, selected_starts, copier, self.needs_groups(slots))

    def _start_reading(self, load: AdapterLoad) -> HashedFiles:
        return start_reading(self._readers, Path(load.adapter.directory), self._targets, self._max_rank, load.files)

    def _parse(self, adapter: Adapter, files: HashedFiles) -> KnownAdapter:
        """Raises EngineError if the files cannot be read."""
        try:
            return parse_known_adapter(files, Path(adapter.directory), self._targets, self._max_rank)
        except AdapterError as error:
            raise EngineError(f"the adapter {adapter.name} cannot be loaded again: {error}") from error

    def _build_known(self, known: KnownAdapter, adapter: Adapter) -> _BuiltAdapter:
        """Raises EngineError if the files have changed."""
        if any(module.magnitude is not None for module in known.modules.values()):  # takes long, with all threads
            _check_digest(known, adapter)
            return self._build(known.modules)
        num_threads = torch.get_num_threads()
        torch.set_num_threads(1)  # or operations on small tensors would wait for the core that hashes the files
        try:
            built = self._build(known.modules)
        finally:
            torch.set_num_threads(num_threads)
        _check_digest(known, adapter)
        return built

    def _build(self, modules: Modules) -> _BuiltAdapter:
        stacks = _Stacks(modules)
        products = [self._build_product(layer, modules, stacks) for layer in self.layers.layers]
        if not self.layers.has_slots:
            self.layers.kernels.join([product for product in products if product is not None])
        embedding = None
        if self.layers.embedding is not None:
            embedding = self._build_embedding(self.layers.embedding, modules)
        uses_dora = any(module.magnitude is not None for module in modules.values())
        if uses_dora and self.layers.base_weights is not None:
            self.layers.base_weights.release()
        kinds = {self._targets[module].kind for module in modules}
        return _BuiltAdapter(products, embedding, not kinds.isdisjoint(("embedding", "expert", "experts")))

    def _build_product(self, layer: LoRALinear, modules: Modules, stacks: _Stacks) -> LoRAProduct | None:
        """Return None if the adapter does not change the layer."""
        downs: list[Tensor] = []
        columns: dict[str, slice] = {}  # by module: parameters of one merged module share its first product
        expansions = []
        num_columns = 0
        first_output = 0
        for name, part in layer.parts.items():
            outputs = slice(first_output, first_output + len(part.outputs))
            first_output = outputs.stop
            if not part.outputs or not part.inputs:
                continue
            found = self._find_weight(name, modules, stacks)
            if found is None:
                continue
            if found.key not in columns:
                down = found.down[:, part.inputs.start : part.inputs.stop]
                downs.append(down)
                columns[found.key] = slice(num_columns, num_columns + len(down))
                num_columns += len(down)
            up = _read_rows(name, part, found.rule, found.up) * found.scale
            scale = None
            if found.magnitude is not None:
                magnitude = _read_rows(name, part, found.rule, _to_tensor(found.magnitude))
                lengths = self._compute_lengths(name, part, up, found.down)
                factor = torch.where(lengths > 0, magnitude / lengths, 0.0)  # a row of zeros stays unchanged
                up *= factor.unsqueeze(1)
                scale = self._build_scale(layer, outputs, _reorder(layer, name, factor))
            up = self._prepare(_reorder(layer, name, up), layer.dtype)
            expansions.append(ExpansionWeight(columns[found.key], outputs, up, scale))
        if not expansions:
            return None
        return layer.pack(self._prepare(torch.cat(downs), layer.dtype), expansions)

    def _find_weight(self, name: str, modules: Modules, stacks: _Stacks) -> _AdaptedWeight | None:
        """Find what the adapter contains for a parameter of the model."""
        weight = self._stacked.get(name)
        if weight is not None and weight.parameter in modules:
            down, up = stacks.find(weight.parameter, weight.member)
            key = f"{weight.parameter}.{weight.member}"
            return _AdaptedWeight(key, weight.rule, down, up, modules[weight.parameter].scale, None)
        rule = self._rules[name]
        module_name = rule.source.removesuffix(".weight")
        module = modules.get(module_name)
        if module is None:
            return None
        return _AdaptedWeight(
            module_name, rule, _to_tensor(module.down), _to_tensor(module.up), module.scale, module.magnitude
        )

    def _build_embedding(self, layer: LoRAEmbedding, modules: Modules) -> LoRAEmbeddingWeights | None:
        """Return None if the adapter does not change the embedding."""
        module = modules.get(self._rules["embedding.weight"].source.removesuffix(".weight"))
        if module is None:
            return None
        down = _to_tensor(module.down)
        up = _to_tensor(module.up) * module.scale
        scale = None
        if module.magnitude is not None:
            lengths = self._compute_column_lengths(up, down)
            factor = torch.where(lengths > 0, _to_tensor(module.magnitude) / lengths, 0.0)
            up *= factor.unsqueeze(1)
            scale = OutputScale(factor.to(self._device), None)
        own = down[:, layer.ids.start : layer.ids.stop].T
        return LoRAEmbeddingWeights(self._prepare(own), self._kernels.pack(self._prepare(up)), scale)

    def _compute_lengths(self, name: str, part: LoRAPart, up: Tensor, down: Tensor) -> Tensor:
        """Compute the L2 norms of this rank's rows of the weight with the adapter, over all inputs: (outputs,) float32.

        up: this rank's rows, scaled. Every rank reads whole rows, so all compute the same norms.
        """
        base_weights = self.layers.base_weights
        assert base_weights is not None, "adapters are loaded after the model"
        lengths = []
        size = max(1, MAX_READ_ELEMENTS // part.shape[1])
        down = down.to(self._device)
        for start in range(0, len(part.outputs), size):
            changed = torch.mm(up[start : start + size].to(self._device), down)
            changed += base_weights.read_rows(name, part.shape, part.outputs[start : start + size])
            lengths.append(torch.linalg.vector_norm(changed, dim=1))
        return torch.cat(lengths).cpu()

    def _compute_column_lengths(self, up: Tensor, down: Tensor) -> Tensor:
        """Compute the L2 norms of the columns of the embedding with the adapter, over the vocabulary: (size,) float32.

        up: (size, rank), scaled. down: (rank, vocabulary).
        """
        base_weights = self.layers.base_weights
        assert base_weights is not None, "adapters are loaded after the model"
        shape = down.shape[1], up.shape[0]
        step = max(1, MAX_READ_ELEMENTS // shape[1])
        total = torch.zeros(shape[1], device=self._device)
        up = up.to(self._device)
        for start in range(0, shape[0], step):
            rows = range(start, min(start + step, shape[0]))
            changed = torch.mm(down[:, rows.start : rows.stop].to(self._device).T, up.T)
            changed += base_weights.read_rows("embedding.weight", shape, rows)
            total += changed.square_().sum(0)
        return total.sqrt_().cpu()

    def _build_scale(self, layer: LoRALinear, outputs: slice, factor: Tensor) -> OutputScale:
        """factor: (outputs,) in the order of the layer's outputs."""
        factor = factor.to(self._device)
        offset = None if layer.bias is None else (1.0 - factor) * layer.bias[outputs].float()
        return OutputScale(factor, offset)

    def _prepare(self, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """dtype: None for the model's."""
        return weight.to(self._device, dtype or self._dtype).contiguous()


class _AdaptedWeight(NamedTuple):
    """An adapter's change of a weight, for all ranks; see `AdapterModule`."""

    key: str  # the first product, which parameters of one module share
    rule: WeightRule  # the parameter's rows of `up`
    down: Tensor  # (rank, inputs) float32
    up: Tensor  # (outputs of the module, rank) float32
    scale: float
    magnitude: AdapterTensor | None


class _Stacks:
    """The experts' parts of tensors that hold all experts. Tensors of one layer are read at a time."""

    NUM_KEPT = 2  # parameters of a layer

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._read: dict[str, tuple[Tensor, Tensor]] = {}  # by parameter, most recent last

    def find(self, parameter: str, member: int) -> tuple[Tensor, Tensor]:
        """Return `down` and `up` of an expert: (rank, inputs) and (outputs, rank) float32."""
        module = self._modules[parameter]
        if parameter not in self._read:
            if len(self._read) == self.NUM_KEPT:
                del self._read[next(iter(self._read))]
            self._read[parameter] = _to_tensor(module.down), _to_tensor(module.up)
        down, up = self._read[parameter]
        own_down = down.view(module.members, -1, down.shape[1])[member]
        own_up = up.view(up.shape[0], -1, module.members)[..., member]
        return (own_up.T, own_down.T) if module.is_swapped else (own_down, own_up)


def _check_digest(known: KnownAdapter, adapter: Adapter) -> None:
    """Wait for the digest of what was read. Raises EngineError if it is not the checked one."""
    if known.files.digest != adapter.digest:
        raise EngineError(f"the files of the adapter {adapter.name} have changed while it was being loaded")


def _read_rows(name: str, part: LoRAPart, rule: WeightRule, whole: Tensor) -> Tensor:
    """Read this rank's rows of a module's tensor with one row per output, as float32."""
    rule = replace(rule, transform="none", format=None)  # PEFT always stores outputs first
    location = locate(name, rule, (part.shape[0], *whole.shape[1:]), WeightSlice(0, part.outputs))
    rows = location.ranges[0]
    return location.select(whole[rows.start : rows.stop]).contiguous()


def _reorder(layer: LoRALinear, name: str, rows: Tensor) -> Tensor:
    """Put the rows of a parameter into the order of the layer's outputs."""
    for reorder in layer.reorders:
        rows = reorder(name, rows)
    return rows


def _to_tensor(tensor: AdapterTensor) -> Tensor:
    """Convert to float32. The result may be a view of the file's contents."""
    dtype = DTYPES[tensor.dtype]
    if isinstance(tensor.data, memoryview) and not tensor.data.readonly:
        view = torch.frombuffer(tensor.data, dtype=dtype)
        if view.data_ptr() % view.element_size() == 0:
            return view.view(tensor.shape).float()
    return torch.frombuffer(bytearray(tensor.data), dtype=dtype).view(tensor.shape).float()
