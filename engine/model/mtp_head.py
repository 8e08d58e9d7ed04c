"""A multi-token prediction (MTP) layer (DeepSeek-V3, arXiv:2412.19437, section 2.2) with its embedding and LM head.

A state is the served model's last hidden state after its final norm, or for an id that the head drafted itself, its own
output there after the norm of its LM head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.decoder import build_lm_head
from serve_llm.engine.model.draft_head import DraftHead
from serve_llm.engine.model.inputs import AttentionInputs
from serve_llm.engine.model.layer import DecoderLayer, build_layer
from serve_llm.engine.model.norm import Norm
from serve_llm.engine.model.rope import build_angles
from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.model.vocabulary import VocabularyTables
from serve_llm.kernels.embedding_table import LookUp


@dataclass(eq=False, repr=False, kw_only=True)
class MTPHead(DraftHead):
    """See `DraftHead`."""

    look_up: LookUp  # rows of the embedding
    model_norm: Norm  # the served model's final norm
    embedding_norm: Norm
    hidden_norm: Norm
    projection: Forward
    layer: DecoderLayer  # its `next_norm` is the LM head's
    lm_head: Sequence[Forward]

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return self.spec.hidden_size

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftHead.fuse`. states: the output of the served model's last layer."""
        return self.model_norm(states)

    def compute(self, ids: Tensor, attention_inputs: AttentionInputs, rows: Tensor | None) -> Tensor:
        """See `DraftHead.compute`. Returns normed hidden states."""
        embedded = self.look_up(ids)
        states = self.read_states(embedded)
        hidden = self.projection(torch.cat((self.embedding_norm(embedded), self.hidden_norm(states)), dim=-1))
        _, outputs = self.layer.forward(hidden, self.layer.input_norm(hidden), attention_inputs, rows)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""
        for step in self.lm_head:
            hidden = step(hidden)
        return hidden


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
        compute_angles=build_angles(attention.rope, attention.rope_dim, builder.device, builder.kernels.compute_angles),
        lm_head=build_lm_head(spec, tables),
        capturable=builder.kernels.capturable and not reads_back,
    )
