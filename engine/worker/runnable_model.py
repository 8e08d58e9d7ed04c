"""What `ModelRunner` needs from a model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from serve_llm.engine.model.inputs import StepInputs
from serve_llm.engine.model.pooler import Pooler


class RunnableModel(Protocol):
    """The model of a rank: a `Decoder`, which documents these methods, or a `TransformersDecoder`."""

    capturable: bool  # a step may be captured, or recorded on a CPU: nothing is read back
    pooler: Pooler | None
    collected_layers: tuple[int, ...]
    collected: list[Tensor]

    def forward(self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None = None) -> Tensor: ...
    def receive(self, num_tokens: int) -> Tensor | None: ...
    def run_layers(
        self, inputs: StepInputs, caches: Sequence[Tensor], rows: Tensor | None, received: Tensor | None
    ) -> Tensor: ...
    def send(self, hidden: Tensor) -> None: ...
    def logits(self, hidden: Tensor) -> Tensor: ...
    def run_without_tokens(self, dtype: torch.dtype) -> None: ...
