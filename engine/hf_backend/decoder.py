"""A decoder that runs transformers' own code, with its attention replaced by our attention over our KV cache.

transformers calls attention functions by name. The function registered here forwards each call to the `step` argument
that the model's forward passes through, so there is no global state. `probe` finds out beforehand which modules call
it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.pooler import Pooler
from serve_llm.engine.model.spec import KVGroup
from serve_llm.kernels.linear import Linear
from serve_llm.kernels.registry import Kernels

NAME = "serve_llm"  # name under which our attention is registered in transformers


@dataclass(frozen=True)
class AttentionCall:
    """The arguments of one layer's call of the attention function."""

    module: nn.Module
    query: Tensor  # (heads, tokens, head_dim)
    key: Tensor  # (kv_heads, tokens, head_dim)
    value: Tensor  # (kv_heads, tokens, no more than head_dim)
    mask: Tensor | None  # from the mask function registered with the attention
    scale: float
    softcap: float | None
    sinks: Tensor | None
    others: Mapping[str, object]  # ignored; the probe checks that they have no effect


class AttentionStep(Protocol):
    """A running step."""

    def attend(self, call: AttentionCall) -> Tensor:
        """The attention of one layer: (tokens, heads, value's dim) of the query's dtype."""
        ...


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    step: AttentionStep | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: object,
) -> tuple[Tensor, None]:
    """transformers' interface of attention functions: tensors (1, heads, tokens, dim), result (1, tokens, heads, dim).
    `step` is ours, an argument of the model's forward that it passes through."""
    if step is None:
        raise TypeError("the model does not pass arguments of forward on to attention functions")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    call = AttentionCall(module, query[0], key[0], value[0], attention_mask, scale, softcap, s_aux, others)
    return step.attend(call).unsqueeze(0).contiguous(), None


AttentionInterface.register(NAME, attend)


@dataclass(frozen=True)
class AttentionShape:
    """The shape of one layer's attention, as found by the probe."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None


def kv_groups(attention_shapes: Sequence[AttentionShape]) -> tuple[KVGroup, ...]:
    """The KV groups of layers in the order of their attention; see `ModelSpec.kv_groups`."""
    members: dict[tuple[int, int, int | None], list[int]] = {}
    for index, shape in enumerate(attention_shapes):
        members.setdefault((shape.kv_heads, shape.head_dim, shape.window), []).append(index)
    return tuple(KVGroup(tuple(layers), *key) for key, layers in members.items())


class TransformersDecoder:
    """See `Decoder`: ids and cached keys and values in, hidden rows and logits out."""

    capturable = False  # transformers' code may read back from the device
    pooler: Pooler | None = None
    collected_layers: tuple[int, ...] = ()

    def __init__(
        self,
        body: PreTrainedModel,
        head: PreTrainedModel,
        attention_shapes: Mapping[nn.Module, AttentionShape],
        kernels: Kernels,
        dtype: torch.dtype,
    ) -> None:
        """body, head: as `split_model` gives them, on their device. attention_shapes: by module that calls
        attention, in order. dtype: the model's and its cache's."""
        body.set_attn_implementation(NAME)
        self._body = body
        self.collected: list[Tensor] = []
        self._head = head
        self.kv_groups = kv_groups(list(attention_shapes.values()))
        self.attention_shapes = attention_shapes
        self.kernels = kernels
        self.dtype = dtype
        self.layer_of = {module: index for index, module in enumerate(attention_shapes)}
        self.group_of = {layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers}

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """See `Decoder.forward`."""
        step = _StepContext(self, inputs, caches)
        ids = inputs.ids.unsqueeze(0)
        positions = inputs.positions.unsqueeze(0)
        hidden: Tensor = self._body(input_ids=ids, position_ids=positions, use_cache=False, step=step)[0][0]
        return hidden if rows is None else hidden[rows]

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        return compute_logits(self._head, hidden)

    def receive(self, num_tokens: int) -> Tensor | None:
        """See `Decoder.receive`: there is one stage."""

    def send(self, hidden: Tensor) -> None:
        """See `Decoder.send`."""

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """See `Decoder.run_layers`."""
        return self.forward(inputs, caches, rows)

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        """See `Decoder.run_without_tokens`: this model has no experts that other engines use."""


def compute_logits(head: PreTrainedModel, hidden: Tensor) -> Tensor:
    """head: as `split_model` gives it. hidden: (rows, width) -> (rows, vocabulary)."""
    logits: Tensor = head(inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits[0]
    return logits


@dataclass(frozen=True)
class _StepContext:
    decoder: TransformersDecoder
    inputs: StepInputs
    caches: Sequence[Tensor]

    def attend(self, call: AttentionCall) -> Tensor:
        decoder = self.decoder
        inputs = self.inputs
        shape = decoder.attention_shapes[call.module]
        layer = decoder.layer_of[call.module]
        cache = self.caches[layer]
        group = inputs.groups[decoder.group_of[layer]]
        value_dim = call.value.shape[-1]
        value = functional.pad(call.value, (0, shape.head_dim - value_dim))  # keys and values share a cache row size
        joint = torch.cat((call.query, call.key, value)).to(decoder.dtype).transpose(0, 1).flatten(1)
        query = decoder.kernels.rope_and_cache(joint, shape.heads, None, None, cache, group.slots)
        mixed = decoder.kernels.paged_attention(
            query,
            cache,
            group.block_table,
            inputs.query_starts,
            inputs.context_lens,
            scale=call.scale,
            window=shape.window,
            softcap=call.softcap,
            sinks=None if call.sinks is None else call.sinks.float(),
            on_device=inputs.lengths,
        )
        return mixed[..., :value_dim].to(call.query.dtype)


def split_model(model: PreTrainedModel) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Split a model into its layers and the head that computes logits from their output. The head is the same model
    with layers that return their `inputs_embeds`."""
    body: PreTrainedModel = model.base_model
    setattr(model, model.base_model_prefix, _Passage())
    return body, model


class _Passage(nn.Module):
    def forward(self, *ids: None, inputs_embeds: Tensor, **others: Any) -> _Hidden:
        return _Hidden(last_hidden_state=inputs_embeds)


class _Hidden(MoeModelOutputWithPast):  # type: ignore[misc]
    """Other outputs of the layers are None; the probe detects a head that needs them."""

    def __getattr__(self, name: str) -> None:
        return None


class PackedLinear(nn.Module):
    """Replaces a torch.nn.Linear by our linear layer, whose rows do not depend on each other."""

    def __init__(self, product: Linear, weight: Tensor) -> None:
        super().__init__()
        self.product = product
        self.weight = weight.new_empty(0)  # some models read its dtype

    def forward(self, x: Tensor) -> Tensor:
        y = self.product(x.reshape(-1, x.shape[-1]))
        return y.view(*x.shape[:-1], y.shape[-1])


@torch.inference_mode()
def pack_linears(model: nn.Module, linears: Set[nn.Module], kernels: Kernels, dtype: torch.dtype) -> None:
    """Replace those `linears` that have this dtype by PackedLinear, one at a time, so that only one weight is briefly
    held twice."""
    # Not the layers themselves, because the list would keep their weights alive.
    for module in [module for module in model.modules() if module not in linears]:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and child in linears and child.weight.dtype == dtype:
                bias = None if child.bias is None else child.bias.detach()
                setattr(module, name, PackedLinear(kernels.pack(child.weight.detach(), bias), child.weight))
