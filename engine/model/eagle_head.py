"""An EAGLE-3 head (arXiv:2503.01840): a decoder layer over embeddings of ids and hidden states of the served model.

Row q of a sequence has the embedding of id q + 1 and the state of id q, and predicts id q + 2. `fuse` makes one state
of three hidden states of the served model; for an id that the head drafted itself, the state is its own output there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from serve_llm.engine.model.attention import build_attention
from serve_llm.engine.model.build import Forward, ModelBuilder
from serve_llm.engine.model.eagle_spec import NUM_STATES, EagleSpec
from serve_llm.engine.model.inputs import AttentionInputs, StepInputs
from serve_llm.engine.model.layer import PreNormLayer
from serve_llm.engine.model.mlp import build_mlp
from serve_llm.engine.model.norm import NO_NORM, Norm
from serve_llm.engine.model.pooler import Pooler
from serve_llm.engine.model.rope import ComputeAngles, build_angles
from serve_llm.engine.model.spec import AttentionSpec, MLPSpec, ModelSpec


@dataclass(eq=False, repr=False)
class EagleHead:
    """See `DraftHead`."""

    spec: ModelSpec
    eagle: EagleSpec
    embedding: Tensor
    fuse_states: Forward
    input_norm: Norm  # for embeddings
    hidden_norm: Norm  # for states
    layer: PreNormLayer
    compute_angles: ComputeAngles
    final_norm: Norm
    lm_head: Forward
    target_ids: Tensor | None  # (draft_vocab_size,) int64: the id that each output stands for; None: equal numbers
    capturable: bool  # reads nothing back from the device, but `states` is a different tensor in each step
    collected_layers: tuple[int, ...] = ()
    collected: list[Tensor] = field(default_factory=list)
    pooler: Pooler | None = None
    states: Tensor | None = field(default=None, init=False)
    outputs: Tensor | None = field(default=None, init=False)

    @property
    def state_size(self) -> int:
        """See `DraftHead.state_size`."""
        return NUM_STATES * self.eagle.target_hidden_size

    def fuse(self, states: Tensor) -> Tensor:
        """See `DraftHead.fuse`."""
        return self.fuse_states(states)

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """See `Decoder.forward`."""
        return self.run_layers(inputs, caches, rows, None)

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """See `Decoder.run_layers`."""
        embedded = functional.embedding(inputs.ids, self.embedding)
        states = torch.zeros_like(embedded) if self.states is None else self.states
        normed = self.hidden_norm(states)
        residual = normed if self.eagle.norm_before_residual else states
        x = torch.cat((self.input_norm(embedded), normed), dim=-1)
        attention_inputs = AttentionInputs(
            inputs, inputs.groups[0], caches[0], self.compute_angles(inputs.positions), None
        )
        self.outputs, _ = self.layer.forward(residual, x, attention_inputs, rows)
        return self.outputs

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`. Ids that the head cannot draft have the lowest possible logit."""
        logits = self.lm_head(self.final_norm(hidden))
        if self.target_ids is None:
            return logits
        lowest = torch.finfo(logits.dtype).min
        whole = logits.new_full((len(logits), self.spec.vocab_size), lowest)
        whole[:, self.target_ids] = logits
        return whole

    def receive(self, num_tokens: int) -> Tensor | None:
        """See `Decoder.receive`: there is one stage."""

    def send(self, hidden: Tensor) -> None:
        """See `Decoder.send`."""

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        """See `Decoder.run_without_tokens`: a head has no experts."""


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
        compute_angles=build_angles(layer.attention.rope, layer.attention.rope_dim, builder.device),
        final_norm=builder.norm("final_norm", spec.final_norm, width),
        lm_head=builder.replicated_linear("head", eagle.draft_vocab_size, width),
        target_ids=target_ids,
        capturable=builder.kernels.capturable,
    )
