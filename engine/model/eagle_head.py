"""An EAGLE-3 head (arXiv:2503.01840).

`fuse` makes one state of three hidden states of the served model; for an id that the head drafted itself, the state is
its own output there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.attention import build_attention
from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.draft_head import DraftHead
from serve_llm.engine.model.eagle_spec import NUM_STATES, EagleSpec
from serve_llm.engine.model.inputs import AttentionInputs
from serve_llm.engine.model.layer import PreNormLayer
from serve_llm.engine.model.mlp import build_mlp
from serve_llm.engine.model.norm import NO_NORM, Norm
from serve_llm.engine.model.rope import build_angles
from serve_llm.engine.model.spec import AttentionSpec, MLPSpec, ModelSpec


@dataclass(eq=False, repr=False, kw_only=True)
class EagleHead(DraftHead):
    """See `DraftHead`."""

    eagle: EagleSpec
    embedding: Tensor
    fuse_states: Forward
    input_norm: Norm  # for embeddings
    hidden_norm: Norm  # for states
    layer: PreNormLayer
    final_norm: Norm
    lm_head: Forward
    target_ids: Tensor | None  # (draft_vocab_size,) int64: the id that each output stands for; None: equal numbers

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return NUM_STATES * self.eagle.target_hidden_size

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftHead.fuse`."""
        return self.fuse_states(states)

    def compute(self, ids: Tensor, attention_inputs: AttentionInputs, rows: Tensor | None) -> Tensor:
        """See `DraftHead.compute`."""
        embedded = functional.embedding(ids, self.embedding)
        states = self.read_states(embedded)
        normed = self.hidden_norm(states)
        residual = normed if self.eagle.norm_before_residual else states
        x = torch.cat((self.input_norm(embedded), normed), dim=-1)
        outputs, _ = self.layer.forward(residual, x, attention_inputs, rows)
        return outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`. Ids that the head cannot draft have the lowest possible logit."""
        logits = self.lm_head(self.final_norm(hidden))
        if self.target_ids is None:
            return logits
        lowest = torch.finfo(logits.dtype).min
        whole = logits.new_full((len(logits), self.spec.vocab_size), lowest)
        whole[:, self.target_ids] = logits
        return whole


def build_eagle_head(spec: ModelSpec, eagle: EagleSpec, builder: ModelBuilder, target_ids: Tensor | None) -> EagleHead:
    """target_ids: see `EagleHead`."""
    layer = spec.layers[0]
    assert isinstance(layer.attention, AttentionSpec) and isinstance(layer.ffn, MLPSpec)
    assert layer.attention.rope is not None and spec.final_norm is not None
    width = spec.hidden_size
    own = builder.scoped("layers.0")
    attention = build_attention(layer.attention, width, own.scoped("attention"), input_size=2 * width)
    ffn = build_mlp(layer.ffn, width, own.scoped("ffn"))
    return EagleHead(
        spec=spec,
        eagle=eagle,
        embedding=builder.table("embedding.weight", spec.vocab_size, width),
        fuse_states=builder.replicated_linear("fc", width, NUM_STATES * eagle.target_hidden_size),
        input_norm=own.norm("attention_norm", layer.norm, width),
        hidden_norm=own.norm("hidden_norm", layer.norm, width),
        layer=PreNormLayer(attention, ffn, NO_NORM, own.norm("ffn_norm", layer.norm, width)),
        compute_angles=build_angles(
            layer.attention.rope, layer.attention.rope_dim, builder.device, builder.kernels.compute_angles
        ),
        final_norm=builder.norm("final_norm", spec.final_norm, width),
        lm_head=builder.replicated_linear("head", eagle.draft_vocab_size, width),
        target_ids=target_ids,
        capturable=builder.kernels.capturable,
    )
