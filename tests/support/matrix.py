"""The long matrix: what is tested for every family, and what only for a few unless `-m slow` asks for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# One of each kind: plain, windows, layer norms and learned positions, norms on both sides, experts, latent attention,
# sinks.
FEW = ("llama", "mistral", "gpt2", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss")


def mostly_slow(values: Iterable[Any], fast: Collection[Any] = FEW) -> list[Any]:
    """Values for `parametrize`, with all but the fast ones marked as slow."""
    return [value if value in fast else pytest.param(*_as_tuple(value), marks=pytest.mark.slow) for value in values]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
