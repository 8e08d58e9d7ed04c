"""A multi-token prediction (MTP) layer (DeepSeek-V3, arXiv:2412.19437, section 2.2) with its embedding and LM head.

Row q of a sequence has the embedding of id q + 1 and the state of id q, and predicts id q + 2. A state is the served
model's last hidden state after its final norm, or for an id that the head drafted itself, its own output there after
the norm of its LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.decoder import build_lm_head
from serve_llm.engine.model.inputs import AttentionInputs, StepInputs
from serve_llm.engine.model.layer import DecoderLayer, build_layer
from serve_llm.engine.model.norm import Norm
from serve_llm.engine.model.pooler import Pooler
from serve_llm.engine.model.rope import ComputeAngles, build_angles
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.vocabulary import VocabularyTables
from serve_llm.kernels.embedding_table import LookUp


@dataclass(eq=False, repr=False)
class MTPHead:
    """See `DraftHead`."""

    spec: ModelSpec
    look_up: LookUp  # rows of the embedding
    model_norm: Norm  # the served model's final norm
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Forward
    layer: DecoderLayer  # its `next_norm` is the LM head's
    compute_angles: ComputeAngles
    lm_head: Sequence[Forward]
    capturable: bool  # reads nothing back from the device, but `states` is a different tensor in each step
    collected_layers: tuple[int, ...] = ()
    collected: list[Tensor] = field(default_factory=list)
    pooler: Pooler | None = None
    states: Tensor | None = field(default=None, init=False)
    outputs: Tensor | None = field(default=None, init=False)

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return self.spec.hidden_size

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftHead.fuse`. states: the output of the served model's last layer."""
        return self.model_norm(states)

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """See `Decoder.forward`. Returns normed hidden states."""
        return self.run_layers(inputs, caches, rows, None)

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """See `Decoder.run_layers`."""
        embedded = self.look_up(inputs.ids)
        states = torch.zeros_like(embedded) if self.states is None else self.states
        hidden = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(states)), dim=-1))
        attention_inputs = AttentionInputs(
            inputs, inputs.groups[0], caches[0], self.compute_angles(inputs.positions), None
        )
        _, self.outputs = self.layer.forward(hidden, self.layer.input_norm(hidden), attention_inputs, rows)
        return self.outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        for step in self.lm_head:
            hidden = step(hidden)
        return hidden

    def receive(self, num_tokens: int) -> Tensor | None:
        """See `Decoder.receive`: there is one stage."""

    def send(self, hidden: Tensor) -> None:
        """See `Decoder.send`."""

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        """See `Decoder.run_without_tokens`: the head has all its experts on this rank."""


def build_mtp_head(model: ModelSpec, builder: ModelBuilder) -> MTPHead:
    """model: `MTPSpec.model`. builder: loads the parameters of `MTPSpec.weights`."""
    spec = replace(model, layers=model.layers[-1:])
    layer_spec = spec.layers[0]
    attention = layer_spec.attention
    assert attention.rope is not None and spec.final_norm is not None
    width = spec.hidden_size
    own = builder.scoped("mtp")
    layer = build_layer(layer_spec, width, builder.scoped(f"layers.{len(model.layers) - 1}"))
    layer.next_norm = own.norm("final_norm", spec.final_norm, width)
    tables = VocabularyTables(spec, builder)
    look_up = tables.load_embedding(has_head=True)
    reads_back = any(experts.reads_back for experts in builder.experts)
    return MTPHead(
        spec=spec,
        look_up=look_up,
        model_norm=builder.norm("final_norm", spec.final_norm, width),
        embedding_norm=own.norm("embedding_norm", layer_spec.norm, width),
        hidden_norm=own.norm("hidden_norm", layer_spec.norm, width),
        projection=own.unquantised_linear({"projection": width}, 2 * width),
        layer=layer,
        compute_angles=build_angles(attention.rope, attention.rope_dim, builder.device),
        lm_head=build_lm_head(spec, tables),
        capturable=builder.kernels.capturable and not reads_back,
    )
