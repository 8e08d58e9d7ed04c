"""Loading adapters into the slots of a rank: its part of each product, packed for the model's linear kernels."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve_llm.common.errors import AdapterError, EngineError
from serve_llm.common.types import Adapter
from serve_llm.engine.lora.files import AdapterContents, AdapterModule, AdapterTensor, read_adapter
from serve_llm.engine.model.build import Part
from serve_llm.engine.model.lora import Expansion, LoRALayers, LoRALinear, LowRankProduct
from serve_llm.engine.model.lora_targets import find_lora_targets, map_parameters
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.weight_map import WeightMap
from serve_llm.engine.weights.parameters import locate
from serve_llm.kernels.registry import Kernels

DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


class AdapterLoader:
    """The adapters of one rank."""

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
    ) -> None:
        """dtype: the model's."""
        self.layers = layers
        self._targets = find_lora_targets(spec, weight_map)
        self._rules = map_parameters(spec, weight_map)
        self._kernels = kernels
        self._max_rank = max_rank
        self._dtype = dtype
        self._device = device
        self._digests: dict[int, str] = {}  # by slot

    def load(self, slot: int, adapter: Adapter) -> None:
        """Put the adapter into the slot, unless it is there. Raises EngineError if its files are not what they were."""
        if self._digests.get(slot) == adapter.digest:
            return
        self._digests.pop(slot, None)
        try:
            contents = read_adapter(Path(adapter.directory), self._targets, self._max_rank)
        except AdapterError as error:
            raise EngineError(f"the adapter {adapter.name} cannot be loaded again: {error}") from error
        if contents.digest != adapter.digest:
            raise EngineError(f"the files of the adapter {adapter.name} have changed while it was being loaded")
        for layer in self.layers.layers:
            product = self._build_product(layer, contents)
            if product is None:
                layer.products.pop(slot, None)
            else:
                layer.products[slot] = product
        self._digests[slot] = adapter.digest

    def _build_product(self, layer: LoRALinear, contents: AdapterContents) -> LowRankProduct | None:
        """None if the adapter does not change the layer."""
        downs: list[Tensor] = []
        columns: dict[str, slice] = {}  # by module: parts of one joint module share its first product
        expansions = []
        num_columns = 0
        first_output = 0
        for name, part in layer.parts.items():
            outputs = slice(first_output, first_output + len(part.outputs))
            first_output = outputs.stop
            module_name = self._rules[name].source.removesuffix(".weight")
            module = contents.modules.get(module_name)
            if module is None or not part.outputs:
                continue
            if module_name not in columns:
                down = _to_tensor(module.down)[:, part.inputs.start : part.inputs.stop]
                downs.append(down)
                columns[module_name] = slice(num_columns, num_columns + len(down))
                num_columns += len(down)
            up = self._kernels.pack(self._prepare(self._read_up(layer, name, module)))
            expansions.append(Expansion(columns[module_name], outputs, up))
        if not expansions:
            return None
        return LowRankProduct(self._kernels.pack(self._prepare(torch.cat(downs))), tuple(expansions))

    def _read_up(self, layer: LoRALinear, name: str, module: AdapterModule) -> Tensor:
        """This rank's rows of the second product's weight, times the scale, in the order of the layer's outputs."""
        part = layer.parts[name]
        whole = _to_tensor(module.up)
        rule = replace(self._rules[name], transform="none", format=None)  # PEFT stores (outputs, rank) in any case
        location = locate(name, rule, (part.shape[0], whole.shape[1]), Part(0, part.outputs))
        rows = location.ranges[0]
        up = location.select(whole[rows.start : rows.stop])
        for reorder in layer.reorders:
            up = reorder(name, up.contiguous())
        return up * module.scale

    def _prepare(self, weight: Tensor) -> Tensor:
        return weight.to(self._device, self._dtype).contiguous()


def _to_tensor(tensor: AdapterTensor) -> Tensor:
    """As float32."""
    return torch.frombuffer(bytearray(tensor.data), dtype=DTYPES[tensor.dtype]).view(tensor.shape).float()
