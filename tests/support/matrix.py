"""The long matrix: what is tested for every family, and what only for a few families unless `-m slow` or `-m long` is
given."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest

# One of each kind: plain, windows, layer norms and learned positions, norms on both sides, experts, latent attention,
# sinks.
FEW = ("llama", "mistral", "gpt2", "gemma3_text", "mixtral", "deepseek_v3", "gpt_oss")


def mostly_slow(values: Iterable[Any], fast: Collection[Any] = FEW) -> list[Any]:
    """Return values for `parametrize`, with all but the fast ones marked as slow."""
    return _mark_others(values, fast, pytest.mark.slow)


def mostly_long(values: Iterable[Any], others: Collection[Any]) -> list[Any]:
    """Return values for `parametrize`, with all but the others marked as long."""
    return _mark_others(values, others, pytest.mark.long)


def _mark_others(values: Iterable[Any], unmarked: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    return [value if value in unmarked else pytest.param(*_as_tuple(value), marks=mark) for value in values]


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)
