"""The spec of a model that runs in transformers' own code."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TransformersSpec:
    """What is known about the model before it is loaded."""

    architecture: str
    vocab_size: int
    max_position: int
    layers: range
    config: object  # transformers' PreTrainedConfig
