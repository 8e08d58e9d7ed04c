"""What is known of a model that transformers' own code computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PretrainedSpec:
    """What is known of a model in transformers' own code before it is loaded."""

    architecture: str
    vocab_size: int
    max_position: int
    layers: range
    config: object  # transformers' PreTrainedConfig
