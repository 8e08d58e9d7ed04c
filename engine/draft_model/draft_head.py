"""The interface of a head that `HeadDraftModel` runs: a decoder layer that reads hidden states of the served model."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from serve_llm.engine.model.spec import ModelSpec
from serve_llm.engine.worker.runnable_model import RunnableModel


class DraftHead(RunnableModel, Protocol):
    """An `EagleHead` or an `MTPHead`."""

    spec: ModelSpec
    states: Tensor | None  # (tokens, hidden_size), set before each step; None: zeros, to measure memory
    outputs: Tensor | None  # (rows, hidden_size): states after the last step

    @property
    def state_size(self) -> int:
        """Size of the state that the served model sends for each token."""

    def fuse(self, states: Tensor) -> Tensor:
        """(tokens, state_size) -> (tokens, hidden_size)."""
