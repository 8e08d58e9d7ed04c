"""A draft head: a decoder layer over embeddings of ids and hidden states of the served model, run by `HeadDraftModel`.

Row q of a sequence has the embedding of id q + 1 and the state of id q, and predicts id q + 2.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from serve_llm.engine.model.inputs import AttentionInputs, StepInputs
from serve_llm.engine.model.pooler import Pooler
from serve_llm.engine.model.rope import ComputeAngles
from serve_llm.engine.model.spec import ModelSpec


@dataclass(eq=False, repr=False, kw_only=True)
class DraftHead(ABC):
    """An `EagleHead` or an `MTPHead`, with the methods of a `Decoder` of one stage."""

    spec: ModelSpec
    compute_angles: ComputeAngles
    capturable: bool  # reads nothing back from the device, but `states` is a different tensor in each step
    collected_layers: tuple[int, ...] = ()
    collected: list[Tensor] = field(default_factory=list)
    pooler: Pooler | None = None
    # (tokens, hidden_size), set before each step; None: zeros, to measure memory
    states: Tensor | None = field(default=None, init=False)
    outputs: Tensor | None = field(default=None, init=False)  # (rows, hidden_size): states after the last step

    @property
    @abstractmethod
    def state_size(self) -> int:
        """Size of the state that the served model sends for each token."""

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """(tokens, state_size) -> (tokens, hidden_size)."""

    @abstractmethod
    def compute(self, ids: Tensor, attention_inputs: AttentionInputs, rows: Tensor | None) -> Tensor:
        """Return `outputs`."""

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """See `Decoder.logits`."""

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor:
        """See `Decoder.forward`."""
        return self.run_layers(inputs, caches, rows, None)

    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor:
        """See `Decoder.run_layers`."""
        angles = self.compute_angles(inputs.positions)
        attention_inputs = AttentionInputs(inputs, inputs.groups[0], caches[0], angles, None)
        self.outputs = self.compute(inputs.ids, attention_inputs, rows)
        return self.outputs

    def read_states(self, embedded: Tensor) -> Tensor:
        """Return `states`, which have the shape of the embeddings."""
        return torch.zeros_like(embedded) if self.states is None else self.states

    def receive(self, num_tokens: int) -> Tensor | None:
        """See `Decoder.receive`."""
        return None

    def send(self, hidden: Tensor) -> None:
        """See `Decoder.send`."""
        return

    def run_without_tokens(self, dtype: torch.dtype) -> None:
        """See `Decoder.run_without_tokens`: all experts, if any, are on this rank."""
        return
