"""The long matrix: what is tested of every family, and what only of a few unless `-m slow` asks for the rest."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# One of each kind: plain, windows, layer norms and learned positions, norms on both sides, experts, latent attention,
# sinks.
FEW = ("llama", "mistral", "gpt2", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss")


def mostly_slow(values: Iterable[Any], fast: Collection[Any] = FEW) -> list[Any]:
    """For `parametrize`: the values, all but the fast ones marked as slow."""
    return [value if value in fast else pytest.param(*_as_tuple(value), marks=pytest.mark.slow) for value in values]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
